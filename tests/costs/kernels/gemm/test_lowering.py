from __future__ import annotations

import pytest

from tests.costs.kernels.signatures import MODERN, OLD, field, kernels, lowered, tensor, transposed
from traincast.costs.kernels.gemm import GEMM
from traincast.costs.kernels.registry import LoweringContext


def _linear_layer(context: LoweringContext):
    """addmm of a linear layer: bias, input, and the weight seen transposed."""
    return lowered(
        "aten::addmm",
        {"self": tensor(1024), "mat1": tensor(2048, 512), "mat2": transposed(512, 1024)},
        tensor(2048, 1024),
        context,
        beta=1,
        alpha=1,
    )


def test_bias_rides_in_the_epilogue_today():
    (call,) = _linear_layer(MODERN)
    assert call == GEMM.call("linear", batch=1, m=2048, n=1024, k=512, trans_a=0, trans_b=1, bias=1)


def test_bias_is_copied_first_in_1_8():
    copy, product = _linear_layer(OLD)
    assert (copy.family.name, copy.kind) == ("elementwise", "strided")
    assert field(copy, "bytes_read") == 1024 * 4  # the vector, not its broadcast
    assert field(copy, "bytes_written") == 2048 * 1024 * 4
    assert product == GEMM.call("mm", batch=1, m=2048, n=1024, k=512, trans_a=0, trans_b=1, bias=0)


@pytest.mark.parametrize("scalars", [{"beta": 2}, {"alpha": 0.5}])
def test_scaled_sums_do_not_fit_the_epilogue(scalars):
    inputs = {"self": tensor(64), "mat1": tensor(32, 16), "mat2": tensor(16, 64)}
    assert kernels(lowered("aten::addmm", inputs, tensor(32, 64), **scalars)) == ["elementwise:strided", "gemm:mm"]


def test_single_column_does_not_fit_the_epilogue():
    inputs = {"self": tensor(1), "mat1": tensor(32, 16), "mat2": tensor(16, 1)}
    assert kernels(lowered("aten::addmm", inputs, tensor(32, 1))) == ["elementwise:copy", "gemm:mm"]


def test_bmm_with_itself_transposed():
    (call,) = lowered("aten::bmm", {"self": tensor(8, 27, 128), "mat2": transposed(8, 128, 27)}, tensor(8, 27, 27))
    assert call == GEMM.call("bmm", batch=8, m=27, n=27, k=128, trans_a=0, trans_b=1, bias=0)


def test_operand_without_unit_stride_is_copied():
    strided = tensor(64, 32, stride=(128, 2))
    assert kernels(lowered("aten::mm", {"self": strided, "mat2": tensor(32, 16)}, tensor(64, 16))) == [
        "copy:layout",
        "gemm:mm",
    ]


def test_baddbmm_copies_unless_beta_is_zero():
    inputs = {"self": tensor(4, 8, 8), "batch1": tensor(4, 8, 16), "batch2": tensor(4, 16, 8)}
    assert kernels(lowered("aten::baddbmm", inputs, tensor(4, 8, 8))) == ["memcpy:d2d", "gemm:bmm"]
    assert kernels(lowered("aten::baddbmm", inputs, tensor(4, 8, 8), beta=0)) == ["gemm:bmm"]


@pytest.mark.parametrize(
    ("dtype", "tf32", "compute"),
    [("float32", False, "fp32"), ("float32", True, "tf32"), ("float16", True, "fp16"), ("bfloat16", False, "bf16")],
)
def test_compute_type(dtype, tf32, compute):
    inputs = {"self": tensor(8, 8, dtype=dtype), "mat2": tensor(8, 8, dtype=dtype)}
    (call,) = lowered("aten::mm", inputs, tensor(8, 8, dtype=dtype), LoweringContext(tf32=tf32))
    assert call.compute == compute


def test_linear_folds_leading_dimensions():
    inputs = {"input": tensor(4, 128, 64), "weight": tensor(256, 64), "bias": tensor(256)}
    (call,) = lowered("aten::linear", inputs, tensor(4, 128, 256))
    assert call == GEMM.call("linear", batch=1, m=512, n=256, k=64, trans_a=0, trans_b=1, bias=1)


def test_vectors():
    (mv,) = lowered("aten::mv", {"self": tensor(32, 16), "vec": tensor(16)}, tensor(32))
    assert (field(mv, "m"), field(mv, "n"), field(mv, "k")) == (32, 1, 16)
    assert kernels(lowered("aten::dot", {"self": tensor(64), "tensor": tensor(64)}, tensor())) == ["reduction:full"]


def test_fp8_operands_compute_in_fp8():
    inputs = {
        "self": tensor(2048, 512, dtype="float8_e4m3fn"), "mat2": transposed(512, 1024, dtype="float8_e4m3fn"),
        "scale_a": tensor(), "scale_b": tensor(),
    }  # fmt: skip
    result = tensor(2048, 1024, dtype="bfloat16")
    (call,) = lowered("aten::_scaled_mm", inputs, result)
    assert call == GEMM.call("mm", "fp8", batch=1, m=2048, n=1024, k=512, trans_a=0, trans_b=1, bias=0)
    (with_bias,) = lowered("aten::_scaled_mm", {**inputs, "bias": tensor(1024, dtype="bfloat16")}, result)
    assert (with_bias.kind, field(with_bias, "bias")) == ("linear", 1)


BF16 = {"dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("left", "right", "result", "sizes"),
    [
        # forward: rows are divided among eight experts; a tile more for the last one
        (tensor(4100, 512, **BF16), tensor(8, 512, 1024, **BF16), tensor(4100, 1024, **BF16), (8, 513, 1024, 512)),
        # gradient of weights: the depth is
        (tensor(512, 4096, **BF16), tensor(4096, 1024, **BF16), tensor(8, 512, 1024, **BF16), (8, 512, 1024, 512)),
        # columns are
        (tensor(8, 512, 256, **BF16), tensor(256, 4096, **BF16), tensor(512, 4096, **BF16), (8, 512, 512, 256)),
        # nothing is: a stack of equal GEMMs
        (tensor(8, 64, 32, **BF16), tensor(8, 32, 16, **BF16), tensor(8, 64, 16, **BF16), (8, 64, 16, 32)),
    ],
)
def test_grouped_products_divide_what_groups_share(left, right, result, sizes):
    (call,) = lowered("aten::_grouped_mm", {"self": left, "mat2": right}, result)
    assert (call.kind, call.compute) == ("grouped", "bf16")
    assert tuple(field(call, name) for name in ("batch", "m", "n", "k")) == sizes


def test_a_complex_product_is_four_real_ones():
    inputs = {"self": tensor(64, 32, dtype="complex64"), "mat2": tensor(32, 16, dtype="complex64")}
    (call,) = lowered("aten::mm", inputs, tensor(64, 16, dtype="complex64"))
    assert [field(call, name) for name in "mnk"] == [128, 32, 32]


@pytest.mark.parametrize(
    ("version", "words", "compute"),
    [((1, 4), 267_735, "fp32"), ((1, 4), 267_736, "fp16"), ((1, 7), 267_735, "fp16")],
)
def test_tensor_cores_want_sides_of_eight_before_cuda_11(version, words, compute):
    inputs = {"self": tensor(64, 512, dtype="float16"), "mat2": tensor(512, words, dtype="float16")}
    context = LoweringContext(framework_version=version)
    (call,) = lowered("aten::mm", inputs, tensor(64, words, dtype="float16"), context)
    assert call.compute == compute
