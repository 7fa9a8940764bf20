"""The table of collectives."""

from __future__ import annotations

import pytest

from traincast.ir.collectives import COLLECTIVE_OPS, COLLECTIVES, LIBRARY_OPS, UNEVEN_FORM, parse_collective_name


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("allreduce", "all_reduce"),
        ("_allgather_base_", "all_gather"),
        ("all_gather_into_tensor", "all_gather"),
        ("reduce_scatter_tensor", "reduce_scatter"),
        ("reduce", "reduce"),
        ("all_to_allv", "all_to_all"),
        ("Broadcast", "broadcast"),
        ("gather", "gather"),
        ("barrier", "barrier"),
    ],
)
def test_profilers_name_collectives_in_many_ways(name, kind):
    assert parse_collective_name(name).name == kind


@pytest.mark.parametrize("name", ["send", "recv", "", "wait"])
def test_other_names_are_no_collective(name):
    assert parse_collective_name(name) is None


def test_an_op_belongs_to_one_collective():
    assert COLLECTIVE_OPS["c10d::alltoall_base_"].name == "all_to_all"
    assert COLLECTIVE_OPS["_c10d_functional::all_to_all_single"].name == "all_to_all"
    assert len(COLLECTIVE_OPS) == sum(len(kind.ops) + len(kind.functional_ops) for kind in COLLECTIVES.values())


def test_ops_of_other_libraries_belong_to_collectives_that_pytorch_does_not_have():
    assert {op: kind.name for op, kind in LIBRARY_OPS.items()} == {
        "hugectr::one_shot_all_reduce": "one_shot_all_reduce",
        "hugectr::node_first_all_to_all": "node_first_all_to_all",
    }
    assert all(not kind.ops and not kind.traced for kind in LIBRARY_OPS.values())


def test_what_a_record_refers_to_exists():
    for kind in COLLECTIVES.values():
        assert {kind.like, kind.made_of, kind.uneven_form_of} - {""} <= set(COLLECTIVES)


def test_ranks_of_a_trace_are_matched_by_what_is_one_kernel_on_each():
    assert [kind.name for kind in COLLECTIVES.values() if kind.matched] == [
        "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "barrier",
    ]  # fmt: skip
    assert UNEVEN_FORM == {"all_to_all": "all_to_all_v"}
