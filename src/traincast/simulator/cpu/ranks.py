"""A step of several ranks of a measured machine: their ops one by one, and what they exchange."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from traincast.costs.cpu.exchanges import Exchange
from traincast.costs.cpu.profile import Profile
from traincast.ir.workload import Workload
from traincast.simulator.cpu.op_costs import OpCosts, op_costs
from traincast.simulator.cpu.together import RankPlan, rank_plan, step_seconds
from traincast.utils.quantiles import Z90
from traincast.utils.results import Records, Result
from traincast.utils.totals import totals


@dataclass(frozen=True, repr=False, kw_only=True)
class RanksPrediction(Result):
    """One step of several ranks, seconds of the machine that the profile was measured on. `computing` has what each
    rank computes; `exchanged` by kind of collective (calls, bytes of one rank's messages, seconds)."""

    workload: str
    batch_size: int
    profile: Profile
    iteration: float
    interval: tuple[float, float]
    computing: tuple[float, ...]
    exchanged: Mapping[str, tuple[int, int, float]]

    @property
    def ranks(self) -> int:
        """How many train together."""
        return len(self.computing)

    @property
    def exposed(self) -> float:
        """Seconds in which the rank that computes longest does not compute."""
        return max(self.iteration - max(self.computing), 0.0)

    def to_dict(self) -> dict[str, Any]:
        """Milliseconds."""
        return {
            "workload": self.workload,
            "batch_size": self.batch_size,
            "ranks": self.ranks,
            "device": dict(self.profile.identity),
            "clock": "wall",
            "iteration_ms": 1e3 * self.iteration,
            "interval_ms": [1e3 * bound for bound in self.interval],
            "computing_ms": [1e3 * seconds for seconds in self.computing],
            "exposed_comm_ms": 1e3 * self.exposed,
            "collectives": self.records()["collectives"],
        }

    def headline(self) -> str:
        """The step, what each rank computes, and what they exchange."""
        low, high = self.interval
        lines = [
            f"{self.workload}, {self.ranks} ranks, batch {self.batch_size} each: {1e3 * self.iteration:.2f} ms a step "
            f"on {self.profile.identity.get('name')} (90 % interval {1e3 * low:.2f} to {1e3 * high:.2f} ms)",
            f"  {'computing':<20} {1e3 * max(self.computing):9.3f} ms on the busiest rank, "
            f"{1e3 * min(self.computing):.3f} on the idlest",
            f"  {'not hidden':<20} {1e3 * self.exposed:9.3f} ms of exchanging and waiting",
        ]
        for kind, (calls, nbytes, seconds) in self.exchanged.items():
            lines.append(f"  {kind:<20} {1e3 * seconds:9.3f} ms in {calls} calls, {nbytes / 1e6:.2f} MB a rank")
        return "\n".join(lines)

    def records(self) -> Records:
        """Table "collectives": one row per kind."""
        rows = [
            {"collective": kind, "calls": calls, "bytes": nbytes, "ms": 1e3 * seconds}
            for kind, (calls, nbytes, seconds) in self.exchanged.items()
        ]
        return {"collectives": rows}


def predict_ranks(workload: Workload, profile: Profile, access: Sequence[Sequence[str]] = ()) -> RanksPrediction:
    """Predicts one step of all ranks of a workload; `access[r]` says which rows the lookups of rank r want, as in
    `predict_serial`."""
    programs = [workload.programs[number] for number in workload.ranks]
    laws = access or [()] * len(programs)
    costs = [op_costs(program, profile, law, ranks=len(programs)) for program, law in zip(programs, laws, strict=True)]
    plans = [rank_plan(program, cost.seconds) for program, cost in zip(programs, costs, strict=True)]
    seconds = step_seconds(plans, profile.exchanges.in_step, profile.jitter)
    factor = math.exp(Z90 * _spread(profile, costs, plans, seconds))
    return RanksPrediction(
        workload=workload.name, batch_size=programs[0].batch_size, profile=profile, iteration=seconds,
        interval=(seconds / factor, seconds * factor), computing=tuple(float(cost.seconds.sum()) for cost in costs),
        exchanged=_exchanged(profile, plans),
    )  # fmt: skip


def _spread(profile: Profile, costs: Sequence[OpCosts], plans: Sequence[RankPlan], seconds: float) -> float:
    """Relative deviation of a step: that of the busiest rank's ops, of what is exchanged, and of ranks from step to
    step. Collectives of one kind err alike, kinds apart."""
    errors = totals(
        (met[0].kind, profile.exchanges.sigma(met) * profile.exchanges.in_step(met)) for met in _meetings(plans)
    )
    computing = max(cost.deviation for cost in costs)
    return math.hypot(computing / seconds, profile.jitter, *(error / seconds for error in errors.values()))


def _exchanged(profile: Profile, plans: Sequence[RankPlan]) -> dict[str, tuple[int, int, float]]:
    found: dict[str, tuple[int, int, float]] = {}
    for met in _meetings(plans):
        calls, nbytes, seconds = found.get(met[0].kind, (0, 0, 0.0))
        message = max(exchange.message_bytes for exchange in met)
        found[met[0].kind] = (calls + 1, nbytes + message, seconds + profile.exchanges.in_step(met))
    return found


def _meetings(plans: Sequence[RankPlan]) -> list[list[Exchange]]:
    """What all ranks call, collective by collective."""
    return [[plan.exchanges[number] for plan in plans] for number in range(len(plans[0].exchanges))]
