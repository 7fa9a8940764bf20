"""A plan under the full walk: how long its step takes, and why it is slower than a better one."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from traincast.ir.memory import Memory
from traincast.models.placement.plan import Plan
from traincast.simulator.prediction.rank_results import RankResult, list_rank_memory
from traincast.simulator.prediction.result import Prediction
from traincast.utils.arrays import FloatArray
from traincast.utils.display.text import format_milliseconds

_WORTH_SAYING = 0.005  # of a step: what differs by less is not given as a reason
_ALIKE = 0.01  # of the longest: ranks that differ by less spend the same


@dataclass(frozen=True, eq=False, kw_only=True)
class ScoredPlan:
    """A plan with its full walk, its fast cost in seconds, and what each rank spends on what (seconds by term;
    exchanges without waiting). `host_limit` are the bytes of host memory that a rank may use."""

    name: str
    plan: Plan
    prediction: Prediction
    fast_seconds: float
    terms: dict[str, FloatArray]
    host_limit: float

    @property
    def seconds(self) -> float:
        """One step, by the full walk."""
        return self.prediction.iteration

    @property
    def order(self) -> tuple[float, float]:
        """Better plans come first: those that lack no memory, or least, by seconds."""
        return self.missing, self.seconds

    @cached_property
    def rank_memory(self) -> list[Memory]:
        """What each rank holds at its peak."""
        return list_rank_memory(self.prediction.walk)

    @cached_property
    def missing(self) -> float:
        """Bytes that the fullest rank lacks, of its device as `fits` counts them or of host memory; 0: all fit."""
        memory = self.prediction.memory
        device = 0.0 if memory.fits else max(memory.required_bytes - memory.limit_bytes, 1.0)
        return max(device, memory.host_bytes - self.host_limit, 0.0)

    @property
    def fits(self) -> bool:
        """Whether every rank has room."""
        return self.missing == 0.0

    def state_missing(self) -> str:
        """What is missing, and on which rank: `rank 3 lacks 1.2 GB of host memory`."""
        memory = self.prediction.memory
        on_host = memory.fits
        held = [one.events.host_bytes if on_host else one.peak_bytes for one in self.rank_memory]
        return f"rank {int(np.argmax(held))} lacks {self.missing / 1e9:.1f} GB{' of host memory' * on_host}"

    @property
    def kinds(self) -> dict[str, int]:
        """How many tables are sharded in which way, the most frequent first."""
        host = " in host memory"
        return dict(Counter(p.kind + host * p.kernel.in_host_memory for p in self.plan.placements).most_common())

    @property
    def busiest(self) -> RankResult:
        """The rank that computes longest; its compute, exposed communication and idle time make up the step."""
        return max(self.prediction.ranks, key=lambda result: result.compute)

    def walked(self, rank: int) -> dict[str, float]:
        """What the full walk says of a rank, in milliseconds."""
        result = next(result for result in self.prediction.ranks if rank in result.ranks)
        return {
            "compute_ms": 1e3 * result.compute,
            "exposed_comm_ms": 1e3 * result.exposed_comm,
            "waiting_ms": 1e3 * result.waiting,
            "idle_ms": 1e3 * result.device_idle,
        }

    def explain_slower(self, best: ScoredPlan) -> str:
        """What makes the plan slower than the best one: a term of a rank, or a device that waits for its host."""
        if not self.fits:
            return f"does not fit: {self.state_missing()}"
        mine, theirs = self.busiest, best.busiest
        more = {
            "kernels": mine.compute - theirs.compute,
            "exchanges": mine.exposed_comm - theirs.exposed_comm,
            "idle": mine.device_idle - theirs.device_idle,
        }
        what = max(more, key=lambda name: more[name])
        if more[what] <= _WORTH_SAYING * best.seconds:
            return ""
        return self._explain_idle(best, more[what]) if what == "idle" else self._explain_busy(best, what, more[what])

    def _explain_idle(self, best: ScoredPlan, seconds: float) -> str:
        longer = f"devices wait for their hosts {format_milliseconds(seconds)} ms longer"
        kinds, fewer = len(self.kinds), len(best.kinds)
        if kinds > fewer:
            return f"{longer}: {kinds} kinds of sharding instead of {fewer}, each with its own launches and collectives"
        return f"{longer}: more launches and collectives"

    def _explain_busy(self, best: ScoredPlan, what: str, seconds: float) -> str:
        """The term of `what` ("kernels" or "exchanges") that takes most more than in the best plan."""
        excess = {
            term: float(spent.max()) - float(best.terms[term].max() if term in best.terms else 0.0)
            for term, spent in self.terms.items()
            if ("exchange" in term or "gradients" in term) == (what == "exchanges")
        }
        term = max(excess, key=lambda name: excess[name], default="")
        if not term or excess[term] <= 0:
            return f"exposed {what} {format_milliseconds(seconds)} ms longer on rank {self.busiest.ranks[0]}"
        spent = self.terms[term]
        where = "all ranks" if spent.max() - spent.min() < _ALIKE * spent.max() else f"rank {int(np.argmax(spent))}"
        notes = (
            f"{term} {format_milliseconds(float(spent.max()))} ms on {where}, {format_milliseconds(excess[term])} "
            "ms more"
        )
        if 2.0 * excess[term] >= seconds:
            return notes
        return f"{what} {format_milliseconds(seconds)} ms longer; of that {notes}"
