"""Callbacks for the trainers people use: predicted against measured step, MFU, and a verdict at the end.

    trainer = Trainer(..., callbacks=[traincast.callbacks.make_hugging_face(workload="config.json", on="h100")])
    trainer = lightning.Trainer(..., callbacks=[traincast.callbacks.make_lightning(workload="step.tc", on="h100")])
    with traincast.callbacks.watch_torchtitan(trainer, workload="llama3-8b", on="dgx-h100", gpus=8): trainer.train()

Keywords are those of `traincast.predict`; without a workload steps are measured only. The prediction is made once, by
rank 0, before the first step; a wrong name is an error before a GPU hour is spent.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any, Unpack

from traincast.app.keywords import spell_out_keywords
from traincast.app.watching import StepWatch, WatchedSteps, log_figures
from traincast.utils.errors import TraincastError

if TYPE_CHECKING:
    from traincast.app.keywords import ScenarioFields
    from traincast.simulator.prediction.result import Prediction
    from traincast.simulator.scenario.scenario import On, Source


def _predict_asked(workload: Source | None, on: On | None, scenario: Any) -> Prediction | None:
    """The prediction to compare with; None where none was asked for, or where another rank makes it."""
    if workload is None:
        if on is not None or scenario:
            raise TraincastError("a callback with `on` needs a `workload` too; leave both out to measure only")
        return None
    if on is None:
        raise TraincastError("`on` is missing: name the GPU or node that the job runs on")
    from traincast.app.api import predict

    return predict(workload, on=on, **scenario) if _is_first_rank() else None


def _is_first_rank() -> bool:
    return os.environ.get("RANK", "0") == "0"


class _Listener:
    """What callbacks of all trainers share. `result` has what was measured, once training has ended."""

    def __init__(self, prediction: Prediction | None) -> None:
        self.watch = StepWatch(prediction)
        self.result: WatchedSteps | None = None

    def note_step(self, step: int) -> None:
        """A step has ended."""
        figures = self.watch.note_step()
        if figures and _is_first_rank():
            log_figures(figures, step)

    def finish(self) -> None:
        """Training has ended: the verdict is printed by rank 0."""
        self.result = self.watch.finish()
        if self.result is not None and _is_first_rank():
            print(f"\n{self.result.box()}")  # below a progress bar


@spell_out_keywords
def make_hugging_face(
    workload: Source | None = None, *, on: On | None = None, **scenario: Unpack[ScenarioFields]
) -> Any:
    """A `TrainerCallback` for the Trainer of Hugging Face; its `listener.result` has the verdict."""
    base = _find_base("TrainerCallback", "transformers")

    class TraincastCallback(base):  # type: ignore[valid-type,misc]
        """Times optimizer steps; evaluations and saves in between do not count."""

        def __init__(self) -> None:
            self.listener = _Listener(_predict_asked(workload, on, scenario))

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.listener.note_step(state.global_step)

        def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.listener.watch.pause()

        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.listener.watch.pause()

        def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.listener.finish()

    return TraincastCallback()


@spell_out_keywords
def make_lightning(workload: Source | None = None, *, on: On | None = None, **scenario: Unpack[ScenarioFields]) -> Any:
    """A `Callback` for Lightning's Trainer; its `listener.result` has the verdict."""
    base = _find_base("Callback", "lightning.pytorch", "pytorch_lightning")

    class TraincastCallback(base):  # type: ignore[valid-type,misc]
        """Times optimizer steps (`global_step`), so that accumulated batches count once."""

        def __init__(self) -> None:
            self.listener, self.last = _Listener(_predict_asked(workload, on, scenario)), 0

        def on_train_batch_end(self, trainer: Any, *_: Any, **__: Any) -> None:
            if trainer.global_step != self.last:
                self.last = trainer.global_step
                self.listener.note_step(self.last)

        def on_validation_end(self, *_: Any) -> None:
            self.listener.watch.pause()

        def on_train_end(self, *_: Any) -> None:
            self.listener.finish()

    return TraincastCallback()


@contextmanager
@spell_out_keywords
def watch_torchtitan(
    trainer: Any, workload: Source | None = None, *, on: On | None = None, **scenario: Unpack[ScenarioFields]
) -> Iterator[_Listener]:
    """Watches a torchtitan `Trainer`, which has no callbacks: its `train_step` is timed inside the block, and the
    verdict printed at its end."""
    step = getattr(trainer, "train_step", None)
    if not callable(step):
        raise TraincastError("watch_torchtitan needs a torchtitan Trainer: this object has no train_step")
    listener = _Listener(_predict_asked(workload, on, scenario))

    def timed(*args: Any, **kwargs: Any) -> Any:
        listener.watch.pause()  # between two steps it saves and validates
        result = step(*args, **kwargs)
        listener.note_step(int(getattr(trainer, "step", 0)))
        return result

    trainer.train_step = timed
    try:
        yield listener
    finally:
        del trainer.train_step
        listener.finish()


def _find_base(name: str, *modules: str) -> type:
    """The class that callbacks of a trainer have to extend."""
    for module in modules:
        try:
            found = getattr(import_module(module), name)
        except ImportError:
            continue
        assert isinstance(found, type)
        return found
    raise TraincastError(f"this callback needs {modules[0].partition('.')[0]}; install it where the job runs")
