"""A what-if asked: edits by name on a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from traincast.planner.what_if.difference import compute_difference
from traincast.planner.what_if.edits.registry import Requirement, apply_edits, parse_edits
from traincast.planner.what_if.money import Prices, compute_cost
from traincast.planner.what_if.result import WhatIf
from traincast.simulator.prediction.result import Prediction
from traincast.simulator.scenario.predict import predict
from traincast.simulator.scenario.resolved import Resolved
from traincast.utils.errors import TraincastError


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
