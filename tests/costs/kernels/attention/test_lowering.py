"""Which kernel runs attention on which device, and what it launches."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.costs.kernels.signatures import MODERN, field, kernels, lowered, tensor
from traincast.costs.kernels.attention.lowering import choose_backend
from traincast.costs.kernels.contract import Calls
from traincast.costs.kernels.cost import price_calls
from traincast.hardware import load_device

OP = "aten::_scaled_dot_product_fused_attention_overrideable"
V100, T4, A100, RTX, H100, AMD = 7.0, 7.5, 8.0, 8.6, 9.0, 0.0


def chosen(capability, *, dtype="float16", width=64, kv_heads=16, masked=False, causal=False, kv_len=512):
    query, key = tensor(8, 16, 512, width, dtype=dtype), tensor(8, kv_heads, kv_len, width, dtype=dtype)
    context = replace(MODERN, capability=capability)
    return choose_backend(query, key, masked=masked, causal=causal, heads=1, context=context)


@pytest.mark.parametrize(
    ("capability", "options", "expected"),
    [
        (A100, {}, "flash"),
        (H100, {}, "flash"),
        (AMD, {}, "flash"),
        (V100, {}, "efficient"),
        (T4, {}, "efficient"),
        (A100, {"dtype": "bfloat16"}, "flash"),
        (V100, {"dtype": "bfloat16"}, "math"),
        (A100, {"dtype": "float32"}, "efficient"),
        (V100, {"dtype": "float32"}, "efficient"),
        (A100, {"masked": True}, "efficient"),
        (A100, {"width": 256}, "flash"),
        (A100, {"width": 264}, "efficient"),
        (A100, {"width": 200}, "flash"),
        (RTX, {"width": 200}, "efficient"),
        (RTX, {"width": 192}, "flash"),
        (A100, {"width": 20}, "flash"),
        (V100, {"width": 20}, "math"),
        (A100, {"width": 6, "dtype": "float32"}, "math"),
        (V100, {"width": 6, "dtype": "float32"}, "efficient"),
        (A100, {"kv_heads": 4}, "flash"),
        (V100, {"kv_heads": 4}, "math"),
        (A100, {"causal": True, "kv_len": 256}, "efficient"),
        (A100, {"dtype": "float64"}, "math"),
    ],
)
def test_the_device_chooses(capability, options, expected):
    assert chosen(capability, **options) == expected


def run(name, capability, *, dtype="float16", kv_heads=16, width=64, mask=False, **scalars):
    shape = {"dtype": dtype}
    query, key = tensor(8, 16, 512, width, **shape), tensor(8, kv_heads, 512, width, **shape)
    inputs = {"query": query, "key": key, "value": key}
    if mask:
        inputs["attn_bias"] = tensor(8, 16, 512, 512, **shape)
    backward = name.endswith("_backward")
    if backward:
        inputs = {"grad_out": query, **inputs}
    return lowered(name, inputs, [query] * (3 if backward else 1), replace(MODERN, capability=capability), **scalars)


def test_what_a_capture_for_ampere_recorded_runs_on_volta_as_well():
    """Files captured before lowering chose name flash attention, which Volta lacks."""
    name = "aten::_scaled_dot_product_flash_attention"
    assert kernels(run(name, A100)) == ["attention:forward"]
    assert kernels(run(name, V100)) == ["attention:efficient_forward"]
    assert kernels(run(f"{name}_backward", V100)) == ["attention:efficient_backward"]


def test_heads_are_padded_for_flash():
    items = run(OP, A100, width=20)
    assert kernels(items) == ["copy:layout"] * 3 + ["attention:forward"]
    assert field(items[-1], "head_dim") == 24


def test_a_kernel_asked_for_is_used_where_the_device_has_it():
    assert kernels(run("aten::_scaled_dot_product_efficient_attention", A100)) == ["attention:efficient_forward"]


def test_portable_attention_is_widened_and_repeats_key_heads():
    items = run(OP, V100, kv_heads=4, dropout_p=0.1)
    assert kernels(items) == [
        *["elementwise:copy"] * 3, *["copy:layout"] * 2, *["elementwise:mul"] * 2, "gemm:bmm", "softmax:forward",
        "elementwise:dropout", "gemm:bmm",
    ]  # fmt: skip
    products = [item for item in items if item.family.name == "gemm"]
    assert {item.compute for item in products} == {"fp32"}
    assert [[field(item, name) for name in ("batch", "m", "n", "k")] for item in products] == [
        [128, 512, 512, 64], [128, 512, 64, 512],
    ]  # fmt: skip


def test_portable_backward_has_four_products_and_no_mask_to_add():
    items = run(f"{OP}_backward", V100, dtype="bfloat16", mask=True)
    assert kernels(items).count("gemm:bmm") == 4
    assert "elementwise:add" not in kernels(items)
    assert "elementwise:add" in kernels(run(OP, V100, dtype="bfloat16", mask=True))


@pytest.mark.parametrize("device", ["v100", "a100-40gb"])
def test_the_memory_efficient_kernel_is_slower_than_flash_and_faster_than_one_by_one(device):
    seconds = {}
    for dtype, kind in (("float16", "efficient_forward"), ("float16", "forward"), ("float32", "efficient_forward")):
        (call,) = run("aten::_scaled_dot_product_efficient_attention", A100, dtype=dtype)
        call = replace(call, kind=kind)
        estimate, _ = price_calls(Calls.of(call.family, [call]), load_device(device))
        seconds[dtype, kind] = float(estimate.seconds[0])
    assert seconds["float16", "forward"] < seconds["float16", "efficient_forward"] < seconds[
        "float32", "efficient_forward"
    ]  # fmt: skip


def test_blocks_of_the_memory_efficient_kernel_take_whole_tiles():
    def seconds(queries, keys, width, device="a100-40gb"):
        query, key = (tensor(64, 8, n, width) for n in (queries, keys))
        inputs = {"query": query, "key": key, "value": key}
        (call,) = lowered("aten::_scaled_dot_product_efficient_attention", inputs, [query], MODERN)
        return float(price_calls(Calls.of(call.family, [call]), load_device(device))[0].seconds[0])

    assert seconds(7, 4096, 16) == pytest.approx(seconds(64, 4096, 64), rel=0.3), "of 64 queries and 64 wide"
    assert seconds(4096, 7, 16) == pytest.approx(seconds(7, 4096, 16)), "or of 64 keys"
    assert seconds(7, 4096, 80) > 1.7 * seconds(7, 4096, 64)
    # three products in TF32 for one in fp32: graphics cards do as many of these as of fp32
    assert seconds(256, 256, 32, "rtx-3060") > 8 * seconds(256, 256, 32)


FLASH = "aten::_flash_attention_forward"


def seen(name, queries, keys, **scalars):
    """Keys that the fused kernel of an op is priced for, and whether under a square causal mask."""
    before_heads = name.startswith("aten::_scaled")
    query, key = (tensor(2, *((16, n) if before_heads else (n, 16)), 64, dtype="bfloat16") for n in (queries, keys))
    inputs = {"query": query, "key": key, "value": key}
    (call,) = lowered(name, inputs, [query], replace(MODERN, capability=A100), **scalars)
    return field(call, "kv_len"), field(call, "causal")


def test_a_square_causal_mask_is_told_as_one_and_no_mask_as_none():
    assert seen(FLASH, 2048, 2048, is_causal=True) == (2048, 1)
    assert seen(FLASH, 2048, 2048, is_causal=False) == (2048, 0)
    assert seen(FLASH, 2048, 2048, is_causal=False, window_size_left=-1, window_size_right=-1) == (2048, 0)


def test_a_window_costs_the_tiles_that_it_touches():
    wide, _ = seen(FLASH, 16384, 16384, is_causal=True, window_size_left=4095)
    narrow, causal = seen(FLASH, 16384, 16384, is_causal=True, window_size_left=127)

    assert 0.85 * 4096 < wide < 1.1 * 4096  # the first queries see less
    assert 250 < narrow <= 256 and causal == 0
    assert seen(FLASH, 16384, 16384, is_causal=True, window_size_left=1 << 20)[0] == pytest.approx(8256, rel=0.01)


def test_flash_aligns_the_last_query_with_the_last_key():
    """New tokens behind 3,072 old ones: each sees all of those."""
    behind, causal = seen(FLASH, 1024, 4096, is_causal=True)

    assert behind == pytest.approx(3072 + 576, rel=0.01) and causal == 0


def test_documents_laid_end_to_end_see_themselves():
    packed, ends = tensor(4096, 16, 64, dtype="bfloat16"), tensor(9, dtype="int32")
    inputs = {"query": packed, "key": packed, "value": packed, "cu_seq_q": ends, "cu_seq_k": ends}
    context = replace(MODERN, capability=A100)
    (call,) = lowered("torch_attn::_varlen_attn", inputs, [packed], context, window_size=(-1, 0))

    assert (field(call, "batch"), field(call, "kv_len"), field(call, "causal")) == (8, 512, 1)
