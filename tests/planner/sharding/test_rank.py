"""What the fast cost leaves open in a rank's program: all of it, once, and nothing else."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.planner.sharding.conftest import table
from traincast.costs.kernels.collective import COLLECTIVE
from traincast.costs.kernels.lower import lower_program
from traincast.costs.kernels.registry import LoweringContext
from traincast.hardware.platform import load_platform
from traincast.models.placement import ShardingKind
from traincast.models.sharded_dlrm.dense import Dense
from traincast.models.sharded_dlrm.layout import ScopeRole
from traincast.planner.sharding.cost import FastCost
from traincast.planner.sharding.max_plus import EXCHANGES, SMALL, Part, Slot
from traincast.planner.sharding.result import make_task
from traincast.planner.sharding.structure import RankProgram, compile_rank, make_typical_layout
from traincast.simulator.schedule import Code

DENSE = Dense(bottom_mlp=(8, 64), top_mlp=(32, 1), interaction="cat")


def _rank(cost, *kinds):
    used = tuple(number for number, group in enumerate(cost.groups) if group.kind in kinds)
    return compile_rank(cost.task, cost._build_layout(used), cost.groups)


@pytest.fixture(scope="module")
def mixed_cost():
    """Two types of tables, a dense part, two nodes of eight GPUs."""
    tables = [table("a", 50_000), table("b", 900, dtype="fp16", optimizer="sgd"), table("c", 70_000, weighted=True)]
    return FastCost(make_task(tables, load_platform("dgx-a100"), gpus=16, batch_size=128, dense=DENSE))


@pytest.fixture(scope="module")
def mixed_rank(mixed_cost):
    return _rank(mixed_cost, *ShardingKind)


def _calls(rank):
    lowered = lower_program(rank.program, LoweringContext(framework_version=(2, 13), tf32=False))
    return {
        at: lowered.calls[rank.schedule.call[at]] for at in np.flatnonzero(rank.schedule.code == Code.LAUNCH).tolist()
    }


def test_every_exchange_is_open_and_meets_somebody(mixed_rank):
    for at, call in _calls(mixed_rank).items():
        assert (call.family is COLLECTIVE) == (at in mixed_rank.slots and mixed_rank.slots[at].collective != "")


def test_every_lookup_and_update_is_open_once_per_group(mixed_cost, mixed_rank):
    for role, kernel in ((ScopeRole.LOOKUP, "tbe_forward"), (Part.BACKWARD, "tbe_backward")):
        kernels = [at for at, call in _calls(mixed_rank).items() if call.kind.startswith(kernel)]
        slots = [mixed_rank.slots[at] for at in kernels]
        assert sorted(slot.group for slot in slots) == list(range(len(mixed_cost.groups)))
        assert all(slot.role is role and mixed_cost.groups[slot.group].kind is slot.kind for slot in slots)


def test_every_kernel_of_the_tables_is_open_or_around_an_open_one(mixed_rank):
    launched = _calls(mixed_rank)
    covered = {*mixed_rank.slots, *(at for launches in mixed_rank.around.values() for at in launches)}
    names = [mixed_rank.program.symbolic[i].name for i in mixed_rank.program.columns.op_signature.tolist()]
    ours = [at for at in launched if names[mixed_rank.schedule.op[at]].startswith("fbgemm::")]
    assert set(ours) <= covered


def test_small_kernels_go_with_one_open_one_only(mixed_rank):
    launches = [at for launches in mixed_rank.around.values() for at in launches]
    assert len(launches) == len(set(launches))
    for slot, around in mixed_rank.around.items():
        assert (mixed_rank.slots.get(around[0]) == slot) == (slot.role in SMALL)


def test_only_slots_of_dense_gradients_are_told_apart_by_number_and_place(mixed_rank):
    assert len(set(mixed_rank.slots.values())) == len(mixed_rank.slots)
    dense = [slot for slot in mixed_rank.slots.values() if slot.role is ScopeRole.DENSE]
    assert len(dense) == 2  # one per module under DDP: bottom and top
    assert all(slot.kind is None for slot in dense)


def test_messages_have_bytes(mixed_rank):
    collectives = {slot for slot in mixed_rank.slots.values() if slot.collective}
    assert set(mixed_rank.bytes) == collectives
    assert all(nbytes >= 0 for nbytes in mixed_rank.bytes.values())


@pytest.mark.parametrize(
    ("slot", "collective"),
    [
        (Slot(ScopeRole.LOOKUP, ShardingKind.TABLE_WISE, 0), ""),
        (Slot(Part.SORT, ShardingKind.TABLE_WISE, 0), ""),
        (Slot(Part.HELD, ShardingKind.TABLE_WISE), ""),
        (Slot(ScopeRole.OUT, ShardingKind.TABLE_WISE), "world"),
        (Slot(ScopeRole.OUT, ShardingKind.TABLE_ROW_WISE), "within"),
        (Slot(ScopeRole.OUT_ACROSS, ShardingKind.TABLE_ROW_WISE), "across"),
        (Slot(ScopeRole.BACK, ShardingKind.TABLE_ROW_WISE), "across"),
        (Slot(ScopeRole.BACK_WITHIN, ShardingKind.TABLE_ROW_WISE), "within"),
        (Slot(ScopeRole.VALUES, ShardingKind.TABLE_ROW_WISE), "world"),
        (Slot(Part.COPIES, ShardingKind.DATA_PARALLEL, 3), "world"),
        (Slot(ScopeRole.DENSE), "world"),
    ],
)
def test_who_meets(slot, collective):
    assert slot.collective == collective


def test_kernels_are_no_exchanges():
    assert EXCHANGES.isdisjoint(SMALL)


def test_hosts_do_more_for_every_sender(mixed_rank):
    late, senders = mixed_rank.list_host_work()
    for kind in (ShardingKind.TABLE_WISE, ShardingKind.COLUMN_WISE, ShardingKind.TABLE_ROW_WISE):
        assert {Slot(Part.VIEWS, kind), Slot(Part.GRADIENTS, kind)} <= set(senders)
    for kind in (ShardingKind.ROW_WISE, ShardingKind.DATA_PARALLEL):  # their senders never change
        assert {Slot(Part.VIEWS, kind), Slot(Part.GRADIENTS, kind)}.isdisjoint(senders)
    assert set(senders) <= set(late.values())
    for at, slot in late.items():
        if slot in senders:
            assert mixed_rank.schedule.scope[at] == senders[slot]


def test_sorts_are_launched_by_the_host_and_caches_filled():
    tables = [table("a", 120_000_000, 128, optimizer="adam"), table("b", 120_000_000, 128, optimizer="adam")]
    cost = FastCost(make_task(tables, load_platform("dgx-a100"), gpus=2, batch_size=256))
    cached = [number for number, group in enumerate(cost.groups) if group.kernel.cached]
    assert cached
    rank = _rank(cost, *{group.kind for group in cost.groups})
    late, _ = rank.list_host_work()
    assert sorted(slot.group for slot in late.values() if slot.role is Part.FILLS) == cached
    assert sorted(slot.group for slot in late.values() if slot.role is Part.LAUNCHES) == list(range(len(cost.groups)))


def _needs(rank):
    """By scope: what a rank must hold to run it."""
    needs = {}
    for run in rank.list_skips(1e-6):
        for scope in np.unique(rank.schedule.scope[run.first : run.last]).tolist():
            needs[scope] = run.slot
    return needs


def test_ranks_without_a_group_skip_its_lookup_and_update(mixed_cost, mixed_rank):
    needs = _needs(mixed_rank)
    for at, slot in mixed_rank.slots.items():
        if slot.role in (ScopeRole.LOOKUP, Part.BACKWARD):
            held = needs[int(mixed_rank.schedule.scope[at])]
            assert (held.role, held.kind, held.group) == (Part.HELD, slot.kind, slot.group)


def test_every_rank_takes_part_in_exchanges_of_pooled_rows(mixed_rank):
    needs = _needs(mixed_rank)
    for at, slot in mixed_rank.slots.items():
        if slot.collective and slot.role is not Part.COPIES:
            assert int(mixed_rank.schedule.scope[at]) not in needs


def test_what_several_groups_share_needs_two_of_them(mixed_rank):
    beside = [at for at, slot in mixed_rank.slots.items() if slot.role is ScopeRole.BESIDE]
    assert len(beside) == len(ShardingKind)
    needs = _needs(mixed_rank)
    for at in beside:
        assert needs[int(mixed_rank.schedule.scope[at])].number == 2


def test_tables_that_every_rank_has_are_never_skipped(node_cost):
    rank = _rank(node_cost, ShardingKind.ROW_WISE, ShardingKind.DATA_PARALLEL)
    assert rank.list_skips(1e-6) == []


def test_a_rank_without_whole_tables_runs_something_in_place_of_their_lookups(node_cost):
    (run,) = [run for run in _rank(node_cost, ShardingKind.TABLE_WISE).list_skips(1e-6) if run.instead]
    assert run.slot == Slot(Part.HELD, ShardingKind.TABLE_WISE, 0)


def test_stretches_do_not_overlap_and_are_in_order(mixed_rank):
    runs = mixed_rank.list_skips(1e-6)
    assert all(before.last <= after.first for before, after in zip(runs, runs[1:], strict=False))
    assert all(run.first < run.last for run in runs)


def _weights(rank, group):
    """The type of the weights that the update of a group reads."""
    (at,) = [at for at, slot in rank.slots.items() if slot.role is Part.BACKWARD and slot.group == group]
    signature = rank.program.signatures[rank.program.columns.op_signature[rank.schedule.op[at]]]
    return signature.inputs[1].dtype


def test_another_order_in_the_step_breaks_nothing(node_task):
    """Whatever the order in which kernels are written, each duration goes with the group that it is of."""
    tables = tuple(replace(one, dtype=dtype) for one, dtype in zip(node_task.tables, ["fp32", "fp16"] * 2, strict=True))
    task = replace(node_task, tables=tables)
    cost = FastCost(task)
    layout = make_typical_layout(cost._build_layout((0, 1)), columns=320)
    turned = replace(layout, sections=tuple(_turned(section) for section in layout.sections))
    before, after = (RankProgram.of(task, one, cost.groups) for one in (layout, turned))
    for role in (ScopeRole.LOOKUP, Part.BACKWARD):
        orders = [
            [slot.group for _, slot in sorted(rank.slots.items()) if slot.role is role] for rank in (before, after)
        ]
        assert orders == [[0, 1], [1, 0]]
    for rank in (before, after):
        assert (_weights(rank, 0), _weights(rank, 1)) == ("float16", "float32")
    assert set(before.slots.values()) == set(after.slots.values())
    assert {slot: len(launches) for slot, launches in before.around.items()} == {
        slot: len(launches) for slot, launches in after.around.items()
    }


def _order(rank, role):
    return [slot.group for _, slot in sorted(rank.slots.items()) if slot.role is role]


def _turned(section):
    return replace(section, ranks=tuple(batches[::-1] for batches in section.ranks))


def test_a_program_is_priced_launch_by_launch(node_task, node_cost):
    rank = _rank(node_cost, ShardingKind.TABLE_WISE)
    launches = rank.schedule.code == Code.LAUNCH
    assert (rank.seconds[~launches] == 0.0).all()
    kernels = [at for at in np.flatnonzero(launches).tolist() if not (at in rank.slots and rank.slots[at].collective)]
    assert (rank.seconds[kernels] > 0.0).all()
    assert isinstance(rank, RankProgram)
