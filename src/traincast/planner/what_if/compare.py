"""A what-if asked: edits by name on a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from traincast.planner.what_if.difference import difference
from traincast.planner.what_if.edits.registry import Requirement, applied, parse_edits
from traincast.planner.what_if.money import Prices, cost_of
from traincast.planner.what_if.result import WhatIf
from traincast.simulator.prediction.result import Prediction
from traincast.simulator.scenario.kinds import is_laid_out
from traincast.simulator.scenario.predict import predict
from traincast.simulator.scenario.resolved import Resolved
from traincast.utils.errors import TraincastError


def ask(resolved: Resolved, edits: Sequence[str], prices: Prices | None = None) -> WhatIf:
    """The step of a step before and after edits such as `batch-size=4096`."""
    wanted = parse_edits(edits)
    if not wanted:
        raise TraincastError("no edits were given; give one, such as batch-size=4096 or cuda-graph")
    base, changed = both(resolved, wanted)
    return compared(base, predict(base), changed, predict(changed), wanted, prices)


def both(resolved: Resolved, wanted: Sequence[Requirement]) -> tuple[Resolved, Resolved]:
    """The step and the edited one, both written in the same way."""
    base, changed = resolved, applied(resolved, wanted)
    if base.kind != changed.kind:
        if is_laid_out(changed.scenario):
            base = base.changed(tp=1)
        else:
            base, changed = replace(base, by_ops=True), replace(changed, by_ops=True)
    if changed.dlrm is not None and base.dlrm is None and resolved.gpus == changed.gpus:
        base = replace(base, dlrm=base.of_dlrm())
    return base, changed


def compared(
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
        change=difference((base, before), (changed, after)),
        cost_before=cost_of(before, prices),
        cost_after=cost_of(after, prices),
    )
