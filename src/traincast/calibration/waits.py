"""What a collective takes longer inside a step than alone: threads sleep and are woken, ranks arrive apart.

Small steps are run on several ranks at once. What each takes on the wall's clock beyond the simulation of its own plan
(`rank_plan`), with collectives as they take alone, is divided by their number.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from traincast.costs.cpu.collectives import CollectiveModels, CpuCollective
from traincast.simulator.cpu.rank_plan import RankPlan, Stretch, compute_step_seconds
from traincast.utils.errors import TraincastError

if TYPE_CHECKING:
    from traincast.costs.cpu.samples import Sample

_MOST_STRETCHES = 10_000
_CALM_SHARE = 0.5  # of the steps, those alongside which the reference took least: neighbours make ranks wait, too
_DISTURBED = 1.0  # relative spread of a step beyond which it says too little: ranks that wait for each other spread


def write_plan_text(plan: RankPlan) -> str:
    """A plan as JSON, its computing as shares of the whole."""
    whole = sum(one.seconds for one in plan.stretches) or 1.0
    stretches = [[round(one.seconds / whole, 6), one.calls, one.awaits] for one in plan.stretches]
    return json.dumps([stretches, [[one.kind, one.message_bytes, one.sent] for one in plan.exchanges]])


def parse_plan(text: str, seconds: float) -> RankPlan:
    """The plan that `plan_text` wrote, of a rank that computes for so long."""
    try:
        stretches, exchanges = json.loads(text)
        plan = RankPlan(
            tuple(Stretch(seconds * float(share), int(calls), int(awaits)) for share, calls, awaits in stretches),
            tuple(
                CpuCollective(str(kind), int(size), tuple(int(part) for part in sent)) for kind, size, sent in exchanges
            ),
        )
        if not 0 < len(plan.stretches) <= _MOST_STRETCHES:
            raise ValueError(f"{len(plan.stretches)} stretches")
        for one in plan.stretches:
            if not (one.seconds >= 0.0 and max(one.calls, one.awaits) < len(plan.exchanges)):
                raise ValueError(f"a stretch of {one}")
    except (TypeError, ValueError) as error:
        raise TraincastError(f"a step of ranks in the store is damaged ({error}); measure it again") from None
    return plan


def add_late_collectives(
    models: CollectiveModels, steps: Iterable[Sample], reference: float, jitter: float
) -> CollectiveModels:
    """The models with what collectives take longer inside a step: the median over the calmer half of the steps of ranks
    whose collectives were all measured, at least none."""
    late = []
    for step in sorted(steps, key=lambda one: one.reference_wall):
        if step.spread < _DISTURBED:
            plan = parse_plan(step.plan, reference * step.busy / step.reference_busy)
            if plan.exchanges and all(models.knows([one] * step.ranks) for one in plan.exchanges):
                simulated = compute_step_seconds([plan] * step.ranks, models.cost, jitter)
                late.append((reference * step.ratio("wall") - simulated) / len(plan.exchanges))
    calm = late[: math.ceil(_CALM_SHARE * len(late))]
    return replace(models, late=max(0.0, float(f"{np.median(calm):.4g}"))) if calm else models
