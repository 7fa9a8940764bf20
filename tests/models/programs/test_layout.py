"""What each rank has of the tables under a plan, counted by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from traincast.models.embeddings import Pooling, Table
from traincast.models.placement import Placement, Plan, ShardingKind
from traincast.models.sharded_dlrm.layout import assign_shards_to_ranks
from traincast.utils.errors import TraincastError

BATCH, WORLD, NODE = 10, 4, 2


def table(number, **fields):
    fields = {"rows": 1000, "dim": 32, "pooling": Pooling.from_constant(2), **fields}
    return Table(name=f"t{number}", **fields)


def laid_out(tables, placements, *, world=WORLD, node=NODE, batch=BATCH):
    plan = Plan(tuple(each.name for each in tables), tuple(placements), world)
    return assign_shards_to_ranks(tables, plan, batch_size=batch, gpus_per_node=node)


def test_a_whole_table_is_looked_up_on_one_rank_for_the_samples_of_all():
    layout = laid_out([table(0)], [Placement("table_wise", (1,))])

    (section,) = layout.sections
    (batch,) = section.ranks[1]

    assert [len(batches) for batches in section.ranks] == [0, 1, 0, 0]
    assert (batch.tables, batch.columns, batch.rows, batch.elements) == (1, 32, 1000, 32_000)
    assert batch.lookups == 2 * BATCH * WORLD
    assert (section.columns, section.tables) == ((0, 32, 0, 0), (0, 1, 0, 0))
    assert (section.features, section.own_lookups) == (1, 2 * BATCH)
    assert section.count_local_lookups(1) == 2 * BATCH


def test_a_table_by_rows_is_a_quarter_on_each_of_four_ranks():
    (section,) = laid_out([table(0)], [Placement.make_row_wise(WORLD)]).sections

    assert [batches[0].rows for batches in section.ranks] == [250] * 4
    assert section.columns == (32,) * 4, "every rank pools all columns of its rows"
    assert [batches[0].lookups for batches in section.ranks] == [2 * BATCH] * 4, "dealt evenly"
    assert section.features == 1
    assert section.own_lookups == 2 * BATCH


def test_a_table_by_columns_is_as_many_features_as_slices():
    (section,) = laid_out([table(0)], [Placement("column_wise", (0, 1, 1, 3))]).sections

    assert section.columns == (8, 16, 0, 8)
    assert section.tables == (1, 2, 0, 1)
    assert section.features == 4
    assert section.own_lookups == 4 * 2 * BATCH, "every slice is looked up"


def test_a_table_by_rows_within_a_node_is_on_its_ranks_only():
    (section,) = laid_out([table(0)], [Placement("table_row_wise", (2, 3))]).sections

    assert section.tables == (0, 0, 1, 1)
    assert [sum(batch.rows for batch in batches) for batches in section.ranks] == [0, 0, 500, 500]
    assert section.features == 1, "counted at the first rank of every node"


def test_a_copied_table_is_looked_up_for_a_rank_s_own_samples():
    (section,) = laid_out([table(0)], [Placement.make_data_parallel(WORLD)]).sections

    assert section.kind is ShardingKind.DATA_PARALLEL
    assert section.lookups == (2 * BATCH,) * 4
    assert (section.features, section.own_lookups) == (1, 2 * BATCH)
    assert section.count_local_lookups(3) == 2 * BATCH


def test_parts_that_differ_in_type_optimizer_weights_or_memory_have_kernels_of_their_own():
    tables = [
        table(0),
        table(1),
        table(2, dtype="fp16"),
        table(3, optimizer="adam"),
        table(4, weighted=True),
        table(5),
    ]
    placements = [Placement("table_wise", (0,))] * 5 + [Placement("table_wise", (0,), "fused_uvm")]

    (section,) = laid_out(tables, placements).sections

    batches = section.ranks[0]
    assert sorted(batch.tables for batch in batches) == [1, 1, 1, 1, 2]
    assert len({(batch.kernel, batch.dtype, batch.weighted, batch.optimizer) for batch in batches}) == 5
    assert section.weighted


@pytest.mark.parametrize(
    ("optimizer", "state"), [("sgd", 0), ("adagrad", 32_000), ("rowwise_adagrad", 1000), ("adam", 64_000)]
)
def test_state_is_counted_per_weight_or_per_row(optimizer, state):
    (section,) = laid_out([table(0, optimizer=optimizer)], [Placement("table_wise", (0,))]).sections
    assert section.ranks[0][0].state_elements == state


def test_a_cache_holds_a_fraction_of_the_rows_and_misses_fetch_the_rest():
    placement = Placement("table_wise", (0,), "fused_uvm_caching", 0.25)
    (section,) = laid_out([table(0)], [placement]).sections

    batch = section.ranks[0][0]

    assert batch.cached_elements == 250 * 32
    assert 0 < batch.fetched_rows < batch.lookups
    assert batch.fetched_bytes == pytest.approx(batch.fetched_rows * 32 * 4, abs=32 * 4)


def test_tables_on_the_device_fetch_nothing():
    (section,) = laid_out([table(0)], [Placement("table_wise", (0,))]).sections
    batch = section.ranks[0][0]
    assert (batch.cached_elements, batch.fetched_rows, batch.fetched_bytes) == (0, 0, 0)


def test_the_widest_part_and_the_longest_bag_are_those_of_all():
    tables = [table(0, dim=16), table(1, dim=64, pooling=Pooling((1, 9), (0.5, 0.5)))]
    (section,) = laid_out(tables, [Placement("table_wise", (0,))] * 2).sections
    batch = section.ranks[0][0]
    assert (batch.widest, batch.columns, batch.longest_bag) == (64, 80, 9)


def test_sections_are_in_the_order_of_the_kinds():
    tables = [table(number) for number in range(4)]
    placements = [
        Placement.make_data_parallel(WORLD),
        Placement("column_wise", (0, 1)),
        Placement.make_row_wise(WORLD),
        Placement("table_wise", (0,)),
    ]
    layout = laid_out(tables, placements)
    assert [section.kind for section in layout.sections] == ["table_wise", "row_wise", "column_wise", "data_parallel"]
    assert layout.has_kind(ShardingKind.ROW_WISE)
    assert not layout.has_kind(ShardingKind.TABLE_ROW_WISE)


def test_ranks_with_equal_shares_have_equal_keys_and_forms():
    tables = [table(number) for number in range(3)]
    layout = laid_out(tables, [Placement("table_wise", (rank,)) for rank in (0, 1, 3)])
    keys = [layout.make_program_key(rank) for rank in range(WORLD)]
    assert keys[0] == keys[1] == keys[3] != keys[2]
    assert layout.make_structure_key(0) == layout.make_structure_key(3) != layout.make_structure_key(2)


def test_ranks_that_differ_in_sizes_only_have_equal_forms():
    layout = laid_out([table(0), table(1, rows=77)], [Placement("table_wise", (rank,)) for rank in (0, 1)])
    assert layout.make_program_key(0) != layout.make_program_key(1)
    assert layout.make_structure_key(0) == layout.make_structure_key(1)


def test_tables_within_a_node_make_nodes_and_places_different():
    layout = laid_out([table(0)], [Placement("table_row_wise", (0, 1))])
    assert len({layout.make_program_key(rank) for rank in range(WORLD)}) == WORLD
    assert layout.nodes == 2


def test_ranks_must_fill_nodes():
    with pytest.raises(TraincastError, match=r"6 ranks do not fill nodes of 4 GPUs; give a multiple of 4"):
        laid_out([table(0)], [Placement("table_wise", (0,))], world=6, node=4)
    assert laid_out([table(0)], [Placement("table_wise", (0,))], world=3, node=4).nodes == 1


def test_a_plan_for_other_tables_is_refused():
    tables = [table(0)]
    plan = Plan(("other",), (Placement("table_wise", (0,)),), WORLD)
    with pytest.raises(TraincastError, match=r"t0|other"):
        assign_shards_to_ranks(tables, plan, batch_size=BATCH, gpus_per_node=NODE)


def test_larger_batches_want_more_lookups_and_no_more_rows():
    small, large = (
        laid_out([table(0)], [Placement("table_wise", (0,))], batch=batch).sections[0].ranks[0][0]
        for batch in (BATCH, 10 * BATCH)
    )
    assert large.lookups == 10 * small.lookups
    assert replace(large, lookups=0, load=()) == replace(small, lookups=0, load=())
