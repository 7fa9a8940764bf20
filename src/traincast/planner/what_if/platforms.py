"""One step on several platforms side by side, for who buys or rents: time, memory, dollars, energy, trust."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from traincast.hardware.platform import load_platform
from traincast.planner.what_if.money import Cost, Prices, compute_cost, find_price
from traincast.simulator.prediction.result import Prediction
from traincast.simulator.prediction.verdict import state_verdict
from traincast.simulator.scenario.predict import predict
from traincast.simulator.scenario.resolved import resolve
from traincast.simulator.scenario.scenario import Scenario
from traincast.utils.display.text import format_dollars
from traincast.utils.errors import TraincastError
from traincast.utils.results import Records, Result, drop_nested_values

MOST_PLATFORMS = 64


@dataclass(frozen=True, eq=False, kw_only=True)
class PlatformStep:
    """A step on one of the platforms and what it costs."""

    platform: str
    prediction: Prediction
    cost: Cost

    @property
    def seconds_per_sample(self) -> float:
        """Of all GPUs together."""
        return self.prediction.iteration / self.cost.samples

    @property
    def dollars(self) -> float | None:
        """Of a billion tokens, or of a million samples of a model without tokens; None without a price."""
        units = 1e9 / self.cost.tokens if self.cost.tokens else 1e6 / self.cost.samples
        return None if self.cost.dollars_per_step is None else self.cost.dollars_per_step * units

    def to_dict(self) -> dict[str, Any]:
        """As plain data; keys say their units."""
        p = self.prediction
        return {
            "platform": self.platform,
            "device": p.platform.device.name,
            "gpus": p.gpus,
            "iteration_ms": 1e3 * p.iteration,
            "interval_ms": [1e3 * limit for limit in p.interval],
            "samples_per_s": p.throughput.samples,
            "tokens_per_s": p.throughput.tokens or None,
            "memory_gb": p.needed_bytes / 1e9,
            "device_memory_gb": p.platform.device.memory_bytes / 1e9,
            "fits": p.fits,
            "trust": p.trust.word,
            "extrapolated": p.trust.extrapolated,
            "price": self.cost.price,
            **{name: value for name, value in self.cost.to_dict().items() if name not in ("gpus", "run_steps")},
        }


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class PlatformComparison(Result):
    """The same step on every platform that could be predicted, fastest first; `failed` says why the others could not,
    `priced` where prices come from ("": none)."""

    name: str
    steps: tuple[PlatformStep, ...]
    failed: dict[str, str]
    priced: str = ""

    @property
    def fastest(self) -> PlatformStep:
        """The shortest time of a sample among those that fit (of all, where none does)."""
        return min(self._usable, key=lambda step: step.seconds_per_sample)

    @property
    def cheapest(self) -> PlatformStep | None:
        """The least dollars among those that fit and have a price."""
        priced = [step for step in self._usable if step.dollars is not None]
        return min(priced, key=lambda step: step.dollars or 0.0) if priced else None

    @property
    def _usable(self) -> Sequence[PlatformStep]:
        return [step for step in self.steps if step.prediction.fits] or self.steps

    @property
    def unit(self) -> str:
        """What dollars buy: `billion tokens` or `million samples`."""
        return "billion tokens" if self.steps[0].cost.tokens else "million samples"

    def headline(self) -> str:
        """Which is fastest, which is cheapest, which do not fit."""
        first, least = self.fastest, self.cheapest
        lines = [f"{self.name}: {first.platform} is fastest, {state_verdict(first.prediction)[0]}"]
        if least is not None and least.dollars is not None:
            slower = least.seconds_per_sample / first.seconds_per_sample
            rest = "" if least is first else f", {slower:.1f} times as long per sample"
            lines.append(f"{least.platform} is cheapest, {format_dollars(least.dollars)} per {self.unit}{rest}.")
        lines.append(first.prediction.trust.sentence)
        tight = [step.platform for step in self.steps if not step.prediction.fits]
        return "\n".join([*lines, *([f"It does not fit on {', '.join(tight)}."] if tight else [])])

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "workload": self.name,
            "fastest": self.fastest.platform,
            "cheapest": self.cheapest.platform if self.cheapest else None,
            "prices": self.priced or None,
            "rows": [step.to_dict() for step in self.steps],
            "failed": self.failed,
        }

    def records(self) -> Records:
        """Table "platforms": one row each."""
        return {"platforms": [drop_nested_values(step.to_dict()) for step in self.steps]}


def compare_platforms(
    scenario: Scenario,
    platforms: Sequence[str],
    prices: Mapping[str, float],
    *,
    samples: float | None = None,
    tokens: float | None = None,
    priced: str = "",
    progress: Callable[[float], None] = lambda _: None,
) -> PlatformComparison:
    """Predicts a scenario on every platform; `prices` are dollars of one GPU for an hour by platform or device,
    `samples` or `tokens` those of a whole run."""
    names = list(dict.fromkeys(name.strip() for name in platforms if name.strip()))
    if not 1 <= len(names) <= MOST_PLATFORMS:
        raise TraincastError(f"`on` names {len(names)} platforms; give 1 to {MOST_PLATFORMS}")
    for name in names:
        load_platform(name)  # a misspelt one among several is an error, not a shorter table
    steps, failed = [], {}
    for number, name in enumerate(names):
        try:
            result = predict(resolve(scenario.replace(on=name)))
        except TraincastError as error:
            failed[name] = str(error)
        else:
            price = find_price(prices, name, result.platform.device.key)
            cost = compute_cost(result, Prices(per_gpu_hour=price, samples=samples, tokens=tokens))
            steps.append(PlatformStep(platform=name, prediction=result, cost=cost))
        progress((number + 1) / len(names))
    if not steps:
        raise TraincastError(next(iter(failed.values())))
    return PlatformComparison(
        name=steps[0].prediction.workload.name,
        steps=tuple(sorted(steps, key=lambda step: step.seconds_per_sample)),
        failed=failed,
        priced=priced if any(step.cost.price is not None for step in steps) else "",
    )
