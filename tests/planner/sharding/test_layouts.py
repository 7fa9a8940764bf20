"""Layouts that stand for many plans."""

from __future__ import annotations

import pytest

from tests.planner.sharding.conftest import table
from traincast.models.data_parallel.data_parallel import BUCKET_BYTES
from traincast.models.embeddings.table import ITEM_BYTES
from traincast.models.placement import Placement, Plan, ShardingKind
from traincast.models.placement.options import find_option
from traincast.models.sharded_dlrm.layout import assign_shards_to_ranks
from traincast.planner.sharding.lookups import TableGroup
from traincast.planner.sharding.structure import (
    RANK,
    Heaviest,
    get_batch_form,
    list_held_batches,
    make_least_layout,
    make_typical_layout,
    merge_layouts,
    scale_layout,
)

TABLES = [table("a", 4000), table("b", 9000, dtype="fp16"), table("c", 600, 32)]
NAMES = tuple(one.name for one in TABLES)


def _layout(*placements):
    return assign_shards_to_ranks(TABLES, Plan(NAMES, placements, 4), batch_size=64, gpus_per_node=2)


def _groups(*placements):
    groups = {TableGroup.of(one, find_option(placed)) for one, placed in zip(TABLES, placements, strict=True)}
    return sorted(groups, key=lambda group: group.order)


WHOLE = (Placement("table_wise", (3,)), Placement("table_wise", (2,)), Placement("table_wise", (3,)))
MIXED = (Placement("table_row_wise", (2, 3)), Placement.make_data_parallel(4), Placement.make_row_wise(4))


def _section(layout, kind):
    return next(section for section in layout.sections if section.kind is kind)


def test_merged_layouts_have_the_batches_of_all():
    first = _layout(Placement.make_row_wise(4), Placement("table_wise", (0,)), Placement.make_row_wise(4))
    second = _layout(Placement("table_wise", (1,)), Placement.make_row_wise(4), Placement.make_row_wise(4))
    both = merge_layouts([first, second])
    assert [section.kind for section in both.sections] == [ShardingKind.TABLE_WISE, ShardingKind.ROW_WISE]
    whole = _section(both, ShardingKind.TABLE_WISE)
    assert [[get_batch_form(batch)[1] for batch in batches] for batches in whole.ranks] == [["fp16"], ["fp32"], [], []]
    assert [get_batch_form(batch)[1] for batch in _section(both, ShardingKind.ROW_WISE).ranks[0]] == ["fp32", "fp16"]


def test_a_merged_layout_keeps_the_first_batch_of_a_form():
    first, second = _layout(*WHOLE), _layout(Placement("table_wise", (0,)), *WHOLE[1:])
    assert merge_layouts([first, second]).sections[0].ranks[3] == first.sections[0].ranks[3]


def test_the_typical_rank_has_a_batch_of_every_group_and_is_the_only_sender():
    layout = make_typical_layout(_layout(*WHOLE), columns=160)
    (section,) = layout.sections
    assert [get_batch_form(batch)[1] for batch in section.ranks[RANK]] == ["fp16", "fp32"]
    assert section.ranks[1:] == ((), (), ())
    assert section.columns == (160, 0, 0, 0)


def test_tables_that_a_node_or_all_share_are_on_all_of_them():
    layout = make_typical_layout(_layout(*MIXED), columns=160)
    empty = {section.kind: [not batches for batches in section.ranks] for section in layout.sections}
    assert empty[ShardingKind.TABLE_ROW_WISE] == [False, False, True, True]
    assert empty[ShardingKind.DATA_PARALLEL] == empty[ShardingKind.ROW_WISE] == [False] * 4
    assert sum(section.columns[RANK] for section in layout.sections) == 160


def test_held_batches_are_numbered_by_group():
    groups = _groups(*MIXED)
    batches = list_held_batches(make_typical_layout(_layout(*MIXED), columns=160), groups)
    assert sorted(batches) == [0, 1, 2]
    assert [groups[number].dtype for number in sorted(batches)] == [batches[n].dtype for n in sorted(batches)]
    assert [groups[number].kernel for number in sorted(batches)] == [batches[n].kernel for n in sorted(batches)]


def test_plain_layouts_look_up_as_little_as_launches_every_kernel():
    for section in make_least_layout(_layout(*WHOLE)).sections:
        for batch in (batch for batches in section.ranks for batch in batches):
            assert (batch.rows, batch.lookups) == (1, 4)
            assert max(batch.load) <= 4


def test_several_types_of_copied_tables_fill_a_bucket_each():
    copies = (Placement.make_data_parallel(4),) * 3
    (section,) = make_least_layout(_layout(*copies)).sections
    sizes = {batch.dtype: batch.elements * ITEM_BYTES[batch.dtype] for batch in section.ranks[RANK]}
    assert sizes == {"fp32": BUCKET_BYTES[-1], "fp16": BUCKET_BYTES[-1]}


def test_one_type_of_copied_tables_keeps_its_size():
    copied = (Placement("table_wise", (0,)), Placement.make_data_parallel(4), Placement("table_wise", (0,)))
    batch = _section(make_least_layout(_layout(*copied)), ShardingKind.DATA_PARALLEL).ranks[RANK][0]
    assert batch.elements == 9000 * 64


@pytest.mark.parametrize("load", [0.0, 0.5, 2.0])
def test_scaled_layouts_have_so_much_of_the_heaviest(load):
    layout, groups = make_typical_layout(_layout(*WHOLE), columns=160), _groups(*WHOLE)
    heaviest = [Heaviest(10.0, 1e6, 5e6, 128.0)] * len(groups)
    (section,) = scale_layout(layout, load, groups, heaviest).sections
    for batch in section.ranks[RANK]:
        assert batch.tables == max(1, round(load * 10))
        assert batch.lookups == max(1, round(load * 1e6))
        assert batch.elements == max(1, round(load * 5e6))
        assert batch.columns == max(1, round(load * 128))
    for batches in section.ranks[1:]:  # as much arrives as is sent, but nobody else sends pooled rows
        assert [batch.columns for batch in batches] == [0, 0]
        assert [batch.lookups for batch in batches] == [batch.lookups for batch in section.ranks[RANK]]
