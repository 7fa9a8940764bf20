from __future__ import annotations

import json

import pytest

from traincast.models.placement import ComputeKernel, Placement, ShardingKind
from traincast.utils.errors import TraincastError

KINDS = ("table_wise", "row_wise", "column_wise", "table_row_wise", "data_parallel")
KERNELS = ("fused", "fused_uvm", "fused_uvm_caching", "dense")


def test_names_in_files_are_torchrecs():
    assert tuple(kind.value for kind in ShardingKind) == KINDS
    assert tuple(kernel.value for kernel in ComputeKernel) == KERNELS
    assert json.dumps([ShardingKind.ROW_WISE, ComputeKernel.DENSE]) == '["row_wise", "dense"]'
    assert f"{ShardingKind.ROW_WISE}" == "row_wise"


def test_kinds_are_in_the_order_in_which_a_step_goes_through_them():
    assert [kind.position for kind in ShardingKind] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("kind", "copied", "by_rows", "everywhere"),
    [
        ("table_wise", False, False, False),
        ("row_wise", False, True, True),
        ("column_wise", False, False, False),
        ("table_row_wise", False, True, False),
        ("data_parallel", True, False, True),
    ],
)
def test_a_kind_says_who_has_what(kind, copied, by_rows, everywhere):
    kind = ShardingKind(kind)
    assert (kind.copied, kind.by_rows, kind.everywhere) == (copied, by_rows, everywhere)


@pytest.mark.parametrize(
    ("kind", "samples", "sharers", "blocks"),
    [
        ("table_wise", 1600, 1, 1),
        ("row_wise", 1600, 16, 16),
        ("column_wise", 1600, 1, 1),
        ("table_row_wise", 1600, 8, 8),
        ("data_parallel", 100, 16, 1),
    ],
)
def test_a_kind_says_how_a_table_is_cut_on_two_nodes(kind, samples, sharers, blocks):
    kind = ShardingKind(kind)
    assert kind.count_samples(100, 16) == samples
    assert kind.count_sharers(16, 8) == sharers
    assert kind.count_row_blocks(16, 8) == blocks


def test_a_node_that_is_not_full_shares_between_fewer_ranks():
    assert ShardingKind.TABLE_ROW_WISE.count_sharers(4, 8) == 4


@pytest.mark.parametrize(
    ("kernel", "in_host_memory", "cached", "access"),
    [
        ("fused", False, False, 0),
        ("fused_uvm", True, False, 1),
        ("fused_uvm_caching", True, True, 2),
        ("dense", False, False, 0),
    ],
)
def test_a_kernel_says_where_weights_are(kernel, in_host_memory, cached, access):
    kernel = ComputeKernel(kernel)
    assert (kernel.in_host_memory, kernel.cached, kernel.host_access) == (in_host_memory, cached, access)


def test_a_placement_takes_names_and_keeps_kinds():
    by_name = Placement("table_wise", (2,), "fused_uvm_caching", 0.5)
    assert by_name.kind is ShardingKind.TABLE_WISE
    assert by_name.kernel is ComputeKernel.FUSED_UVM_CACHING
    assert by_name == Placement(ShardingKind.TABLE_WISE, (2,), ComputeKernel.FUSED_UVM_CACHING, 0.5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("sideways", (0,)), "unknown kind of sharding 'sideways'. Choose table_wise, row_wise"),
        (("tabel_wise", (0,)), "unknown kind of sharding 'tabel_wise'. Did you mean table_wise"),
        (("table_wise", (0,), "magic"), "unknown kernel 'magic'. Choose fused, fused_uvm, fused_uvm_caching, dense."),
    ],
)
def test_a_name_nobody_knows_is_refused(arguments, message):
    with pytest.raises(TraincastError, match=message):
        Placement(*arguments)
