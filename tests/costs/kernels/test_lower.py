from __future__ import annotations

import pytest

from tests.costs.kernels.signatures import MODERN, field, kernels, lowered, tensor
from traincast.costs.kernels.lower import OpCoverage, list_op_coverage, list_registered_ops, lower
from traincast.costs.kernels.registry import LOWERINGS, Control, ControlKind
from traincast.costs.kernels.streaming.launches import STREAM_SYNCHRONIZE
from traincast.ir.ops import Signature
from traincast.utils.errors import TraincastError


@pytest.mark.parametrize(
    "name", ["view", "t", "transpose", "permute", "expand", "slice", "select", "unsqueeze", "detach", "empty_like"]
)
def test_views_and_allocations_are_free(name):
    assert lowered(f"aten::{name}", {"self": tensor(64, 64)}, tensor(64, 64)) == ()


def test_unknown_op_is_estimated_from_its_bytes():
    (call,) = lowered("mylib::fancy", {"x": tensor(1024), "y": tensor(1024)}, tensor(1024))
    assert call.estimated
    assert (field(call, "bytes_read"), field(call, "bytes_written")) == (8192, 4096)


def test_unknown_op_on_empty_tensors_still_launches():
    (call,) = lowered("mylib::fancy", {"x": tensor(0)}, tensor(0))
    assert call.estimated
    assert field(call, "elements") == 1


def test_unknown_op_of_the_host_costs_nothing():
    assert lowered("mylib::log", {}) == ()
    assert lowered("mylib::log", {"x": tensor(5, device="cpu")}) == ()


def test_no_known_op_is_marked_estimated():
    (call,) = lowered("aten::relu", {"self": tensor(8)}, tensor(8))
    assert not call.estimated


def test_item_copies_and_waits():
    copy, wait = lowered("aten::_local_scalar_dense", {"self": tensor()})
    assert (copy.kind, field(copy, "bytes"), wait) == ("d2h_pageable", 4, STREAM_SYNCHRONIZE)


def test_control_ops():
    assert lower(Signature("cuda::device_synchronize", (), ()), MODERN) == (Control(ControlKind.DEVICE_SYNCHRONIZE),)
    recorded = Signature("cuda::event_record", (), (), (("event", 3), ("stream", 1)))
    assert lower(recorded, MODERN) == (Control(ControlKind.EVENT_RECORD, event=3, stream=1),)


def test_names_are_dispatcher_names():
    assert all("::" in name and name == name.strip() for name in list_registered_ops())


class _Program:
    """As much of a program as coverage reads."""

    def __init__(self, signatures, op_signature):
        import numpy as np

        self.signatures = signatures
        self.columns = type("Columns", (), {"op_signature": np.array(op_signature, dtype=np.int32)})


def test_coverage_counts_ops_and_launches():
    relu = Signature("aten::relu", (tensor(8),), (tensor(8),))
    fancy = Signature("mylib::fancy", (tensor(8),), (tensor(8),))
    view = Signature("aten::view", (tensor(8),), (tensor(8),))
    rows = list_op_coverage(_Program((relu, fancy, view), [0, 0, 1, 2]), MODERN)
    assert rows == [
        OpCoverage("aten::relu", 2, True, 2),
        OpCoverage("aten::view", 1, True, 0),
        OpCoverage("mylib::fancy", 1, False, 1),
    ]


@pytest.mark.parametrize(
    ("name", "inputs", "output"),
    [
        ("aten::mm", {"self": tensor(0, 5), "mat2": tensor(5, 6)}, tensor(0, 6)),
        ("aten::native_layer_norm", {"input": tensor(0, 16), "weight": tensor(16), "bias": tensor(16)}, tensor(0, 16)),
        ("aten::native_dropout", {"input": tensor(0, 16)}, tensor(0, 16)),
    ],
)
def test_an_op_whose_results_are_empty_launches_nothing(name, inputs, output):
    assert lowered(name, inputs, output, normalized_shape=(16,)) == ()


def test_a_sum_over_nothing_still_writes_its_result():
    zeros = {"grad_out": tensor(0, 16), "input": tensor(0, 16), "mean": tensor(0, 1), "rstd": tensor(0, 1),
             "weight": tensor(16), "bias": tensor(16)}  # fmt: skip
    results = [tensor(0, 16), tensor(16), tensor(16)]
    assert kernels(lowered("aten::native_layer_norm_backward", zeros, results, normalized_shape=(16,)))


def test_ops_of_another_distribution_are_lowered_by_what_it_registers(monkeypatch):
    asked = []

    def load_plugin(group, name):
        asked.append((group, name))
        monkeypatch.setitem(LOWERINGS, "elsewhere::wait", lambda signature, context: (STREAM_SYNCHRONIZE,))

    monkeypatch.setattr("traincast.costs.kernels.lower.load_plugin", load_plugin)

    assert lowered("elsewhere::wait", {"x": tensor(8)}, tensor(8)) == (STREAM_SYNCHRONIZE,)
    assert asked == [("traincast.lowerings", "elsewhere")]
    assert lowered("aten::nobody_knows", {"x": tensor(8)}, tensor(8))[0].estimated
    assert len(asked) == 1  # PyTorch's own are all here


def test_a_product_with_a_compressed_sparse_matrix_is_refused_with_the_remedy():
    places = (tensor(101, dtype="int64"), tensor(400, dtype="int64"), tensor(400), tensor(100, 8))
    with pytest.raises(TraincastError, match=r"compressed sparse \(CSR\) matrix, .*`costs`"):
        lower(Signature(name="aten::mm", inputs=places, outputs=(tensor(100, 8),)), MODERN)
