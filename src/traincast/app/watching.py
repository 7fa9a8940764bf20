"""Measured steps of a running job held against their prediction: the figures that callbacks log, and the verdict."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median, quantiles
from typing import Any

from traincast.simulator.prediction.result import Prediction
from traincast.simulator.prediction.verdict import rank_bounds, suggest_remedy
from traincast.utils.display.text import count_of, format_duration, format_interval, wrap_words
from traincast.utils.results import Records, Result

_BOX = 84  # characters of a line inside the frame
WARM_UP = 3
"""Steps at the beginning that do not count: allocations, autotuning, compilation."""


@dataclass(frozen=True, kw_only=True, repr=False)
class WatchedSteps(Result):
    """Steps of a job as they were measured (`seconds` of each, without the first ones), and what was predicted (None:
    nothing was)."""

    seconds: tuple[float, ...]
    prediction: Prediction | None = None

    @property
    def measured(self) -> float:
        """The median step, seconds."""
        return median(self.seconds)

    @property
    def ratio(self) -> float | None:
        """Measured over predicted."""
        return None if self.prediction is None else self.measured / (self.prediction.iteration or 1.0)

    @property
    def mfu(self) -> float | None:
        """The share of the GPUs' peak that the measured step uses; None without a prediction, or without a peak."""
        if self.prediction is None or not self.prediction.throughput.mfu:
            return None
        return self.prediction.throughput.mfu * self.prediction.iteration / self.measured

    @property
    def verdict(self) -> str:
        """Whether the step is as long as it should be."""
        p, ratio = self.prediction, self.ratio
        if p is None or ratio is None:
            return "nothing was predicted to compare it with"
        low, high = p.interval
        if low <= self.measured <= high:
            return "as predicted: inside the 90 % interval"
        if self.measured < low:
            return "faster than predicted: is it the step that was described (batch, dtype, layers)?"
        return f"{format_duration(self.measured - p.iteration)} longer than predicted: " + (
            "profile it ('with traincast.profile() as p:'), something slows it that the prediction does not know"
        )

    def headline(self) -> str:
        """The measured step, the prediction, the verdict, and what would help."""
        low, high = _find_spread(self.seconds)
        count = count_of(len(self.seconds), "step")
        spread = f", {format_interval((low, high))} for 8 of 10" if len(self.seconds) > 1 else ""
        lines = [f"measured  {format_duration(self.measured)} per step (median of {count}{spread})"]
        p = self.prediction
        if p is not None:
            interval = f"90 % interval {format_interval(p.interval)}"
            lines.append(f"predicted {format_duration(p.iteration)} per step ({interval}); {p.trust.word}")
            lines += [f"MFU       {self.mfu:.1%} (predicted {p.throughput.mfu:.1%})"] if self.mfu else []
            lines.append("bound by  " + ", ".join(f"{name} {share:.0%}" for name, share in rank_bounds(p)))
        lines.append(f"verdict   {self.verdict}")
        remedy = suggest_remedy(p) if p is not None else ""
        return "\n".join([*lines, *([f"worth trying: {remedy.replace('`', '')}"] if remedy else [])])

    def box(self) -> str:
        """The same in a frame."""
        lines = ["Traincast"]
        lines += [row for line in self.headline().split("\n") for row in wrap_words(line, _BOX, hanging=" " * 10)]
        width = max(map(len, lines))
        rows = [f"│ {line.ljust(width)} │" for line in lines]
        return "\n".join([f"┌{'─' * (width + 2)}┐", *rows, f"└{'─' * (width + 2)}┘"])

    def to_dict(self) -> dict[str, Any]:
        """The figures; keys say their units."""
        p, (low, high) = self.prediction, _find_spread(self.seconds)
        return {
            "steps": len(self.seconds),
            "measured_ms": 1e3 * self.measured,
            "spread_ms": [1e3 * low, 1e3 * high],
            "predicted_ms": None if p is None else 1e3 * p.iteration,
            "interval_ms": None if p is None else [1e3 * limit for limit in p.interval],
            "measured_over_predicted": self.ratio,
            "mfu": self.mfu,
            "verdict": self.verdict,
        }

    def records(self) -> Records:
        """Table "steps": milliseconds of each."""
        return {"steps": [{"step": number, "ms": 1e3 * s} for number, s in enumerate(self.seconds)]}


@dataclass
class StepWatch:
    """Listens to a loop: `note_step` at the end of every optimizer step. Steps are the times between those calls, which
    in the long run is what the device needs however far the host runs ahead."""

    prediction: Prediction | None = None
    warm_up: int = WARM_UP
    _last: float | None = None
    _seconds: list[float] = field(default_factory=list)

    def note_step(self) -> dict[str, float]:
        """A step has ended; gives figures to log (milliseconds and shares), none during the first steps."""
        now = time.perf_counter()
        if self._last is not None:
            self._seconds.append(now - self._last)
        self._last = now
        if len(self._seconds) <= self.warm_up:
            return {}
        last = self._seconds[-1]
        figures = {"traincast/step_ms": 1e3 * last}
        if self.prediction is not None:
            figures["traincast/predicted_ms"] = 1e3 * self.prediction.iteration
            figures["traincast/measured_over_predicted"] = last / (self.prediction.iteration or 1.0)
            if mfu := self.prediction.throughput.mfu:
                figures["traincast/mfu"] = mfu * self.prediction.iteration / last
        return figures

    def pause(self) -> None:
        """What was done since the last step is none (an evaluation, a checkpoint): its time does not count."""
        if self._last is not None:
            self._last = time.perf_counter()

    def finish(self) -> WatchedSteps | None:
        """What was measured; None where there were too few steps to say anything."""
        seconds = tuple(self._seconds[self.warm_up :])
        return WatchedSteps(seconds=seconds, prediction=self.prediction) if seconds else None


def log_figures(figures: Mapping[str, float], step: int) -> None:
    """Hands figures to trackers that the job uses already: wandb with a run, mlflow with an active one."""
    wandb, mlflow = sys.modules.get("wandb"), sys.modules.get("mlflow")
    if wandb is not None and getattr(wandb, "run", None) is not None:
        wandb.log(dict(figures), step=step, commit=False)
    if mlflow is not None and mlflow.active_run() is not None:
        mlflow.log_metrics({name.replace("/", "."): value for name, value in figures.items()}, step=step)


def _find_spread(seconds: tuple[float, ...]) -> tuple[float, float]:
    """Between which two times eight of ten steps lie."""
    if len(seconds) < 2:
        return seconds[0], seconds[0]
    tenths = quantiles(seconds, n=10, method="inclusive")
    return tenths[0], tenths[-1]
