"""State-space layers: what their kernels do, what tensor-parallel ranks share, and hybrids under layouts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from traincast.hardware.platform import load_platform
from traincast.models.transformers.description import count_active_parameters, count_all_parameters, count_model_flops
from traincast.models.transformers.program.step import build_layer_block
from traincast.models.transformers.program.style import Shard, Style
from traincast.models.transformers.reading import load_transformer, make_transformer
from traincast.simulator.parallelism.layout import Layout
from traincast.simulator.parallelism.predict import estimate_seconds, predict_parallel
from traincast.utils.errors import TraincastError

HYBRID = make_transformer(
    "hybrid",
    {"layers": 4, "hidden": 512, "heads": 8, "kv_heads": 2, "ffn": 1024, "vocab": 1024, "activation": "relu2",
     "pattern": "ME*-", "mamba": {"heads": 16, "head_dim": 64, "state": 128, "groups": 4},
     "experts": {"count": 8, "top_k": 2, "ffn": 256, "latent": 128}},
)  # fmt: skip


def count_flops(program, name: str = "aten::") -> float:
    total = 0.0
    for op in program.ops:
        if op.name in ("aten::mm", "aten::bmm") and op.name.startswith(name):
            left, right = op.inputs[0].spec.shape, op.inputs[1].spec.shape
            batch = left[0] if len(left) == 3 else 1
            total += 2.0 * batch * left[-2] * left[-1] * right[-1]
    return total


def test_published_hybrids_have_the_weights_of_their_names() -> None:
    for name, billions in (
        ("nemotron-h-8b", 8.1), ("nemotron-h-56b", 56), ("nemotron-nano-9b-v2", 8.9), ("nemotron-3-nano", 31.6),
        ("nemotron-3-super", 120.7), ("qwen3-next-80b-a3b", 80), ("llama4-maverick", 401), ("nemotron4-340b", 341),
    ):  # fmt: skip
        assert count_all_parameters(load_transformer(name)) == pytest.approx(1e9 * billions, rel=0.01), name
    assert count_active_parameters(load_transformer("nemotron-3-super")) == pytest.approx(12.2e9, rel=0.02)


def test_the_scan_takes_two_products_backward_for_each_forward() -> None:
    block = build_layer_block(HYBRID, Shard(batch=2, seq_len=512), Style(), modules="M")
    forward = [op for op in block.program.ops[: block.backward] if op.name == "aten::bmm"]
    backward = [op for op in block.program.ops[block.backward :] if op.name == "aten::bmm"]
    assert (len(forward), len(backward)) == (3, 9)
    state = 2.0 * 2 * 512 * 16 * 64 * 128  # of all tokens: heads, their elements, a state of each
    assert count_flops(block.program, "aten::bmm") > 6 * state
    half = build_layer_block(HYBRID, Shard(batch=2, seq_len=512, tp=2, sequence=True), Style(), modules="M")
    assert count_flops(half.program) == pytest.approx(count_flops(block.program) / 2, rel=0.05)


def test_time_grows_with_tokens_not_with_their_square() -> None:
    plain = replace(HYBRID, pattern="M", experts=None)
    short, long = (count_model_flops(plain, 64 // n, 1024 * n) for n in (1, 16))
    assert long == short
    node = load_platform("dgx-h100")
    times = [
        predict_parallel(plain, node, Layout(gpus=8, micro_batch=m, seq_len=s, global_batch=8 * m)).iteration
        for m, s in ((16, 2048), (1, 32768))
    ]
    assert times[1] == pytest.approx(times[0], rel=0.1)


@pytest.mark.parametrize("layout", [{}, {"tp": 2}, {"ep": 4}, {"pp": 2}, {"cp": 2}, {"sharding": "zero3"}])
def test_a_hybrid_takes_every_layout_and_both_ways_agree(layout) -> None:
    chosen = Layout(gpus=8, global_batch=32, seq_len=2048, micro_batch=2, **layout)
    node = load_platform("dgx-h100")
    simulated = predict_parallel(HYBRID, node, chosen).iteration
    assert estimate_seconds(HYBRID, node, chosen) == pytest.approx(simulated, rel=0.3)


def test_what_a_pattern_needs_is_asked_for() -> None:
    table = {"layers": 2, "hidden": 64, "heads": 2, "vocab": 64}
    for pattern, message in (("M-", "no 'mamba'"), ("*E", "no 'experts'"), ("X", "give letters of")):
        with pytest.raises(TraincastError, match=message):
            make_transformer("x", {**table, "pattern": pattern})
