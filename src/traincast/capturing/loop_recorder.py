"""The step of a training loop that nobody marks: what is between two calls of its optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch

from traincast.capturing.assumptions import get_assumptions
from traincast.capturing.devices import DeviceMode
from traincast.capturing.environment import install_environment
from traincast.capturing.errors import BRANCH, format_one_line
from traincast.capturing.evaluations import Evaluations
from traincast.capturing.patches import Patches
from traincast.capturing.ranks import Place, install_ranks
from traincast.capturing.recorder import Recorder
from traincast.capturing.regions import Regions
from traincast.capturing.step import shorten_errors
from traincast.capturing.step_recording import RecordedSignal, StepRecording
from traincast.capturing.torchrec_steps import note_pipeline_steps, note_tables
from traincast.capturing.updates import USUAL_WARM, Bounds
from traincast.ir.program import Program
from traincast.utils.display.text import count_of
from traincast.utils.errors import TraincastError

_MANY_PASSES = 8  # that an update adds up: one such update before the recorded one takes long enough
_UNUSED = 8  # backward passes after which a loop that has made no optimizer has none
_NONE = (
    "no optimizer of torch.optim was called inside, and no backward pass ran three times; record a loop of at least "
    "three updates, with the model built inside as well, or give a function: FILE.py:make_step"
)
_OTHERS = "none of the {} updates at this size runs the ops that the step runs at the size captured first"


def _list_decisions() -> str:
    """What may have ended a loop early: decisions on values that nobody knows."""
    decided = [text for text in get_assumptions().texts if "decides as" in text]
    return f" (ended early? {'; '.join(decided[:2])}: state it with {BRANCH})" if decided else ""


class LoopRecorder:
    """Follows the optimizer that is called first, and records from its second call on."""

    def __init__(
        self, recorder: Recorder, devices: DeviceMode, regions: Regions, recording: StepRecording, bounds: Bounds
    ) -> None:
        self.recorder, self.devices, self.regions, self.recording = recorder, devices, regions, recording
        self.bounds = bounds
        self.without_cuda = False
        self.mode = "training"
        self._optimizer: int | None = None
        self._made = self._calls = self._passes = 0
        self._inside = 0  # optimizers that run: one may wrap another

    @property
    def program(self) -> Program:
        """What was recorded; rejected where the optimizer was not called often enough."""
        if self.recording.program is None:
            raise TraincastError(_OTHERS.format(self._calls) if self._calls > USUAL_WARM else _NONE + _list_decisions())
        return self.recording.program

    def find_other_bounds(self) -> Bounds | None:
        """Where a step is that was not found at the usual bounds; None where it was, or there is none."""
        if self.recording.program is not None or self.bounds != Bounds():
            return None
        if self._calls:
            return Bounds(self._calls - 1) if self._calls <= USUAL_WARM else None
        return Bounds(min(self._passes - 1, USUAL_WARM), by_backward=True) if self._passes > 1 else None

    def install_hooks(self, patches: Patches) -> None:
        """Every optimizer made from now on tells when it has stepped; those of libraries that wrap others need not call
        the constructor of PyTorch's."""
        prepare, watch = torch.optim.Optimizer._patch_step_function, self

        def step(self: Any, *args: Any, **kwargs: Any) -> Any:
            watch._inside += 1
            try:
                result = type(self).step(self, *args, **kwargs)
            finally:
                watch._inside -= 1
            if not watch._inside:
                watch.note_optimizer_step(self)
            return result

        def prepare_step(self: Any) -> None:
            prepare(self)
            if "step" in vars(self):
                return
            self.step = MethodType(step, self)
            watch._made += 1
            if not watch.bounds.warm and watch._made == 1 and watch.devices.uses_cuda:
                watch.regions.run_outside_backward(watch._pass_boundary)

        patches.set_attribute(torch.optim.Optimizer, "_patch_step_function", prepare_step)
        self.recorder.watch.after_backward = self._note_backward
        Evaluations(lambda: not self.recorder.watch.watching).install_hooks(patches)
        note_pipeline_steps(patches, self._note_evaluation)
        note_tables(patches)
        patches.callback(self.recording.close)

    def note_optimizer_step(self, optimizer: object) -> None:
        """An optimizer has stepped, by itself or with those that it wraps."""
        if self._optimizer is None:
            self._optimizer = id(optimizer)
        if id(optimizer) != self._optimizer or self.bounds.by_backward:
            return
        self._calls += 1
        if self._calls >= (min(1, self.bounds.warm) if self._passes >= _MANY_PASSES else self.bounds.warm):
            self.regions.run_outside_backward(self._pass_boundary)  # an optimizer may step in hooks of its parameters

    def describe_failure(self) -> str:
        """What an error that ends the loop has ended, with a place for the error."""
        reached = f"after {count_of(self._calls, 'update')}" if self._calls else "before its first update"
        return f"the run failed {reached}: {{}}; if it does so without a capture too, the error is the program's own"

    def _note_backward(self) -> None:
        """A backward pass has ended."""
        self._passes += 1
        if self.bounds.by_backward:
            self.recorder.watch.note_step(followed=True)
            if self._passes >= self.bounds.warm:
                self._pass_boundary()
        elif self._passes >= _UNUSED and not self._made and not self._calls:
            raise RecordedSignal  # to be recorded at other bounds

    def _note_evaluation(self, pipeline: object) -> None:
        """A pipeline that evaluates has done a step."""
        self.mode, self.regions.training = "inference", False
        self.note_optimizer_step(pipeline)

    def _pass_boundary(self) -> None:
        if not self.devices.uses_cuda:
            self.without_cuda = True
            raise RecordedSignal
        self.recording.pass_boundary()


@contextmanager
def record_loop_step(
    batch: int, length: int, *, default_cuda: bool, place: Place | None = None, bounds: Bounds | None = None
) -> Iterator[LoopRecorder]:
    """Records a step of the loop that runs inside, which ends with it; `place` is its rank where there are several."""
    regions = Regions(training=True)
    recorder = Recorder(regions)
    devices = DeviceMode(recorder, default_cuda=default_cuda)
    recording = StepRecording(
        recorder, regions, batch, length, rank=place.rank if place else 0, alone=place is None, of_loop=True
    )
    watch = LoopRecorder(recorder, devices, regions, recording, bounds or Bounds())
    with Patches() as patches:
        if place is not None:
            install_ranks(patches, recorder, devices, place)
        install_environment(patches, recorder, devices)
        watch.install_hooks(patches)
        patches.enter_context(shorten_errors(watch.describe_failure))
        try:
            yield watch
        except RecordedSignal:
            return
        except Exception as error:
            if recording.program is None and watch.find_other_bounds() is None:
                raise
            get_assumptions().note_once(
                f"updates after the recorded step were not all compared with it: {format_one_line(error)}"
            )
        recording.finish_early()
