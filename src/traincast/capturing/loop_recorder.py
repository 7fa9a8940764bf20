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
from traincast.capturing.errors import format_one_line
from traincast.capturing.eval_pipelines import note_pipeline_steps
from traincast.capturing.patches import Patches
from traincast.capturing.ranks import Place, install_ranks
from traincast.capturing.recorder import Recorder
from traincast.capturing.regions import Regions
from traincast.capturing.step import shorten_errors
from traincast.capturing.step_recording import RecordedSignal, StepRecording
from traincast.capturing.torchrec_tables import note_tables
from traincast.ir.program import Program
from traincast.utils.errors import TraincastError

_WARM = 2  # updates before the recorded one: optimizers make their state in the first
_NONE = (
    "no optimizer of torch.optim was called three times inside; record a loop of at least three updates, with the "
    "model built inside as well; a loop that changes its parameters itself needs a function: FILE.py:make_step"
)


class LoopRecorder:
    """Follows the optimizer that is called first, and records from its second call on."""

    def __init__(self, recorder: Recorder, devices: DeviceMode, regions: Regions, recording: StepRecording) -> None:
        self.recorder, self.devices, self.regions, self.recording = recorder, devices, regions, recording
        self.without_cuda = False
        self.mode = "training"
        self._optimizer: int | None = None
        self._calls = 0
        self._inside = 0  # optimizers that run: one may wrap another

    @property
    def program(self) -> Program:
        """What was recorded; rejected where the optimizer was not called often enough."""
        if self.recording.program is None:
            raise TraincastError(_NONE)
        return self.recording.program

    def install_hooks(self, patches: Patches) -> None:
        """Every optimizer made from now on tells when it has stepped."""
        original = torch.optim.Optimizer.__init__
        watch = self

        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            stepped = type(self).step

            def step(self: Any, *args: Any, **kwargs: Any) -> Any:
                watch._inside += 1
                try:
                    result = stepped(self, *args, **kwargs)
                finally:
                    watch._inside -= 1
                if not watch._inside:
                    watch.note_optimizer_step(self)
                return result

            self.step = MethodType(step, self)

        patches.set_attribute(torch.optim.Optimizer, "__init__", init)
        note_pipeline_steps(patches, self._note_evaluation)
        note_tables(patches)
        patches.callback(self.recording.close)

    def note_optimizer_step(self, optimizer: object) -> None:
        """An optimizer has stepped, by itself or with those that it wraps."""
        if self._optimizer is None:
            self._optimizer = id(optimizer)
        if id(optimizer) != self._optimizer:
            return
        self._calls += 1
        if self._calls >= _WARM:
            self.regions.run_outside_backward(self._pass_boundary)  # an optimizer may step in hooks of its parameters

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
    batch: int, length: int, *, default_cuda: bool, place: Place | None = None
) -> Iterator[LoopRecorder]:
    """Records a step of the loop that runs inside, which ends with it; `place` is its rank where there are several."""
    regions = Regions(training=True)
    recorder = Recorder(regions)
    devices = DeviceMode(recorder, default_cuda=default_cuda)
    recording = StepRecording(
        recorder, regions, batch, length, rank=place.rank if place else 0, alone=place is None, of_loop=True
    )
    watch = LoopRecorder(recorder, devices, regions, recording)
    with Patches() as patches:
        if place is not None:
            install_ranks(patches, recorder, devices, place)
        install_environment(patches, recorder, devices)
        watch.install_hooks(patches)
        patches.enter_context(shorten_errors())
        try:
            yield watch
        except RecordedSignal:
            return
        except Exception as error:
            if recording.program is None:
                raise
            get_assumptions().note_once(
                f"updates after the recorded step were not all compared with it: {format_one_line(error)}"
            )
        recording.finish_early()
