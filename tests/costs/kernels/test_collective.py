"""Collectives: one kernel for a group of ranks, whatever PyTorch calls the op."""

from __future__ import annotations

import pytest

from tests.costs.kernels.signatures import tensor
from traincast.costs.kernels.collective import COLLECTIVE
from traincast.costs.kernels.lower import list_registered_ops, lower
from traincast.costs.kernels.registry import LoweringContext
from traincast.costs.kernels.streaming import MEMCPY
from traincast.ir.collectives import COLLECTIVE_OPS
from traincast.ir.ops import Signature
from traincast.utils.errors import TraincastError


def signature(name="c10d::allreduce_", kind="all_reduce", group=(0, 1, 2, 3), nbytes=4096, dtype="float32", **more):
    inputs = () if kind == "barrier" else (tensor(nbytes // 4, dtype=dtype),)
    scalars = {"collective": kind, "group": group, "communicator": 0, "bytes": nbytes, **more, "async_op": True}
    return Signature(name, inputs, inputs, tuple(scalars.items()))


def test_a_collective_is_one_kernel_of_its_group():
    (call,) = lower(signature(), LoweringContext())

    assert call == COLLECTIVE.call("all_reduce", "fp32", bytes=4096, ranks=4, nodes=1)


def test_every_name_that_capture_gives_is_known():
    capture = pytest.importorskip("traincast.capturing.collectives")

    assert {record.name for record in COLLECTIVE_OPS.values()} == set(capture._READERS)
    assert list_registered_ops() >= set(COLLECTIVE_OPS)


def test_the_nodes_a_group_spans_depend_on_the_machine():
    group = (0, 7, 8, 9)

    (one,) = lower(signature(group=group), LoweringContext(gpus_per_node=16))
    (two,) = lower(signature(group=group), LoweringContext(gpus_per_node=8))

    assert [call.values[2] for call in (one, two)] == [1, 2]


def test_elements_are_those_of_the_input():
    (call,) = lower(signature(dtype="bfloat16"), LoweringContext())

    assert call.compute == "bf16"


def test_a_barrier_has_no_tensor():
    (call,) = lower(signature("c10d::barrier", "barrier", nbytes=4), LoweringContext())

    assert call == COLLECTIVE.call("barrier", "fp32", bytes=4, ranks=4, nodes=1)


def test_a_message_has_two_ranks_whatever_its_group():
    (call,) = lower(signature("c10d::send", "send_recv", source=1, target=9), LoweringContext(gpus_per_node=8))

    assert call == COLLECTIVE.call("send_recv", "fp32", bytes=4096, ranks=2, nodes=2)


@pytest.mark.parametrize("kind", ["all_reduce", "broadcast", "reduce", "barrier"])
def test_alone_in_its_group_a_rank_has_nothing_to_do(kind):
    assert lower(signature(kind=kind, group=(3,)), LoweringContext()) == ()


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_to_all"])
def test_alone_in_its_group_a_rank_copies(kind):
    assert lower(signature(kind=kind, group=(3,)), LoweringContext()) == (MEMCPY.call("d2d", "int8", bytes=4096),)


@pytest.mark.parametrize(
    ("scalars", "says"),
    [
        ((("collective", "all_reduce"),), "does not say what it communicates"),
        ((("collective", "gossip"), ("group", (0, 1)), ("bytes", 4)), "unknown collective 'gossip'"),
        ((("collective", "all_reduce"), ("group", ("a", "b")), ("bytes", 4)), "does not say what it communicates"),
    ],
)
def test_an_op_that_does_not_say_what_it_is_is_refused(scalars, says):
    with pytest.raises(TraincastError, match=says):
        lower(Signature("c10d::allreduce_", (tensor(8),), (), scalars), LoweringContext())
