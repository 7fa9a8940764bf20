"""What-ifs: edits by name on a step, before and after, and whether the difference exceeds its uncertainty.

The logarithm of a step's time errs by sources that are independent of each other: for every kernel family one error
that its kernels share, for every distinct kernel one of its own, the host, the software's release, the set-up of the
system. A source that both predictions have counts once, with the difference of their shares.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from traincast.costs.kernels.unmodelled import OPAQUE
from traincast.planner.what_if.edits.registry import Requirement, apply_edits, parse_edits
from traincast.planner.what_if.money import Cost, Prices, compute_cost
from traincast.simulator.prediction.prediction import RELEASE_SPREAD, SETUP_SPREAD, SHARED_ERROR
from traincast.simulator.prediction.result import Prediction, rank_bounds, split_step
from traincast.simulator.scenario.predict import predict
from traincast.simulator.scenario.resolved import Resolved
from traincast.simulator.scenario.workloads import TORCHREC
from traincast.utils.display.text import format_milliseconds
from traincast.utils.errors import TraincastError
from traincast.utils.metrics import Z90
from traincast.utils.results import Records, Result

_OWN_ERROR = math.sqrt(1 - SHARED_ERROR**2)  # what of a kernel's spread is its own
_LAYOUT_SPREAD = 0.05  # log-sigma of a layout beyond its kernels and communication


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A change from `before` to `after` seconds; `sigma` is the log-sigma of their ratio. Intervals are 90 %."""

    before: float
    after: float
    sigma: float

    @property
    def seconds(self) -> float:
        """After minus before: negative is faster."""
        return self.after - self.before

    @property
    def ratio(self) -> float:
        """After over before."""
        return self.after / self.before if self.before > 0 else 1.0

    @property
    def ratio_interval(self) -> tuple[float, float]:
        """Between which the ratio is."""
        spread = math.exp(Z90 * self.sigma)
        return self.ratio / spread, self.ratio * spread

    @property
    def interval(self) -> tuple[float, float]:
        """Seconds between which the change is, at the predicted time before."""
        low, high = self.ratio_interval
        return self.before * (low - 1), self.before * (high - 1)

    @property
    def certain(self) -> bool:
        """Whether the change is larger than its uncertainty: the interval does not hold 0."""
        low, high = self.ratio_interval
        return not low <= 1.0 <= high

    def to_dict(self) -> dict[str, Any]:
        """As plain data; keys say their units."""
        return {
            "change_ms": 1e3 * self.seconds,
            "change_interval_ms": [1e3 * limit for limit in self.interval],
            "ratio": self.ratio,
            "ratio_interval": list(self.ratio_interval),
            "larger_than_uncertainty": self.certain,
        }


def compute_difference(before: tuple[Resolved, Prediction], after: tuple[Resolved, Prediction]) -> Difference:
    """The change between two steps with what they share of their errors taken out."""
    one, two = (list_error_sources(resolved, result) for resolved, result in (before, after))
    sigma = math.sqrt(sum((two.get(key, 0.0) - one.get(key, 0.0)) ** 2 for key in {**one, **two}))
    return Difference(before=before[1].iteration, after=after[1].iteration, sigma=sigma)


def list_error_sources(resolved: Resolved, result: Prediction) -> dict[Hashable, float]:
    """Log-sigmas of a step by the source they come from; equal sources of two steps are one error."""
    seconds, device = result.iteration, result.platform.device.key
    if seconds <= 0:
        return {}
    sources: dict[Hashable, float] = {}
    for call, error in result.kernel_errors.items():
        family = call.family.name
        if family == OPAQUE.name:
            sources["unknown", device] = sources.get(("unknown", device), 0.0) + error / seconds
            continue
        shared = SHARED_ERROR * error / seconds
        sources["family", family, device] = sources.get(("family", family, device), 0.0) + shared
        key = ("kernel", call, device)
        sources[key] = sources.get(key, 0.0) + _OWN_ERROR * error / seconds
    sources["host", result.host_profile] = result.host_spread * result.device_idle / seconds
    sources["release", resolved.software] = RELEASE_SPREAD
    if result.gpus > 1:
        sources["setup", result.platform.key, resolved.scenario.program or TORCHREC] = SETUP_SPREAD
    if result.parallel is not None:
        layout = result.parallel.layout
        degrees = (layout.tp, layout.pp, layout.vp, layout.cp, layout.ep)
        form = (*degrees, layout.sharding, layout.kernels, layout.precision)
        sources["layout", result.platform.key, form] = _LAYOUT_SPREAD
    return sources


_SAME = 5e-4  # of a step: a change below it is none in three digits


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class WhatIf(Result):
    """A step before and after `edits`, the difference of the two with its interval, and what both cost.

    `per_sample` is the change of the time of one sample, for edits that change how many a step has.
    """

    before: Prediction
    after: Prediction
    edits: tuple[str, ...]
    change: Difference
    cost_before: Cost
    cost_after: Cost

    @property
    def per_sample(self) -> Difference:
        """The change of seconds per sample."""
        samples = self.cost_before.samples, self.cost_after.samples
        return Difference(
            before=self.change.before / samples[0], after=self.change.after / samples[1], sigma=self.change.sigma
        )

    @property
    def bottlenecks(self) -> tuple[str, str]:
        """What holds the step up most, before and after."""
        return find_bottleneck(self.before)[0], find_bottleneck(self.after)[0]

    @property
    def verdict(self) -> str:
        """Whether the change means anything, in words."""
        change = self.per_sample if self.cost_before.samples != self.cost_after.samples else self.change
        what = "a sample" if change is not self.change else "a step"
        if change.ratio == 1.0 and change.sigma == 0.0:
            return f"nothing changes: {what} takes as long as before"
        if abs(change.ratio - 1) < _SAME and change.certain:
            return f"nothing to speak of changes: {what} takes {100 * (change.ratio - 1):+.2g} % longer than before"
        times = 1 / change.ratio if change.ratio < 1 else change.ratio
        low, high = sorted(1 / limit if change.ratio < 1 else limit for limit in change.ratio_interval)
        as_what = "fast" if change.ratio < 1 else "long"
        by = f"{what} is {times:.3g} times as {as_what}, 90 % interval {low:.3g} to {high:.3g}"
        return f"{by}: " + ("larger than the uncertainty" if change.certain else "within the uncertainty")

    def to_dict(self) -> dict[str, Any]:
        """The result as plain data; keys are stable and say their units."""
        first, second = self.bottlenecks
        return {
            "edits": list(self.edits),
            "before": {**summarise_prediction(self.before), "cost": self.cost_before.to_dict()},
            "after": {**summarise_prediction(self.after), "cost": self.cost_after.to_dict()},
            **self.change.to_dict(),
            "per_sample": self.per_sample.to_dict(),
            "bottleneck_before": first,
            "bottleneck_after": second,
            "bottleneck_moved": first != second,
            "verdict": self.verdict,
        }

    def headline(self) -> str:
        """The edits, both times, and the verdict."""
        low, high = (1e3 * limit for limit in self.change.interval)
        return (
            f"{', '.join(self.edits) or 'no edits'}: {format_milliseconds(self.before.iteration)} ms per step becomes "
            f"{format_milliseconds(self.after.iteration)} ms\n"
            f"change {1e3 * self.change.seconds:+.3f} ms, 90 % interval {low:+.3f} to {high:+.3f} ms\n{self.verdict}"
        )

    def records(self) -> Records:
        """Table "parts": milliseconds of the step by what it is made of, before and after."""
        return {"parts": [{"part": name, "before_ms": b, "after_ms": a} for name, b, a in self.parts()]}

    def parts(self) -> list[tuple[str, float, float]]:
        """What the step is made of, before and after, in milliseconds."""
        before, after = split_parts(self.before), split_parts(self.after)
        names = dict.fromkeys((*before, *after))
        return [(name, 1e3 * before.get(name, 0.0), 1e3 * after.get(name, 0.0)) for name in names]


def find_bottleneck(result: Prediction) -> tuple[str, float]:
    """What most of the critical path is spent on, and its share of the step."""
    return rank_bounds(result)[0]


def split_parts(result: Prediction) -> dict[str, float]:
    """Seconds of the step by what it is made of."""
    if result.parallel is not None:
        return dict(split_step(result))
    split = {
        "device active": result.device_active,
        "exposed communication": result.exposed_comm,
        "device idle": result.device_idle,
        "host busy": result.host,
    }
    return {**split, **{f"kernels: {name}": seconds for name, seconds in result.by_family.items()}}


def summarise_prediction(result: Prediction) -> dict[str, Any]:
    """The figures of a prediction that a change is told by."""
    document = result.to_dict()
    keys = ("workload", "platform", "device", "mode", "batch_size", "seq_len", "gpus", "iteration_ms", "interval_ms",
            "device_active_ms", "device_idle_ms", "exposed_comm_ms", "warnings")  # fmt: skip
    return {
        **{key: document[key] for key in keys},
        "memory_gb": result.needed_bytes / 1e9,
        "fits": result.fits,
        "parts_ms": {name: 1e3 * seconds for name, seconds in split_parts(result).items()},
        "prediction": document,
    }


def answer_what_if(resolved: Resolved, edits: Sequence[str], prices: Prices | None = None) -> WhatIf:
    """The step of a step before and after edits such as `batch-size=4096`."""
    wanted = parse_edits(edits)
    if not wanted:
        raise TraincastError("no edits were given; give one, such as batch-size=4096 or cuda-graph")
    base, changed = prepare_both_sides(resolved, wanted)
    return compare_predictions(base, predict(base), changed, predict(changed), wanted, prices)


def prepare_both_sides(resolved: Resolved, wanted: Sequence[Requirement]) -> tuple[Resolved, Resolved]:
    """The step and the edited one, both written in the same way."""
    base, changed = resolved, apply_edits(resolved, wanted)
    if changed.dlrm is not None and base.dlrm is None and resolved.gpus == changed.gpus:
        base = replace(base, dlrm=base.of_dlrm())
    return base, changed


def compare_predictions(
    base: Resolved,
    before: Prediction,
    changed: Resolved,
    after: Prediction,
    wanted: Sequence[Requirement],
    prices: Prices | None,
) -> WhatIf:
    """The result from two predictions."""
    prices = prices or Prices()
    return WhatIf(
        before=before,
        after=after,
        edits=tuple(one.text for one in wanted),
        change=compute_difference((base, before), (changed, after)),
        cost_before=compute_cost(before, prices),
        cost_after=compute_cost(after, prices),
    )
