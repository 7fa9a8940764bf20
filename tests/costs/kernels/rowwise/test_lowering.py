from __future__ import annotations

from dataclasses import replace

import pytest

from tests.costs.kernels.signatures import OLD, field, kernels, lowered, tensor
from traincast.costs.kernels.attention import ATTENTION
from traincast.costs.kernels.registry import LoweringContext, choose_reduction_kind
from traincast.costs.kernels.rowwise import NORM, SOFTMAX

_HIDDEN = tensor(8, 512, 1024)


def test_softmax_over_the_last_dimension():
    (call,) = lowered("aten::_softmax", {"self": tensor(8, 16, 512, 512)}, tensor(8, 16, 512, 512), dim=-1)
    assert call == SOFTMAX.call("forward", rows=8 * 16 * 512, cols=512)


def test_log_softmax_gradient():
    inputs = {"grad_output": tensor(64, 1000), "output": tensor(64, 1000)}
    (call,) = lowered("aten::_log_softmax_backward_data", inputs, tensor(64, 1000), dim=1)
    assert call == SOFTMAX.call("log_backward", rows=64, cols=1000)


def test_layer_norm():
    inputs = {"input": _HIDDEN, "weight": tensor(1024), "bias": tensor(1024)}
    outputs = [_HIDDEN, tensor(8, 512, 1), tensor(8, 512, 1)]
    (call,) = lowered("aten::native_layer_norm", inputs, outputs, normalized_shape=(1024,))
    assert call == NORM.call("layer_forward", rows=8 * 512, cols=1024)
    old = lowered("aten::native_layer_norm", inputs, outputs, OLD, normalized_shape=(1024,))
    assert kernels(old) == ["reduction:inner", "elementwise:mul"]


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        ((True, True, True), ["norm:layer_backward", "norm:layer_backward_weights"]),
        ((True, False, False), ["norm:layer_backward"]),
        ((False, True, True), ["norm:layer_backward_weights"]),
    ],
)
def test_layer_norm_gradients_follow_the_mask(mask, expected):
    inputs = {"grad_out": _HIDDEN, "input": _HIDDEN}
    calls = lowered("aten::native_layer_norm_backward", inputs, [_HIDDEN], normalized_shape=(1024,), output_mask=mask)
    assert kernels(calls) == expected


def test_batch_norm_rows_are_channels():
    inputs = {"input": tensor(32, 64, 56, 56)}
    (call,) = lowered("aten::cudnn_batch_norm", inputs, [tensor(32, 64, 56, 56)], training=True)
    assert call == NORM.call("batch_forward", rows=64, cols=32 * 56 * 56)
    (call,) = lowered("aten::native_batch_norm", inputs, [tensor(32, 64, 56, 56)], training=False)
    assert call.kind == "batch_inference"


def test_bfloat16_batch_norm_is_pytorchs_own_unless_rows_are_of_channels():
    spec = tensor(32, 64, 56, 56, dtype="bfloat16")
    calls = lowered("aten::native_batch_norm", {"input": spec}, [spec], training=True)
    assert kernels(calls) == ["norm:batch_statistics", "elementwise:mul", "norm:batch_inference"]
    (call,) = lowered("aten::native_batch_norm_backward", {"grad": spec, "input": spec}, [spec])
    assert call.kind == "batch_backward_own"
    nhwc = replace(spec, stride=(64 * 56 * 56, 1, 64 * 56, 64))
    (call,) = lowered("aten::native_batch_norm", {"input": nhwc}, [nhwc], training=True)
    assert call.kind == "batch_forward_last"
    (call,) = lowered("aten::cudnn_batch_norm_backward", {"input": nhwc, "grad_output": nhwc}, [nhwc])
    assert call.kind == "batch_backward_last"


def test_layer_norm_s_weights_had_a_block_for_some_columns_in_old_releases():
    inputs = {"grad_out": _HIDDEN, "input": _HIDDEN}
    for version, expected in (((1, 10), "norm:layer_backward_columns"), ((1, 11), "norm:layer_backward_weights")):
        calls = lowered(
            "aten::native_layer_norm_backward", inputs, [_HIDDEN], LoweringContext(framework_version=version),
            normalized_shape=(1024,), output_mask=(False, True, True),
        )  # fmt: skip
        assert kernels(calls) == [expected]


@pytest.mark.parametrize(
    ("dims", "expected"), [((), "full"), ((0, 1), "full"), ((1,), "inner"), ((-1,), "inner"), ((0,), "outer")]
)
def test_reduction_kind_follows_memory(dims, expected):
    assert choose_reduction_kind(tensor(2048, 1024), dims) == expected


def test_reduction_of_a_transposed_tensor():
    assert choose_reduction_kind(tensor(2048, 1024, stride=(1, 2048)), (0,)) == "inner"


def test_sum_reads_all_and_writes_little():
    (call,) = lowered("aten::sum", {"self": tensor(2048, 1024)}, tensor(1, 1024), dim=(0,), keepdim=True)
    assert (call.kind, field(call, "outputs"), field(call, "bytes_written")) == ("outer", 1024, 4096)


def test_maximum_of_two_tensors_is_elementwise():
    (call,) = lowered("aten::max", {"self": tensor(64, 8), "other": tensor(64, 8)}, tensor(64, 8))
    assert (call.family.name, field(call, "bytes_read")) == ("elementwise", 2 * 4 * 64 * 8)


_QUERY = tensor(8, 16, 512, 64, dtype="bfloat16")
_QKV = {"query": _QUERY, "key": _QUERY, "value": _QUERY}


def test_flash_attention():
    (call,) = lowered("aten::_scaled_dot_product_flash_attention", _QKV, [_QUERY], is_causal=True)
    assert call == ATTENTION.call(
        "forward", "bf16", batch=8, q_heads=16, kv_heads=16, q_len=512, kv_len=512, head_dim=64, causal=1
    )


def test_flash_attention_gradient_has_a_kernel_before_and_after():
    calls = lowered("aten::_scaled_dot_product_flash_attention_backward", {"grad_out": _QUERY, **_QKV}, [_QUERY] * 3)
    assert kernels(calls) == ["reduction:inner", "attention:backward", "elementwise:copy"]


def test_efficient_attention_gradient_depends_on_precision():
    name = "aten::_scaled_dot_product_efficient_attention_backward"
    exact = tensor(8, 16, 512, 64)
    single = {"grad_out_": exact, "query": exact, "key": exact, "value": exact}
    assert kernels(lowered(name, {"grad_out_": _QUERY, **_QKV}, [_QUERY] * 3)) == ["attention:efficient_backward"]
    assert kernels(lowered(name, single, [exact] * 3)) == [
        "elementwise:mul",
        "reduction:inner",
        "attention:efficient_backward",
    ]


def test_max_pool_gradient_starts_from_zeros():
    inputs = {"grad_output": tensor(32, 64, 56, 56), "self": tensor(32, 64, 112, 112),
              "indices": tensor(32, 64, 56, 56, dtype="int64")}  # fmt: skip
    zeros, pool = lowered(
        "aten::max_pool2d_with_indices_backward", inputs, tensor(32, 64, 112, 112), kernel_size=(3, 3)
    )
    assert zeros.kind == "fill"
    assert (field(pool, "window"), field(pool, "bytes_read")) == (9, 32 * 64 * 56 * 56 * 12)
