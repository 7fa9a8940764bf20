"""Capturing one training (or inference) step of any PyTorch model without a GPU."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

from traincast.capturing.assumptions import Assume, get_assumptions, use_assumptions
from traincast.capturing.devices import DeviceMode
from traincast.capturing.environment import install_environment
from traincast.capturing.errors import find_raised_line, format_one_line
from traincast.capturing.global_state import list_tf32_arithmetic
from traincast.capturing.metadata_cache import share_metadata_cache
from traincast.capturing.patches import Patches
from traincast.capturing.ranks import Place, install_ranks
from traincast.capturing.rebatch import hold_prints, rebatch_programs, report_run
from traincast.capturing.recorder import Recorder
from traincast.capturing.regions import Regions
from traincast.capturing.step_recording import RecordedSignal, StepRecording
from traincast.ir.program import Program
from traincast.ir.workload import DEFAULT_FRAMEWORK, Workload
from traincast.utils.errors import TraincastError

Step = Callable[[], object]
Build = Callable[[int, int], Step]
MODES = ("training", "inference")
ONE_SIZE = "captured at one size only"


def capture_step(
    make_step: Callable[..., Step],
    *,
    batch_size: int,
    name: str,
    seq_len: int | None = None,
    mode: str = "training",
    rebatch: bool = True,
    framework_version: str = DEFAULT_FRAMEWORK,
    synchronised: bool = False,
    runs_on: str = "cuda",
    assume: Assume | None = None,
) -> Workload:
    """A workload from `make_step(batch_size)` or `make_step(batch_size, seq_len)`, with no GPU.

    `make_step` builds model, optimizer and inputs in plain PyTorch and returns a callable that runs one
    iteration. The iteration is run once to warm up (optimizer state), then once more and recorded, as a GPU
    would run it. With `rebatch` it is captured at several sizes, so that the workload can be resized later;
    a step whose sizes do not follow batch size and sequence length keeps its single capture
    (`Program.rigid` says why). With `runs_on` "cpu" it is recorded as a CPU would run it, where the two differ.
    `assume` states what the step would read from tensors (`traincast.capturing.assumptions`); a function may carry it
    itself, as its attribute `assume`.
    """
    check_request(mode, batch_size, seq_len)
    build = adapt_to_sizes(make_step, seq_len)
    with (
        use_assumptions(assume or getattr(make_step, "assume", None)) as assumed,
        freeze_existing_objects(),
        share_metadata_cache(),
    ):
        first = capture_program(build, batch_size, seq_len or 0, mode, runs_on=runs_on)
        program = _rebatch_program(build, first, mode, runs_on) if rebatch else replace(first, rigid=ONE_SIZE)
    return Workload(
        name=name, programs=(program,), mode=mode, synchronised=synchronised, framework_version=framework_version,
        tf32=list_tf32_arithmetic(), assumptions=assumed.texts, meta=assumed.list_meta(),
    )  # fmt: skip


def check_request(mode: str, batch_size: int, seq_len: int | None) -> None:
    """Raises a `TraincastError` for a mode that is unknown or a size that is out of range."""
    if mode not in MODES:
        raise TraincastError(f"mode '{mode}' is unknown; use {' or '.join(MODES)}")
    for what, value in (("batch size", batch_size), ("sequence length", seq_len)):
        if value is not None and value < 1:
            raise TraincastError(f"{what} {value} is out of range; give an integer from 1")


def adapt_to_sizes(make_step: Callable[..., Step], seq_len: int | None) -> Build:
    """`make_step` as a function of (batch size, sequence length), whichever of the two forms it has."""
    try:
        positional = [
            p
            for p in inspect.signature(make_step).parameters.values()
            if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.default is p.empty
        ]
        accepted = sum(p.kind is not p.KEYWORD_ONLY for p in inspect.signature(make_step).parameters.values())
    except (TypeError, ValueError) as error:
        raise TraincastError(f"{make_step!r} is no function of (batch_size) or (batch_size, seq_len)") from error
    if len(positional) > 2 or accepted == 0:
        raise TraincastError(f"{_get_name(make_step)} must take (batch_size) or (batch_size, seq_len)")
    if seq_len is None:
        if len(positional) == 2:
            raise TraincastError(f"{_get_name(make_step)} takes a sequence length; give one with `seq_len`")
        return lambda batch, _: make_step(batch)
    if accepted < 2:
        raise TraincastError(f"{_get_name(make_step)} takes no sequence length; leave out seq_len")
    return lambda batch, length: make_step(batch, length)


def _get_name(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", repr(function))


def _rebatch_program(build: Build, first: Program, mode: str, runs_on: str) -> Program:
    def at(batch: int, length: int) -> list[Program]:
        return [capture_program(build, batch, length, mode, runs_on=runs_on)]

    known = get_assumptions()
    return rebatch_programs([first], at, shares=bool(known.used), note=lambda text: known.used.setdefault(text))[0]


def capture_program(
    build: Build, batch: int, length: int, mode: str, place: Place | None = None, *, runs_on: str = "cuda"
) -> Program:
    """One recorded step, of the rank at `place` where there are several.

    A step that never mentions `cuda` is captured as if that were the default device.
    """
    report_run(batch, length, place.rank if place else None)
    program = _attempt_capture(build, batch, length, mode, place, default_cuda=False, runs_on=runs_on)
    if program is None:
        with hold_prints():
            program = _attempt_capture(build, batch, length, mode, place, default_cuda=True, runs_on=runs_on)
    if program is None:
        raise TraincastError("the step ran no PyTorch op; return a callable that runs one whole iteration")
    return program


def _attempt_capture(
    build: Build, batch: int, length: int, mode: str, place: Place | None, *, default_cuda: bool, runs_on: str
) -> Program | None:
    regions = Regions(training=mode == "training")
    recorder = Recorder(regions)
    devices = DeviceMode(recorder, default_cuda=default_cuda)
    with Patches() as patches:
        if place is not None:
            install_ranks(patches, recorder, devices, place)
        install_environment(patches, recorder, devices, runs_on=runs_on)
        patches.enter_context(shorten_errors())
        step = build(batch, length)
        if not callable(step):
            raise TraincastError(
                f"the function must return a callable that runs one iteration, not {type(step).__name__}"
            )
        get_assumptions().begin_step()
        step()
        if not devices.uses_cuda:
            return None
        recording = StepRecording(
            recorder, regions, batch, length, rank=place.rank if place else 0, alone=place is None
        )
        patches.callback(recording.close)
        with suppress(RecordedSignal), hold_prints():  # it has printed once
            while True:
                recording.pass_boundary()
                step()
    return recording.program if recorder.ops else None


@contextmanager
def shorten_errors(describe: Callable[[], str] = lambda: "the step failed: {}") -> Iterator[None]:
    """Errors of the user's code as one line that names where they come from, and what has failed there."""
    try:
        yield
    except TraincastError as error:
        if "\n" not in str(error):
            raise
        raise TraincastError(str(error).split("\n")[0]) from error  # libraries (gin) add where they were
    except Exception as error:
        said = describe().format(format_one_line(error))
        raise TraincastError(f"{find_raised_line(error.__traceback__)}: {said}") from error


@contextmanager
def freeze_existing_objects() -> Iterator[None]:
    """Keeps what exists already out of garbage collection, which would take longer than the capture."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
