"""The layout with the fastest step among all that fit, and why the next ones are slower."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from traincast.hardware.platform import Platform
from traincast.models.transformers.description import Transformer
from traincast.planner.parallelism.candidates import Wanted, candidates
from traincast.simulator.parallelism.layout import Layout
from traincast.simulator.parallelism.predict import estimate_seconds, predict_training
from traincast.simulator.parallelism.result import TrainingPrediction
from traincast.utils.errors import TraincastError
from traincast.utils.parallel.runner import Died, Job
from traincast.utils.parallel.where import SEARCH, Workers
from traincast.utils.results import Records, Result, flat

_SHOWN = 10
_TOGETHER = 16  # layouts that a worker is given at once: neighbours share what was priced
_DAY, _HOUR = 86400.0, 3600.0


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class Plan(Result):
    """The best layouts first. `scored` were predicted, `too_large` of them need more memory than there is.

    `price` is dollars of a GPU and hour (None: not asked), `tokens` those of the whole training (None: not asked).
    """

    model: Transformer
    platform: Platform
    wanted: Wanted
    best: tuple[TrainingPrediction, ...]
    scored: int
    too_large: int
    price: float | None = None
    tokens: float | None = None

    def row(self, number: int) -> dict[str, Any]:
        """One of the best as plain data; `slower_by` names what most of the difference to the first is."""
        answer, layout = self.best[number], self.best[number].layout
        return {
            "layout": layout.described(),
            "tp": layout.tp, "pp": layout.pp, "vp": layout.vp, "cp": layout.cp, "ep": layout.ep, "dp": layout.dp,
            "sharding": layout.sharding, "micro_batch": layout.micro_batch, "accumulation": layout.accumulation,
            "checkpoint": layout.checkpoint,
            "iteration_ms": 1e3 * answer.iteration,
            "interval_ms": [1e3 * limit for limit in answer.interval],
            "tokens_per_second_per_gpu": answer.tokens_per_second,
            "mfu": answer.mfu,
            "memory_gb": answer.needed / 1e9,
            "exposed_comm_ms": 1e3 * sum(answer.parts.exposed.values()),
            "slower_by": slower_by(self.best[0], answer) if number else "",
            "dollars_per_billion_tokens": self._dollars(answer),
            "days": self._days(answer),
        }  # fmt: skip

    def _dollars(self, answer: TrainingPrediction) -> float | None:
        if self.price is None:
            return None
        return self.price * 1e9 / answer.tokens_per_second / _HOUR

    def _days(self, answer: TrainingPrediction) -> float | None:
        if self.tokens is None:
            return None
        return self.tokens / (answer.tokens_per_second * answer.layout.gpus) / _DAY

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain data; keys are stable and say their units."""
        return {
            "workload": self.model.name,
            "platform": self.platform.key,
            "gpus": self.wanted.gpus,
            "global_batch": self.wanted.global_batch,
            "seq_len": self.wanted.seq_len,
            "mfu_peak_tflops": self.best[0].peak_flops / 1e12,
            "scored": self.scored,
            "too_large": self.too_large,
            "rows": [self.row(number) for number in range(len(self.best))],
        }

    def headline(self) -> str:
        """What was planned, and the best layout with its time."""
        first = self.best[0]
        return (
            f"{self.model.name} on {self.wanted.gpus} x {self.platform.device.name}, {self.wanted.global_batch} "
            f"samples of {self.wanted.seq_len} tokens a step: {self.scored} layouts scored, "
            f"{self.too_large} too large\n"
            f"{first.layout.described()}: {1e3 * first.iteration:,.0f} ms, {first.tokens_per_second:,.0f} tokens/s a "
            f"GPU, MFU {first.mfu:.1%} of {first.peak_flops / 1e12:,.0f} TFLOPS"
        )

    def records(self) -> Records:
        """Table "layouts": the best, one row each."""
        return {"layouts": [flat(self.row(number)) for number in range(len(self.best))]}


def slower_by(first: TrainingPrediction, other: TrainingPrediction) -> str:
    """The part of the step that most of the difference between two layouts is, with its milliseconds."""
    before, after = dict(first.split()), dict(other.split())
    grown = {name: after.get(name, 0.0) - before.get(name, 0.0) for name in {**before, **after}}
    name = max(sorted(grown), key=lambda part: grown[part])
    return f"{name} +{1e3 * grown[name]:,.0f} ms" if grown[name] > 0 else "about the same"


def make_plan(
    model: Transformer,
    platform: Platform,
    wanted: Wanted,
    *,
    price: float | None = None,
    tokens: float | None = None,
    workers: Workers = SEARCH,
    progress: Callable[[float], None] = lambda _: None,
) -> Plan:
    """Estimates every layout that divides in closed form, and simulates the fastest that fit; the same question has the
    same answer, on however many `workers`."""
    layouts = list(candidates(model, platform.device, wanted))
    if not layouts:
        raise TraincastError(
            f"no layout of {model.name} on {wanted.gpus} GPUs divides a global batch of {wanted.global_batch} and fits "
            f"{platform.device.memory_bytes / 1e9:.0f} GB; give more GPUs, or a batch that more numbers divide"
        )
    scores = _Scores(model, platform)
    times = _times(scores, layouts, workers, progress)
    order = sorted((seconds, layouts[n].described(), n) for n, seconds in enumerate(times) if math.isfinite(seconds))
    if not order:
        raise TraincastError(
            f"{len(layouts)} layouts of {model.name} on {wanted.gpus} GPUs divide, and none fits "
            f"{platform.device.memory_bytes / 1e9:.0f} GB; give more GPUs or a smaller sequence"
        )
    simulated = [predict_training(model, platform, layouts[number]) for _, _, number in order[:_SHOWN]]
    return Plan(
        model=model, platform=platform, wanted=wanted,
        best=tuple(sorted(simulated, key=lambda answer: (answer.iteration, answer.layout.described()))),
        scored=len(layouts), too_large=len(layouts) - len(order), price=price, tokens=tokens,
    )  # fmt: skip


def _times(
    scores: _Scores, layouts: Sequence[Layout], workers: Workers, progress: Callable[[float], None]
) -> list[float]:
    """Seconds of a step under every layout; infinite where it does not fit."""
    tasks = [layouts[first : first + _TOGETHER] for first in range(0, len(layouts), _TOGETHER)]
    found: dict[int, list[float]] = {}

    def heard(number: int, outcome: list[float] | Died) -> None:
        if isinstance(outcome, Died):
            raise TraincastError(f"a process of the search died ({outcome.reason}); give it one process (`processes`)")
        found[number] = outcome
        progress(len(found) / len(tasks))

    workers.run(Job(prepare=_same, given=scores, work=_seconds), tasks, heard)
    return [seconds for number in range(len(tasks)) for seconds in found[number]]


class _Scores:
    """Layouts of a model estimated."""

    def __init__(self, model: Transformer, platform: Platform) -> None:
        self.model, self.platform = model, platform

    def seconds(self, layout: Layout) -> float:
        """Of a step; infinite where it does not fit."""
        seconds, needed = estimate_seconds(self.model, self.platform, layout)
        return seconds if needed <= self.platform.device.memory_bytes else math.inf


def _same(scores: _Scores) -> _Scores:
    return scores


def _seconds(scores: _Scores, layouts: Sequence[Layout]) -> list[float]:
    return [scores.seconds(layout) for layout in layouts]
