"""What a plan decides, from what groups have on ranks: against formulas by hand."""

from __future__ import annotations

import numpy as np
import pytest

from traincast.models.placement import ShardingKind
from traincast.models.sharded_dlrm.layout import ScopeRole
from traincast.planner.sharding.durations import Stage
from traincast.planner.sharding.max_plus import EXCHANGES, Part, Slot


def _stages(cost, held):
    """Stages of one plan: `held` maps (kind, rank) to tables, lookups, columns and elements."""
    ranks, groups = cost.task.gpus, len(cost.groups)
    stages = np.zeros((1, ranks, groups, len(Stage)))
    for (kind, rank), values in held.items():
        group = next(number for number, group in enumerate(cost.groups) if group.kind is kind)
        stages[0, rank, group, Stage.TABLES : Stage.ELEMENTS + 1] = values
    return stages


def _durations(cost, stages):
    _, structure = next(cost._group_by_structure(stages))
    return cost._durations.of(structure, stages), structure


WHOLE = {
    (ShardingKind.TABLE_WISE, 0): (2, 4000.0, 128, 6_400_000),
    (ShardingKind.TABLE_WISE, 2): (1, 9000.0, 64, 320_000),
}


def test_stages_are_named_in_the_order_of_their_axis():
    assert [stage.value for stage in Stage] == list(range(10))


def test_lengths_and_row_numbers_go_to_whoever_has_most(node_cost):
    durations, _ = _durations(node_cost, _stages(node_cost, WHOLE))
    world = node_cost._durations.world
    samples = 512 * 4
    lengths = world.seconds("all_to_all", np.array([4.0 * samples * 2]))
    values = world.seconds("all_to_all", np.array([8.0 * 9000]))
    assert durations[Slot(ScopeRole.LENGTHS, ShardingKind.TABLE_WISE)].item() == pytest.approx(lengths[0])
    assert durations[Slot(ScopeRole.VALUES, ShardingKind.TABLE_WISE)].item() == pytest.approx(values[0])


def test_pooled_rows_of_whole_tables_are_exchanged_there_and_back_alike(node_cost):
    durations, _ = _durations(node_cost, _stages(node_cost, WHOLE))
    expected = node_cost._durations.world.seconds("all_to_all", np.array([4.0 * 512 * 4 * 128]))
    for role in (ScopeRole.OUT, ScopeRole.BACK):
        assert durations[Slot(role, ShardingKind.TABLE_WISE)].item() == pytest.approx(expected[0])


def test_parts_by_rows_are_reduced_and_gathered(node_cost):
    held = {(ShardingKind.ROW_WISE, rank): (1, 1000.0, 64, 1_600_000) for rank in range(4)}
    durations, _ = _durations(node_cost, _stages(node_cost, held))
    world, message = node_cost._durations.world, np.array([4.0 * 512 * 4 * 64])
    for role, kind in ((ScopeRole.OUT, "reduce_scatter"), (ScopeRole.BACK, "all_gather")):
        assert durations[Slot(role, ShardingKind.ROW_WISE)].item() == pytest.approx(world.seconds(kind, message)[0])


def test_parts_by_rows_of_a_node_are_reduced_within_and_exchanged_across(two_nodes_cost):
    held = {(ShardingKind.TABLE_ROW_WISE, rank): (1, 1000.0, 64, 800_000) for rank in range(8)}
    durations, structure = _durations(two_nodes_cost, _stages(two_nodes_cost, held))
    within = durations[Slot(ScopeRole.OUT, ShardingKind.TABLE_ROW_WISE)]
    assert within.shape == (1, 16)
    assert (within[0, :8] > within[0, 8:]).all()  # the other node has nothing to add up
    across = durations[Slot(ScopeRole.OUT_ACROSS, ShardingKind.TABLE_ROW_WISE)]
    assert across.shape == (1, 1)
    assert {slot for slot in structure.slots if slot.role is ScopeRole.BACK_WITHIN}


def test_gradients_of_copies_are_as_large_as_the_tables(node_cost):
    held = {(ShardingKind.DATA_PARALLEL, rank): (1, 500.0, 64, 12_800) for rank in range(4)}
    durations, structure = _durations(node_cost, _stages(node_cost, held))
    (slot,) = [slot for slot in structure.slots if slot.role is Part.COPIES]
    expected = node_cost._durations.world.seconds("all_reduce", np.array([4.0 * 12_800]))
    assert durations[slot].item() == pytest.approx(expected[0])


def test_ranks_without_tables_are_told(node_cost):
    durations, structure = _durations(node_cost, _stages(node_cost, WHOLE))
    (slot,) = [slot for slot in structure.slots if slot.role is Part.HELD]
    assert durations[slot].tolist() == [[1.0, 0.0, 1.0, 0.0]]


def test_the_host_does_something_for_every_sender_but_the_first(node_cost):
    durations, structure = _durations(node_cost, _stages(node_cost, WHOLE))
    for role in (Part.VIEWS, Part.GRADIENTS):
        slot = Slot(role, ShardingKind.TABLE_WISE)
        assert durations[slot].item() == pytest.approx(structure.per_sender[slot])
    alone = {(ShardingKind.TABLE_WISE, 1): (4, 4000.0, 128, 6_400_000)}
    durations, _ = _durations(node_cost, _stages(node_cost, alone))
    assert durations[Slot(Part.VIEWS, ShardingKind.TABLE_WISE)].item() == 0.0


def test_durations_of_kernels_are_the_stages_themselves(node_cost):
    stages = _stages(node_cost, WHOLE)
    stages[0, :, 0, Stage.LOOKUP], stages[0, :, 0, Stage.SORT] = [1, 2, 3, 4], [5, 6, 7, 8]
    stages[0, :, 0, Stage.BACKWARD], stages[0, :, 0, Stage.LAUNCHES] = [9, 8, 7, 6], [1, 0, 1, 0]
    durations, _ = _durations(node_cost, stages)
    for role, expected in (
        (ScopeRole.LOOKUP, [1, 2, 3, 4]),
        (Part.SORT, [5, 6, 7, 8]),
        (Part.BACKWARD, [9, 8, 7, 6]),
        (Part.LAUNCHES, [1, 0, 1, 0]),
    ):
        assert durations[Slot(role, ShardingKind.TABLE_WISE, 0)].tolist() == [expected]


@pytest.mark.parametrize("role", [ScopeRole.ORDER, ScopeRole.ARRIVE, ScopeRole.JOIN])
def test_small_kernels_grow_with_the_load(node_cost, role):
    heavy = {key: tuple(1000 * value for value in values) for key, values in WHOLE.items()}
    slot = Slot(role, None if role is ScopeRole.ORDER else ShardingKind.TABLE_WISE)
    light, much = (_durations(node_cost, _stages(node_cost, held))[0][slot] for held in (WHOLE, heavy))
    assert (much >= light).all()
    assert much.max() > light.max()


def test_every_slot_has_a_duration_that_fits_all_ranks(node_cost, two_nodes_cost):
    for cost in (node_cost, two_nodes_cost):
        everything = {
            (group.kind, rank): (1, 100.0, 64, 64_000) for group in cost.groups for rank in range(cost.task.gpus)
        }
        durations, structure = _durations(cost, _stages(cost, everything))
        assert set(durations) == set(structure.slots)
        for slot, seconds in durations.items():
            assert seconds.shape in ((1, 1), (1, cost.task.gpus)), slot
            assert (seconds >= 0.0).all(), slot


def test_plans_are_worked_out_side_by_side_as_alone(node_cost):
    others = {key: tuple(3 * value for value in values) for key, values in WHOLE.items()}
    both = np.concatenate([_stages(node_cost, held) for held in (WHOLE, others)])
    together, structure = _durations(node_cost, both)
    for number in range(2):
        alone = node_cost._durations.of(structure, both[number : number + 1])
        for slot, seconds in alone.items():
            assert np.broadcast_to(together[slot], (2, 4))[number] == pytest.approx(np.broadcast_to(seconds, (1, 4))[0])


def test_interpolation_goes_on_beyond_the_heaviest_load(node_cost):
    around = node_cost._durations.around[Slot(ScopeRole.LOOKUP, ShardingKind.TABLE_WISE, 0)]
    last, before = around.load[-1], around.load[-2]
    assert around.interpolate_beyond(around.load) == pytest.approx(around.seconds - around.seconds[0])
    assert around.interpolate_beyond(around.load[:1])[0] == 0.0
    steps = around.interpolate_beyond(np.array([last, 2 * last - before]))
    assert steps[1] - steps[0] == pytest.approx(around.seconds[-1] - around.seconds[-2])


def test_stages_beyond_the_kernels_follow_from_the_others(node_cost):
    """More lookups take longer to look up and to sort; only tables with a cache fill one."""
    sums = node_cost.choices.terms[:1] * np.array([[1.0], [50.0]])
    stages = node_cost.stages(sums, np.zeros(2, dtype=np.int64))
    assert stages.shape == (2, len(Stage))
    for stage in (Stage.FORWARD, Stage.BACKWARD, Stage.LOOKUP, Stage.SORT):
        assert stages[1, stage] > stages[0, stage]
    assert (stages[:, Stage.LOOKUP] >= stages[:, Stage.FORWARD]).all()
    assert (stages[:, Stage.FILLS] == 0.0).all()


def test_exchanges_of_fixed_size_do_not_depend_on_the_plan(node_cost):
    slot = Slot(ScopeRole.SIZES, ShardingKind.TABLE_WISE)
    more = {key: tuple(10 * value for value in values) for key, values in WHOLE.items()}
    seconds = {_durations(node_cost, _stages(node_cost, held))[0][slot].item() for held in (WHOLE, more)}
    assert len(seconds) == 1
    assert slot.role in EXCHANGES
