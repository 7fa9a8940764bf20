"""Layers written without torch against captures of torch classes in the style of torchtitan and MPT."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.evaluation.zoo.captured import capture_once
from traincast.costs.kernels.lower import lower_program
from traincast.costs.kernels.registry import LoweringContext
from traincast.ir.memory import compute_peak_memory
from traincast.ir.ops import Phase
from traincast.ir.program import Program
from traincast.models.transformers.program.step import build_head_block, build_inference_workload, build_layer_block
from traincast.models.transformers.program.style import Shard, Style
from traincast.models.transformers.reading import make_transformer

LLAMA = make_transformer(
    "tiny", {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 4, "ffn": 96, "vocab": 160, "seq_len": 32}
)
MPT = make_transformer(
    "mpt", {"layers": 1, "hidden": 64, "heads": 4, "vocab": 160, "seq_len": 32, "norm": "layer", "activation": "gelu",
            "position": "none"},
)  # fmt: skip


class _Llama(nn.Module):
    """A layer as torchtitan writes it, without its rotary positions."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.ffn_norm = nn.RMSNorm(64), nn.RMSNorm(64)
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(64, 64, bias=False) for _ in range(4))
        self.w1, self.w3, self.w2 = (nn.Linear(*sizes, bias=False) for sizes in ((64, 96), (64, 96), (96, 64)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm(x)
        heads = [w(normed).view(*x.shape[:2], 4, 16).transpose(1, 2) for w in (self.wq, self.wk, self.wv)]
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + self.wo(mixed)
        normed = self.ffn_norm(x)
        return x + self.w2(F.silu(self.w1(normed)) * self.w3(normed))


class _Mpt(nn.Module):
    """A layer as MPT writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.ffn_norm = nn.LayerNorm(64, bias=False), nn.LayerNorm(64, bias=False)
        self.qkv, self.out = nn.Linear(64, 192, bias=False), nn.Linear(64, 64, bias=False)
        self.up, self.down = nn.Linear(64, 256, bias=False), nn.Linear(256, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = [part.view(*x.shape[:2], 4, 16).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, dim=-1)]
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + self.out(mixed)
        return x + self.down(F.gelu(self.up(self.ffn_norm(x))))


def _step(make):
    def make_step(batch: int, seq_len: int):
        model = make().to(dtype=torch.bfloat16, device="cuda")
        x = torch.randn(batch, seq_len, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True)

        def run() -> None:
            model(x).backward(torch.ones_like(x))

        return run

    return make_step


def _kernels(program: Program, phase: Phase, families: tuple[str, ...]) -> Counter:
    """Kernels by family, kind and sizes; batched and flat GEMMs of the same numbers are the same kernel."""
    lowered = lower_program(program, LoweringContext())
    found: Counter = Counter()
    for op in program.ops:
        if op.phase != phase:
            continue
        for item in lowered.items[program.columns.op_signature[op.index]]:
            call = lowered.calls[item] if item >= 0 else None
            if call is not None and call.family.name in families:
                found[call.family.name, call.kind, call.compute, call.values] += 1
    return found


@pytest.mark.parametrize(("make", "model", "joined"), [(_Llama, LLAMA, False), (_Mpt, MPT, True)])
@pytest.mark.parametrize("phase", [Phase.FORWARD, Phase.BACKWARD])
def test_products_norms_and_attention_are_those_of_a_capture(make, model, joined, phase) -> None:
    captured = capture_once(_step(make), 2, 32)
    plain = make_transformer(
        "tiny",
        {
            "layers": 1,
            "hidden": 64,
            "heads": 4,
            "ffn": model.ffn,
            "vocab": 9,
            "seq_len": 32,
            "norm": model.norm,
            "activation": model.activation,
            "position": "none",
        },
    )
    piece = build_layer_block(plain, Shard(batch=2, seq_len=32), Style(joined=joined), modules="*-")
    families = ("gemm", "attention", "norm")
    assert _kernels(piece.program, phase, families) == _kernels(captured, phase, families)


class _NormByOps(nn.Module):
    """RMSNorm as Hugging Face writes it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype)


class _LlamaByOps(_Llama):
    """A layer as Hugging Face writes it, without its rotary positions."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.ffn_norm = _NormByOps(64), _NormByOps(64)


@pytest.mark.parametrize("phase", [Phase.FORWARD, Phase.BACKWARD])
def test_a_norm_by_ops_moves_the_bytes_of_a_capture(phase) -> None:
    captured = capture_once(_step(_LlamaByOps), 8, 512)
    plain = replace(LLAMA, layers=1, norm="rms_by_ops", position="none")
    piece = build_layer_block(plain, Shard(batch=8, seq_len=512), Style(joined=False), modules="*-")

    def moved(program: Program) -> float:
        kernels = _kernels(program, phase, ("elementwise", "reduction"))
        places = {"elementwise": (1, 2), "reduction": (2, 3)}  # of bytes read and written
        return sum(count * sum(values[i] for i in places[family]) for (family, _, _, values), count in kernels.items())

    assert moved(piece.program) == pytest.approx(moved(captured), rel=0.1)


def test_a_step_frees_what_it_made_and_keeps_every_weight() -> None:
    program = build_inference_workload(LLAMA, batch_size=2, seq_len=32, style=Style()).programs[0]
    c = program.columns
    made = c.storage_alloc >= 0
    assert made.any() and (c.storage_free[made] < program.num_ops).mean() > 0.95
    kinds = compute_peak_memory(program).by_kind
    weights = 2 * (160 * 64 * 2 + 2 * (4 * 64 * 64 + 3 * 64 * 96 + 2 * 64) + 64)
    assert kinds["parameter"] + kinds.get("embedding_table", 0) == pytest.approx(weights, rel=0.02)


@pytest.mark.parametrize(
    "name", ["fused", "unfused attention", "dropout", "fp8", "tensor parallel", "context parallel"]
)
def test_every_style_gives_a_whole_layer(name: str) -> None:
    style = {
        "fused": Style(fused=True, together=True), "unfused attention": Style(attention="unfused"),
        "dropout": Style(attention="unfused", dropout=True), "fp8": Style(precision="fp8", quantised_weights=True),
    }.get(name, Style())  # fmt: skip
    shard = {
        "tensor parallel": Shard(batch=2, seq_len=32, tp=2, sequence=True),
        "context parallel": Shard(batch=2, seq_len=32, cp=2),
    }.get(name, Shard(batch=2, seq_len=32))
    piece = build_layer_block(LLAMA, shard, style, modules="*-")
    backward = _kernels(piece.program, Phase.BACKWARD, ("gemm",))
    forward = _kernels(piece.program, Phase.FORWARD, ("gemm",))
    work = [
        sum(n * values[0] * values[1] * values[2] * values[3] for (*_, values), n in k.items())
        for k in (forward, backward)
    ]
    assert work[1] == 2 * work[0]  # two GEMMs backward for each forward


def test_tensor_parallel_ranks_share_the_arithmetic_of_a_layer() -> None:
    whole = build_layer_block(LLAMA, Shard(batch=2, seq_len=32), Style(), modules="*-")
    half = build_layer_block(LLAMA, Shard(batch=2, seq_len=32, tp=2, sequence=True), Style(), modules="*-")

    def work(piece) -> float:
        kernels = _kernels(piece.program, Phase.FORWARD, ("gemm",)).items()
        return sum(n * v[0] * v[1] * v[2] * v[3] for (*_, v), n in kernels)

    assert work(half) == work(whole) / 2


def test_experts_see_each_token_top_k_times() -> None:
    mixture = make_transformer(
        "moe", {"layers": 1, "hidden": 64, "heads": 4, "ffn": 96, "vocab": 9, "seq_len": 32,
                "experts": {"count": 8, "top_k": 2, "ffn": 32}},
    )  # fmt: skip
    piece = build_layer_block(mixture, Shard(batch=2, seq_len=32, ep=4), Style(), modules="*E")
    kernels = _kernels(piece.program, Phase.FORWARD, ("gemm",))
    grouped = {values[:4]: n for (_, kind, _, values), n in kernels.items() if kind == "bmm"}
    # 64 tokens to 2 experts each: 2 local experts with 64 rows; gate and up together, then down
    assert grouped == {(2.0, 64.0, 64.0, 64.0): 1, (2.0, 64.0, 64.0, 32.0): 1}


def _computes(program: Program, phase: Phase) -> Counter:
    return Counter(compute for (_, _, compute, _), n in _kernels(program, phase, ("gemm",)).items() for _ in range(n))


def test_the_head_stays_in_16_bits_and_so_may_gradients_of_weights() -> None:
    shard = Shard(batch=2, seq_len=32)
    head = build_head_block(LLAMA, shard, Style(precision="fp8")).program
    assert _computes(head, Phase.FORWARD) == {"bf16": 1} and _computes(head, Phase.BACKWARD) == {"bf16": 2}
    layer = build_layer_block(LLAMA, shard, Style(precision="fp8", joined=False), modules="*-").program
    assert _computes(layer, Phase.BACKWARD) == {"fp8": 14}
    mixed = build_layer_block(
        LLAMA, shard, Style(precision="fp8", joined=False, wide_gradients=True), modules="*-"
    ).program
    assert _computes(mixed, Phase.FORWARD) == {"fp8": 7}
    assert _computes(mixed, Phase.BACKWARD) == {"fp8": 7, "bf16": 7}


@pytest.mark.parametrize("batch", [1, 2, 3, 4])
def test_megatrons_softmax_takes_four_matrices_at_a_time(batch: int) -> None:
    narrow = make_transformer("gpt", {"layers": 1, "hidden": 64, "heads": 2, "ffn": 96, "vocab": 9, "seq_len": 32})
    style = Style(attention="unfused", fused=True)
    piece = build_layer_block(narrow, Shard(batch=batch, seq_len=32), style, modules="*-")
    casts = [op.name for op in piece.program.ops].count("aten::_to_copy")
    assert casts == (0 if batch * 2 % 4 == 0 else 4)  # two each way


def test_megatrons_first_loss_passes_over_fp32_logits() -> None:
    shard = Shard(batch=2, seq_len=32)
    fused = build_head_block(LLAMA, shard, Style(fused=True))
    by_ops = build_head_block(LLAMA, shard, Style(fused=True, loss_by_ops=True))
    assert by_ops.program.num_ops - fused.program.num_ops == 6  # 6 forward instead of 1, 2 backward instead of 1
    peaks = [compute_peak_memory(one.program).peak_bytes for one in (by_ops, fused)]
    assert peaks[0] > peaks[1]  # the shares of all words, in fp32
