"""What a page about plans says of those that are slower, or do not fit."""

from __future__ import annotations

from traincast.app.report.sharding import format_sharding
from traincast.hardware.platform import load_platform
from traincast.models.embeddings import Pooling, Table, Zipf
from traincast.models.placement import Placement, Plan
from traincast.planner.sharding.result import make_task
from traincast.planner.sharding.search import rank_plans
from traincast.utils.display.text import format_milliseconds

NAMES = ("hot", "cold")


def _answer(tables, **plans):
    task = make_task(tables, load_platform("dgx-a100"), gpus=2, batch_size=4096)
    return rank_plans(task, {name: Plan(NAMES, placements, 2) for name, placements in plans.items()})


def test_the_rank_that_lacks_host_memory_is_named():
    tables = [Table(name=name, rows=400_000_000, dim=128, pooling=Pooling.from_constant(2)) for name in NAMES]
    host = (Placement("table_wise", (1,), "fused_uvm"), Placement("table_wise", (1,), "fused_uvm"))
    result = _answer(tables, host=host)
    assert result.best.explain_slower(result.best) == "does not fit: rank 1 lacks 281.6 GB of host memory"
    assert "does not fit: rank 1 lacks 281.6 GB of host memory" in format_sharding(result)


def test_the_term_that_a_slower_plan_spends_more_on_is_named_with_its_rank():
    hot = Table(name="hot", rows=2_000_000, dim=128, pooling=Pooling.from_constant(100), access=Zipf(0.8))
    tables = [hot, Table(name="cold", rows=2_000_000, dim=128, pooling=Pooling.from_constant(100), access=Zipf(0.8))]
    apart = (Placement("table_wise", (0,)), Placement("table_wise", (1,)))
    together = (Placement("table_wise", (1,)), Placement("table_wise", (1,)))
    result = _answer(tables, apart=apart, together=together)
    assert [plan.name for plan in result.plans] == ["apart", "together"]
    said = result.plans[1].explain_slower(result.best)
    assert said.startswith("update ") and "on rank 1" in said


def test_a_term_that_is_less_than_half_of_the_difference_is_said_with_all_of_it():
    tables = [
        Table(name="hot", rows=40_000_000, dim=64, pooling=Pooling.from_constant(40), access=Zipf(1.05)),
        Table(name="cold", rows=1_000_000, dim=128, pooling=Pooling.from_constant(20), dtype="fp16", optimizer="sgd"),
    ]
    whole = (Placement("table_wise", (0,)), Placement("table_wise", (1,)))
    result = _answer(tables, whole=whole, split=(Placement.make_row_wise(2), Placement.make_row_wise(2)))
    slower = result.plans[1]
    assert slower.name == "split"
    slow, fast = (max(own.compute for own in plan.prediction.ranks) for plan in (slower, result.best))
    assert slower.explain_slower(result.best).startswith(
        f"kernels {format_milliseconds(slow - fast)} ms longer; of that "
    )
