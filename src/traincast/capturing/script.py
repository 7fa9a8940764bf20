"""An existing training script or loop as it is, recorded at one size or at several."""

from __future__ import annotations

import multiprocessing.context
import os
import re
import runpy
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from traincast.capturing.assumptions import Assume, get_assumptions, use_assumptions
from traincast.capturing.batch_places import BatchPlaces
from traincast.capturing.distributed import capture_ranks
from traincast.capturing.global_state import keep_precision_switches, list_tf32_arithmetic
from traincast.capturing.loop_recorder import record_loop_step
from traincast.capturing.metadata_cache import share_metadata_cache
from traincast.capturing.ranks import Place
from traincast.capturing.rebatch import hold_prints, rebatch_programs, report_run
from traincast.capturing.step import adapt_to_sizes, check_request, freeze_existing_objects
from traincast.capturing.torchrec_steps import import_pipelines
from traincast.ir.ops import StorageKind
from traincast.ir.program import Program
from traincast.ir.workload import Workload
from traincast.utils.errors import TraincastError
from traincast.utils.memory import read_free_memory_bytes, read_most_memory_bytes

BATCH_SIZE, SEQ_LEN = "{batch_size}", "{seq_len}"
"""What stands for the sizes in the arguments of a script that is to be run at several."""
_ONE_RUN = (
    f"recorded at one size only: where the script has its batch size was not found; write {BATCH_SIZE} among its own "
    "arguments where they have it, and it is run at several"
)
_ONE_SAMPLE = "recorded at one size only: what its model is given has one sample, and every 1 of a script may mean that"
_LONG_RUN_S, _LONG_RUNS_S = 30.0, 60.0  # of one run, and of those of all ranks and sizes so far
_LONG_RUN = (
    "recorded at one size only: runs took {:.0f} s of CPU; write {} among the script's own arguments where they have "
    "it, and it is run at several"
)
_OF_FREE = 0.7  # of what is free, what a run at a larger size may take beside what its process has held
_TOO_LARGE = "recorded at one size only: at batch size {} the script's data may not fit in this machine's memory"
NO_GPUS = "ranks to capture are those of a step on several GPUs; say how many with `gpus`"
_ONE_BLOCK = "recorded at one size only; traincast.record(loop, batch_size=...) runs a loop at several"
_SAME = (
    "the step recorded is the same at batch sizes {} and {}, so the batch size does not reach it; make model and "
    "inputs depend on it"
)
_GRAPHS = re.compile(r"\b(CUDAGraph|make_graphed_callables|cuda\.graph)\(")
_NO_GRAPHS = (
    "the script makes CUDA graphs, which cannot be captured: recorded is a step before them, whose kernels the host "
    "launches one by one (the edit cuda-graph of a what-if predicts it with a graph)"
)
Loop = Callable[[int, int], object]


@dataclass
class Recording:
    """Where `recording` puts what it has recorded: `record_workload` once the block has ended."""

    workload: Workload | None = None


@contextmanager
def recording(
    *, batch_size: int = 1, seq_len: int = 0, name: str = "recorded", assume: Assume | None = None
) -> Iterator[Recording]:
    """Records one step of the training loop inside the block, without a GPU; the block ends with it.

    Model and optimizer must be built inside, on `cuda`. The step is what runs between the second and the third call of
    the optimizer that is called first; `batch_size` and `seq_len` say what size that is, which the result keeps. It is
    `record_workload` of what the block is given. For several sizes, see `record`.
    """
    found = Recording()
    with use_assumptions(assume) as assumed, freeze_existing_objects():
        with record_loop_step(batch_size, seq_len, default_cuda=False) as watch:
            yield found
        if watch.without_cuda:
            raise TraincastError('the loop uses no device "cuda"; move its model and inputs there')
        found.workload = _make_workload(replace(watch.program, rigid=_ONE_BLOCK), name, assumed.texts)


def record(
    loop: Callable[..., Any], *, batch_size: int, seq_len: int | None = None, name: str | None = None,
    assume: Assume | None = None,
) -> Workload:  # fmt: skip
    """Records one step of `loop(batch_size)` or `loop(batch_size, seq_len)`, a function that builds model and optimizer
    and trains, without a GPU. It is run at several sizes, each until its optimizer has been called three times, so that
    the workload can be resized."""
    check_request("training", batch_size, seq_len)
    train = adapt_to_sizes(loop, seq_len)
    named = name or str(getattr(loop, "__name__", "recorded"))
    return _LoopRecording(train, batch_size, seq_len or 0, lengths=seq_len is not None).record_workload(named, assume)


def capture_script(
    file: str, arguments: Sequence[str], *, batch_size: int | None = None, seq_len: int = 0, name: str | None = None,
    assume: Assume | None = None, gpus: int | None = None, ranks: Sequence[int] | None = None,
) -> Workload:  # fmt: skip
    """Runs a script as `python FILE ARGUMENTS` until its optimizer has been called three times, and records the step
    between the last two. With `{batch_size}` (and `{seq_len}`) among the arguments it is run at several sizes, else at
    the one that its arguments say. With a number of `gpus` it is run once for every rank, or for each of `ranks`, as
    `torchrun` would start it; its batch size is that of one rank. Without a `batch_size` it is taken to be the first
    dimension of what the model is given. Give only your own files."""
    path = Path(file)
    if not path.is_file():
        raise TraincastError(f"no file {file}; give a Python script, or FILE.py:FUNCTION")
    check_request("training", 1 if batch_size is None else batch_size, seq_len or None)
    sized, lengths = (any(place in argument for argument in arguments) for place in (BATCH_SIZE, SEQ_LEN))
    if lengths and not (sized and seq_len):
        what = f"{BATCH_SIZE} among them too" if seq_len else "a sequence length as well (`seq_len`)"
        raise TraincastError(f"the script's arguments have {SEQ_LEN}; give {what}")

    if sized and batch_size is None:
        raise TraincastError(f"the script's arguments have {BATCH_SIZE}; give a batch size as well (`batch_size`)")
    import_pipelines(path)

    def run(batch: int, length: int) -> None:
        told = [a.replace(BATCH_SIZE, str(batch)).replace(SEQ_LEN, str(length)) for a in arguments]
        with _run_as_main(path, told if places is None else places.change_arguments(told)):
            runpy.run_path(str(path), run_name="__main__")

    places = None if sized else BatchPlaces()
    recorded = _LoopRecording(run, batch_size or 0, seq_len, lengths=lengths, places=places)
    if gpus is None and ranks is not None:
        raise TraincastError(NO_GPUS)
    workload = recorded.record_workload(name or path.stem, assume, gpus, ranks)
    graphs = _GRAPHS.search(path.read_text(encoding="utf-8", errors="replace"))
    return replace(workload, assumptions=(*workload.assumptions, _NO_GRAPHS)) if graphs else workload


class _LoopRecording:
    """The step of a loop on one GPU or on every rank of several, at several batch sizes and `lengths`; the batch size
    of a loop that is not told it is changed at its `places`."""

    def __init__(
        self, loop: Loop, batch: int, length: int, *, lengths: bool, places: BatchPlaces | None = None
    ) -> None:
        self._loop, self._asked, self._lengths, self._places = loop, (batch, length), lengths, places
        self._fixed, self._spent = "", 0.0  # why the loop cannot be run at other sizes; seconds of CPU so far
        self._tf32: list[tuple[str, ...]] = []
        self._firsts: dict[int, Program] = {}  # by rank
        self._mode = "training"

    def record_workload(
        self, name: str, assume: Assume | None, gpus: int | None = None, ranks: Sequence[int] | None = None
    ) -> Workload:
        """Records; rejected where another batch size changes nothing."""
        with use_assumptions(assume) as assumed, share_metadata_cache():
            try:
                programs, run_by = self._record_programs(gpus, ranks)
            except _SizeWithoutEffectError as same:
                raise TraincastError(str(same)) from None
            if self._places is not None and not programs[0].rigid:
                assumed.note_once(f"run at other batch sizes by changing {self._places.describe()}")
        return Workload(
            name=name,
            programs=programs,
            ranks=run_by,
            mode=self._mode,
            tf32=self._tf32[0],
            assumptions=assumed.texts,
            meta=assumed.list_meta(),
        )

    def _record_programs(
        self, gpus: int | None, ranks: Sequence[int] | None
    ) -> tuple[tuple[Program, ...], tuple[int, ...]]:
        """The distinct programs, and which of them each rank runs."""
        if gpus is None:
            return (self._record_one_process(),), (0,)
        return capture_ranks(self._record_at, gpus, self._asked, ranks=ranks, lengths=self._lengths)

    def _record_one_process(self) -> Program:
        with freeze_existing_objects():
            first, known = self._record_at(*self._asked), get_assumptions()
            return rebatch_programs(
                [first], lambda batch, length: [self._record_at(batch, length)], shares=bool(known.used),
                note=lambda text: known.used.setdefault(text), lengths=self._lengths,
            )[0]  # fmt: skip

    def _record_at(self, batch: int, length: int, place: Place | None = None) -> Program:
        report_run(batch, length, place.rank if place else None)
        started = time.process_time()
        program, allowed, self._mode = self._run_loop_at(batch, length, place)
        took = time.process_time() - started
        self._spent += took
        if self._places is not None and not self._fixed and (took > _LONG_RUN_S or self._spent > _LONG_RUNS_S):
            self._fixed = _LONG_RUN.format(self._spent, BATCH_SIZE)
        self._tf32.append(allowed)
        program = program if batch else replace(program, batch_size=get_assumptions().batch or 1)
        first = self._firsts.setdefault(place.rank if place else 0, program)
        if program.batch_size != first.batch_size and self._places is not None:
            self._check_places(first, program)
        elif program.batch_size != first.batch_size and program.signatures == first.signatures:
            raise _SizeWithoutEffectError(_SAME.format(first.batch_size, batch))
        return program

    def _run_loop_at(self, batch: int, length: int, place: Place | None) -> tuple[Program, tuple[str, ...], str]:
        if self._places is None:
            return _run_loop(self._loop, batch, length, place)
        first = self._firsts.get(0)
        if (self._fixed and (batch, length) != self._asked) or (first and self._asked[0] and not self._places.found):
            raise TraincastError(self._fixed or _ONE_RUN)
        if first and first.batch_size == 1 and batch != 1:
            raise TraincastError(_ONE_SAMPLE)
        own = first.batch_size if first else batch
        if first and read_most_memory_bytes() * (batch / own - 1) > _OF_FREE * read_free_memory_bytes():
            raise TraincastError(_TOO_LARGE.format(batch))
        with self._places.change_size(own, batch or own) if own > 1 else nullcontext():
            return _run_loop(self._loop, batch, length, place)

    def _check_places(self, first: Program, program: Program) -> None:
        """Rejects another batch size that has not reached the step, or also the model."""
        assert self._places is not None
        if program.signatures == first.signatures:
            self._fixed = _ONE_RUN
        elif _weigh_parameters(program) != _weigh_parameters(first):
            self._fixed = f"changing {self._places.describe()} changes the model as well: {_ONE_RUN}"
        if self._fixed:
            raise TraincastError(self._fixed)


def _weigh_parameters(program: Program) -> int:
    """Bytes of the weights."""
    return int(program.storage_nbytes[program.columns.storage_kind == StorageKind.PARAMETER].sum())


def _run_loop(loop: Loop, batch: int, length: int, place: Place | None) -> tuple[Program, tuple[str, ...], str]:
    """One recorded step, what its arithmetic may run in TF32, and its mode. A loop that never mentions `cuda` is run
    once more, with that as its default device; one without three updates, with its step elsewhere."""
    stated, default_cuda, again = get_assumptions(), False, False
    while True:
        with keep_precision_switches(), hold_prints() if again else nullcontext():
            bounds = stated.bounds
            with record_loop_step(batch, length, default_cuda=default_cuda, place=place, bounds=bounds) as watch:
                loop(batch, length)
            allowed = list_tf32_arithmetic()
        other, again = watch.find_other_bounds(), True
        if watch.without_cuda and not default_cuda:
            default_cuda = True
        elif other is None:
            return watch.program, allowed, watch.mode
        else:
            stated.bounds = other
            stated.note_once(other.describe())


class _SizeWithoutEffectError(Exception):
    """Another size made no difference."""


def _make_workload(program: Program, name: str, assumed: Sequence[str]) -> Workload:
    return Workload(name=name, programs=(program,), tf32=list_tf32_arithmetic(), assumptions=tuple(assumed))


@contextmanager
def _run_as_main(path: Path, arguments: Sequence[str]) -> Iterator[None]:
    """As in a process of its own: arguments, what is alongside the script importable, and imported anew in each run."""
    folder = path.resolve().parent
    argv, places, modules, here = sys.argv, list(sys.path), set(sys.modules), Path.cwd()
    starting: Any = multiprocessing.context._default_context
    started, starting._actual_context = starting._actual_context, None  # a script may say how once
    sys.argv = [str(path), *arguments]
    sys.path.insert(0, str(folder))
    try:
        yield
    except SystemExit as stop:
        if stop.code not in (None, 0):
            raise TraincastError(f"{path} ended with exit code {stop.code} before its third update") from None
    finally:
        sys.argv, sys.path[:] = argv, places
        starting._actual_context = started
        os.chdir(here)
        for name in set(sys.modules) - modules:
            file = getattr(sys.modules[name], "__file__", None) or ""
            if Path(file).is_relative_to(folder) and "site-packages" not in file:
                del sys.modules[name]
