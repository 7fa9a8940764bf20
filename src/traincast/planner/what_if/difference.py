"""The interval of a change: two predictions share most of their errors, so their ratio is known better than either.

The logarithm of a step's time errs by sources that are independent of each other: for every kernel family one error
that its kernels share, for every distinct kernel one of its own, the host, the software's release, the set-up of the
system. A source that both predictions have counts once, with the difference of their shares.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from traincast.costs.kernels.unmodelled import OPAQUE
from traincast.simulator.prediction.prediction import RELEASE_SPREAD, SETUP_SPREAD, SHARED_ERROR
from traincast.simulator.prediction.result import Prediction
from traincast.simulator.scenario.programs import TORCHREC
from traincast.simulator.scenario.resolved import Resolved
from traincast.utils.metrics import Z90

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
