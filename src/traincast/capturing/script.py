"""An existing training script as it is: its step is what lies between two calls of its optimizer."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import MethodType
from typing import Any

import torch

from traincast.capturing.assemble import assemble, host_scopes
from traincast.capturing.assumptions import Assume, assuming, assumptions
from traincast.capturing.devices import DeviceMode
from traincast.capturing.environment import environment
from traincast.capturing.kinds import Kinds
from traincast.capturing.patches import Patches
from traincast.capturing.precision import switches_kept, tf32_arithmetic
from traincast.capturing.recorder import Recorder
from traincast.capturing.regions import Regions
from traincast.capturing.step import host_profiler, no_collection, one_line_errors, only_own_garbage
from traincast.errors import TraincastError
from traincast.workload.program import Program
from traincast.workload.workload import Workload

_WARM = 2  # updates before the recorded one: optimizers make their state in the first
_NONE = (
    "no optimizer of torch.optim was called three times inside; record a loop of at least three updates, with the "
    "model built inside as well"
)


class _Recorded(BaseException):
    """Ends the user's loop: its step is recorded. No `except Exception` of the loop may hold it up."""


@dataclass
class Recording:
    """Where `recording` puts what it has recorded: `workload` once the block has ended."""

    workload: Workload | None = None


class _Watch:
    """Follows the optimizer that is called first, and records from its second call to its third."""

    def __init__(self, recorder: Recorder, devices: DeviceMode, regions: Regions) -> None:
        self.recorder, self.devices, self.regions = recorder, devices, regions
        self.program: Program | None = None
        self.batch, self.length, self.without_cuda = 1, 0, False
        self._optimizer: int | None = None
        self._calls = 0
        self._open = ExitStack()
        self._profiler: Any = None
        self._kinds: Kinds | None = None

    def install(self, patches: Patches) -> None:
        """Every optimizer made from now on tells when it has stepped."""
        original = torch.optim.Optimizer.__init__
        watch = self

        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            stepped = type(self).step

            def step(self: Any, *args: Any, **kwargs: Any) -> Any:
                result = stepped(self, *args, **kwargs)
                watch.after(self)
                return result

            self.step = MethodType(step, self)

        patches.set(torch.optim.Optimizer, "__init__", init)
        patches.callback(self._open.close)

    def after(self, optimizer: object) -> None:
        """An optimizer has stepped."""
        if self._optimizer is None:
            self._optimizer = id(optimizer)
        if id(optimizer) != self._optimizer:
            return
        self._calls += 1
        if self._calls == _WARM:
            self._begin()
        elif self._calls == _WARM + 1:
            self._end()

    def _begin(self) -> None:
        if not self.devices.uses_cuda:
            self.without_cuda = True
            raise _Recorded
        self._kinds = Kinds(self.recorder.book, self.regions)
        self.regions.reset()
        assumptions().begin()
        self._kinds.before_step()
        self._open.enter_context(no_collection())
        self.recorder.book.start()
        self._profiler = self._open.enter_context(host_profiler())

    def _end(self) -> None:
        self._open.close()
        self.recorder.book.stop()
        assert self._kinds is not None
        self._kinds.after_step()
        scopes = host_scopes(self._profiler.kineto_results.experimental_event_tree())
        self.program = assemble(
            self.recorder.ops, self.recorder.book, scopes, batch_size=self.batch, seq_len=self.length
        )
        raise _Recorded


@contextmanager
def _watching(batch: int, length: int, *, default_cuda: bool) -> Iterator[_Watch]:
    regions = Regions(training=True)
    recorder = Recorder(regions)
    devices = DeviceMode(recorder, default_cuda=default_cuda)
    watch = _Watch(recorder, devices, regions)
    watch.batch, watch.length = batch, length
    with Patches() as patches:
        environment(patches, recorder, devices)
        watch.install(patches)
        patches.enter_context(one_line_errors())
        with suppress(_Recorded):
            yield watch


def _workload(program: Program | None, name: str, assumed: Sequence[str]) -> Workload:
    if program is None:
        raise TraincastError(_NONE)
    rigid = "recorded at one size only"
    return Workload(
        name=name, programs=(replace(program, rigid=rigid),), tf32=tf32_arithmetic(), assumptions=tuple(assumed)
    )


@contextmanager
def recording(
    *, batch_size: int = 1, seq_len: int = 0, name: str = "recorded", assume: Assume | None = None
) -> Iterator[Recording]:
    """Records one step of the training loop inside the block, without a GPU; the block ends with it.

    Model and optimizer must be built inside, on `cuda`. The step is what runs between the second and the third call of
    the optimizer that is called first; `batch_size` and `seq_len` say what size that is. The result is `workload` of
    what the block is given.
    """
    found = Recording()
    with assuming(assume) as assumed, only_own_garbage():
        with _watching(batch_size, seq_len, default_cuda=False) as watch:
            yield found
        if watch.without_cuda:
            raise TraincastError('the loop uses no device "cuda"; move its model and inputs there')
        found.workload = _workload(watch.program, name, list(assumed.texts))


def capture_script(
    file: str, arguments: Sequence[str], *, batch_size: int = 1, seq_len: int = 0, name: str | None = None,
    assume: Assume | None = None,
) -> Workload:  # fmt: skip
    """Runs a script as `python FILE ARGUMENTS` until its optimizer has been called three times, and records the step
    between the last two. Give only your own files."""
    path = Path(file)
    if not path.is_file():
        raise TraincastError(f"no file {file}; give a Python script, or FILE.py:FUNCTION")
    with assuming(assume) as assumed, only_own_garbage(), switches_kept():
        for default_cuda in (False, True):
            with _watching(batch_size, seq_len, default_cuda=default_cuda) as watch, _as_main(path, arguments):
                runpy.run_path(str(path), run_name="__main__")
            if not watch.without_cuda:
                break
        return _workload(watch.program, name or path.stem, list(assumed.texts))


@contextmanager
def _as_main(path: Path, arguments: Sequence[str]) -> Iterator[None]:
    argv, places = sys.argv, list(sys.path)
    sys.argv = [str(path), *arguments]
    sys.path.insert(0, str(path.resolve().parent))
    try:
        yield
    except SystemExit as stop:
        if stop.code not in (None, 0):
            raise TraincastError(f"{path} ended with exit code {stop.code} before its third update") from None
    finally:
        sys.argv, sys.path[:] = argv, places
