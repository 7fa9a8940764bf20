"""The step of a training loop that nobody marks: what is between two calls of its optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import MethodType
from typing import Any

import torch

from traincast.capturing.assemble import assemble_program, list_host_scopes
from traincast.capturing.assumptions import get_assumptions
from traincast.capturing.devices import DeviceMode
from traincast.capturing.environment import install_environment
from traincast.capturing.eval_pipelines import note_pipeline_steps
from traincast.capturing.kinds import StorageClassifier
from traincast.capturing.patches import Patches
from traincast.capturing.ranks import Place, install_ranks
from traincast.capturing.recorder import Recorder
from traincast.capturing.regions import Regions
from traincast.capturing.step import disable_collection, profile_host, shorten_errors
from traincast.ir.program import Program
from traincast.utils.errors import TraincastError

_WARM = 2  # updates before the recorded one: optimizers make their state in the first
_NONE = (
    "no optimizer of torch.optim was called three times inside; record a loop of at least three updates, with the "
    "model built inside as well; a loop that changes its parameters itself needs a function: FILE.py:make_step"
)


class _RecordedSignal(BaseException):
    """Ends the user's loop: its step is recorded. No `except Exception` of the loop may hold it up."""


class LoopRecorder:
    """Follows the optimizer that is called first, and records from its second call to its third."""

    def __init__(self, recorder: Recorder, devices: DeviceMode, regions: Regions, batch: int, length: int) -> None:
        self.recorder, self.devices, self.regions = recorder, devices, regions
        self.batch, self.length = batch, length
        self.without_cuda = False
        self.mode = "training"
        self._program: Program | None = None
        self._optimizer: int | None = None
        self._calls = 0
        self._open = ExitStack()
        self._profiler: Any = None
        self._kinds: StorageClassifier | None = None

    @property
    def program(self) -> Program:
        """What was recorded; rejected where the optimizer was not called often enough."""
        if self._program is None:
            raise TraincastError(_NONE)
        return self._program

    def install_hooks(self, patches: Patches) -> None:
        """Every optimizer made from now on tells when it has stepped."""
        original = torch.optim.Optimizer.__init__
        watch = self

        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            stepped = type(self).step

            def step(self: Any, *args: Any, **kwargs: Any) -> Any:
                result = stepped(self, *args, **kwargs)
                watch.note_optimizer_step(self)
                return result

            self.step = MethodType(step, self)

        patches.set_attribute(torch.optim.Optimizer, "__init__", init)
        note_pipeline_steps(patches, self._note_evaluation)
        patches.callback(self._open.close)

    def note_optimizer_step(self, optimizer: object) -> None:
        """An optimizer has stepped."""
        if self._optimizer is None:
            self._optimizer = id(optimizer)
        if id(optimizer) != self._optimizer:
            return
        self._calls += 1
        if self._calls == _WARM:
            self.regions.run_outside_backward(self._begin_step)  # an optimizer may step in hooks of its parameters
        elif self._calls == _WARM + 1:
            self.regions.run_outside_backward(self._end_step)

    def _note_evaluation(self, pipeline: object) -> None:
        """A pipeline that evaluates has done a step."""
        self.mode, self.regions.training = "inference", False
        self.note_optimizer_step(pipeline)

    def _begin_step(self) -> None:
        if not self.devices.uses_cuda:
            self.without_cuda = True
            raise _RecordedSignal
        self._kinds = StorageClassifier(self.recorder.book, self.regions)
        self.regions.reset_position()
        get_assumptions().begin_step()
        self._kinds.classify_before_step()
        self._open.enter_context(disable_collection())
        self.recorder.book.start_recording()
        self._profiler = self._open.enter_context(profile_host())

    def _end_step(self) -> None:
        self._open.close()
        self.recorder.book.stop_recording()
        assert self._kinds is not None
        self._kinds.classify_after_step()
        scopes = list_host_scopes(self._profiler.kineto_results.experimental_event_tree())
        self._program = assemble_program(
            self.recorder.ops, self.recorder.book, scopes, batch_size=self.batch, seq_len=self.length
        )
        raise _RecordedSignal


@contextmanager
def record_loop_step(
    batch: int, length: int, *, default_cuda: bool, place: Place | None = None
) -> Iterator[LoopRecorder]:
    """Records a step of the loop that runs inside, which ends with it; `place` is its rank where there are several."""
    regions = Regions(training=True)
    recorder = Recorder(regions)
    devices = DeviceMode(recorder, default_cuda=default_cuda)
    watch = LoopRecorder(recorder, devices, regions, batch, length)
    with Patches() as patches:
        if place is not None:
            install_ranks(patches, recorder, devices, place)
        install_environment(patches, recorder, devices)
        watch.install_hooks(patches)
        patches.enter_context(shorten_errors())
        with suppress(_RecordedSignal):
            yield watch
