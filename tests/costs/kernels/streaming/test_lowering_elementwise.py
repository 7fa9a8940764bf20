from __future__ import annotations

import pytest

from tests.costs.kernels.signatures import OLD, field, kernels, lowered, tensor
from traincast.costs.kernels.streaming import ELEMENTWISE

_N = 64 * 32


def test_broadcast_operand_counts_its_own_bytes():
    (call,) = lowered("aten::add", {"self": tensor(64, 32), "other": tensor(32)}, tensor(64, 32))
    assert call == ELEMENTWISE.call("strided", elements=_N, bytes_read=4 * (_N + 32), bytes_written=4 * _N, tensors=3)


def test_expanded_operand_counts_once():
    expanded = tensor(64, 32, stride=(0, 1))
    (call,) = lowered("aten::mul", {"self": tensor(64, 32), "other": expanded}, tensor(64, 32))
    assert field(call, "bytes_read") == 4 * (_N + 32)


@pytest.mark.parametrize(
    ("other", "kind"),
    [
        (tensor(64, 32), "add"),
        (tensor(64, 32, stride=(1, 64)), "strided"),
        (tensor(64, 32, stride=(64, 1)), "strided"),
        (tensor(32), "strided"),
        (tensor(), "add"),
    ],
)
def test_operands_that_lie_unlike_each_other_are_walked_element_by_element(other, kind):
    (call,) = lowered("aten::add", {"self": tensor(64, 32), "other": other}, tensor(64, 32))
    assert call.kind == kind


def test_operands_transposed_alike_are_streamed():
    turned = tensor(64, 32, stride=(1, 64))
    (call,) = lowered("aten::add", {"self": turned, "other": turned}, turned)
    assert call.kind == "add"


@pytest.mark.parametrize(
    ("rows", "mask", "times"),
    [
        (2048, (2, 1, 2048, 2048), 16),  # 16 MB come round again after 48 MB: from memory every time
        (512, (2, 1, 512, 2048), 16),
        (256, (2, 1, 256, 2048), 1),  # 2 MB stay in the L2
        (2048, (2, 1, 1, 2048), 1),
        (2048, (2048,), 1),
    ],
)
def test_a_large_operand_that_is_broadcast_is_read_again(rows, mask, times):
    scores, other = tensor(2, 16, rows, 2048), tensor(*mask)
    (call,) = lowered("aten::add", {"self": scores, "other": other}, scores)
    assert field(call, "bytes_read") == scores.nbytes + times * other.nbytes


def test_offsets_are_cheap_beside_special_functions():
    (call,) = lowered("aten::tanh", {"self": tensor(64, 32, stride=(1, 64))}, tensor(64, 32))
    assert call.kind == "tanh"


def test_in_place_reads_and_writes():
    (call,) = lowered("aten::add_", {"self": tensor(64, 32), "other": tensor(64, 32)}, tensor(64, 32))
    assert (field(call, "bytes_read"), field(call, "bytes_written")) == (8 * _N, 4 * _N)


@pytest.mark.parametrize("name", ["zero_", "fill_", "zeros_like", "ones_like", "new_zeros"])
def test_fills_read_nothing(name):
    (call,) = lowered(f"aten::{name}", {"self": tensor(64, 32)}, tensor(64, 32))
    assert (call.kind, field(call, "bytes_read"), field(call, "bytes_written")) == ("fill", 0, 4 * _N)


def test_host_scalar_tensor_is_passed_by_value():
    (call,) = lowered("aten::mul", {"self": tensor(64, 32), "other": tensor(device="cpu")}, tensor(64, 32))
    assert field(call, "bytes_read") == 4 * _N


def test_host_op_launches_nothing():
    assert lowered("aten::add_", {"self": tensor(device="cpu")}, tensor(device="cpu")) == ()


def test_comparison_computes_in_the_type_compared():
    (call,) = lowered("aten::eq", {"self": tensor(64, 32, dtype="int64")}, tensor(64, 32, dtype="bool"))
    assert (call.compute, field(call, "bytes_written")) == ("int64", _N)


def test_dropout_writes_a_mask():
    (call,) = lowered("aten::native_dropout", {"input": tensor(64, 32)}, [tensor(64, 32), tensor(64, 32, dtype="bool")])
    assert (call.kind, field(call, "bytes_written")) == ("dropout", 5 * _N)


def test_sparse_gradient_is_scattered():
    parts = [tensor(1, 100, dtype="int64"), tensor(100, 16)]
    (call,) = lowered(
        "aten::add_", {"self": tensor(1000, 16), "other": parts}, tensor(1000, 16), other_layout="sparse_coo"
    )
    assert (call.family.name, call.kind) == ("index", "scatter")
    assert (field(call, "elements"), field(call, "row_elements")) == (1600, 16)


_LOSS = {"self": tensor(2048, 1), "target": tensor(2048, 1)}


def test_losses():
    assert kernels(lowered("aten::mse_loss", _LOSS, tensor(), reduction=1)) == ["elementwise:loss", "reduction:full"]
    assert kernels(lowered("aten::mse_loss", _LOSS, tensor(2048, 1), reduction=0)) == ["elementwise:loss"]
    assert kernels(lowered("aten::binary_cross_entropy", _LOSS, tensor(), reduction=1)) == [
        "elementwise:loss",
        "reduction:full",
    ]


def test_1_8_copies_the_reduced_binary_cross_entropy():
    assert kernels(lowered("aten::binary_cross_entropy", _LOSS, tensor(), OLD, reduction=1))[-1] == "memcpy:d2d"


def test_loss_gradients():
    inputs = {"grad_output": tensor(), "self": tensor(2048, 1), "target": tensor(2048, 1)}
    assert kernels(lowered("aten::mse_loss_backward", inputs, tensor(2048, 1), reduction=1)) == [
        "elementwise:fill",
        "elementwise:loss",
    ]
    assert kernels(lowered("aten::binary_cross_entropy_backward", inputs, tensor(2048, 1), reduction=1)) == [
        "elementwise:loss",
        "elementwise:div",
    ]
    picked = {"grad_output": tensor(), "self": tensor(64, 1000), "target": tensor(64, dtype="int64")}
    zeros, _ = lowered("aten::nll_loss_backward", picked, tensor(64, 1000))
    assert field(zeros, "bytes_written") == 4 * 64 * 1000
