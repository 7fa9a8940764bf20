"""Steps written from a Hugging Face `config.json` against captures of Hugging Face's own classes: the same GEMMs."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from tests.evaluation.zoo.captured import capture_once
from tests.models.programs.test_transformer import _kernels
from traincast.ir.ops import Phase
from traincast.ir.program import Program
from traincast.models.transformers.reading import make_transformer, read_hugging_face_config
from traincast.simulator.parallelism.layout import Layout, complete_layout
from traincast.simulator.parallelism.program import build_parallel_workload

transformers = pytest.importorskip(
    "transformers", reason="Hugging Face's classes are compared where they are installed"
)

_SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 160, "max_position_embeddings": 32,
}  # fmt: skip
_PLAIN = {name: size for name, size in _SIZES.items() if name != "num_key_value_heads"} | {"intermediate_size": 256}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", _SIZES),
    "mistral": ("Mistral", _SIZES | {"sliding_window": None}),
    "qwen2": ("Qwen2", _SIZES),
    "qwen3": ("Qwen3", _SIZES | {"head_dim": 16}),
    "mixtral": ("Mixtral", _SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": ("Qwen3Moe", _SIZES | _EXPERTS | {"head_dim": 16, "num_experts": 4, "mlp_only_layers": []}),
    "deepseek_v3": (
        "DeepseekV3",
        _SIZES | _EXPERTS | {
            "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 16, "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8, "v_head_dim": 16, "n_routed_experts": 4, "n_shared_experts": 1,
            "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
        },
    ),
    "gpt_oss": ("GptOss", _SIZES | {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "gpt2": ("GPT2", {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 160, "n_positions": 32}),
    "opt": ("OPT", _PLAIN | {"ffn_dim": 256, "word_embed_proj_dim": 64}),
    "gpt_neox": ("GPTNeoX", _PLAIN),
    "phi3": ("Phi3", _SIZES | {"pad_token_id": 0}),
    "t5": ("T5", {"d_model": 64, "d_kv": 16, "d_ff": 256, "num_layers": 2, "num_heads": 4, "vocab_size": 160,
                  "decoder_start_token_id": 0}),
}  # fmt: skip
_JOINED = ("gpt2", "gpt_neox", "phi3")  # one product makes queries, keys and values
_WRITTEN_OUT = ("t5", "gpt_oss")  # their attention adds to its scores
_DROPOUTS = ("resid_pdrop", "embd_pdrop", "attn_pdrop", "dropout", "dropout_rate", "attention_dropout")


def _config(family: str) -> Any:
    name, sizes = _CONFIGS[family]
    config = getattr(transformers, f"{name}Config")(**sizes)
    for option in _DROPOUTS:
        if hasattr(config, option):
            setattr(config, option, 0.0)
    return config


def _captured(family: str, config: Any) -> Program:
    kind = transformers.AutoModelForSeq2SeqLM if family == "t5" else transformers.AutoModelForCausalLM
    attention = "eager" if family in _WRITTEN_OUT else "sdpa"

    def make(batch: int, seq_len: int) -> Any:
        model = kind.from_config(config, attn_implementation=attention).to(dtype=torch.bfloat16, device="cuda")
        words = torch.zeros(batch, seq_len, dtype=torch.int64, device="cuda")
        return lambda: model(input_ids=words, labels=words).loss.backward()

    return capture_once(make, 2, 32)


def _written(family: str, config: Any) -> Program:
    model = make_transformer(family, read_hugging_face_config(config.to_dict(), "config.json"))
    attention = "unfused" if family in _WRITTEN_OUT else "flash"
    layout = Layout(
        gpus=1, micro_batch=2, seq_len=32, kernels="eager", joined=family in _JOINED, attention=attention,
        optimizer="none",
    )  # fmt: skip
    return build_parallel_workload(
        model, complete_layout(layout, model), (), gpus_per_node=1, micro_batches=1
    ).programs[0]


def _work(program: Program, phase: Phase) -> Counter:
    """Products by how many of which sizes (a transposed one is the same work), and attention's kernels."""
    found: Counter = Counter()
    for (family, kind, _, values), count in _kernels(program, phase, ("gemm", "attention")).items():
        batch, *sizes = values[:4]
        key = ("product", batch, *sorted(sizes)) if family == "gemm" else (kind, values[:7])
        found[key] += count
    return found


@pytest.mark.parametrize("family", _CONFIGS)
def test_a_described_step_does_the_products_of_hugging_faces_own(family: str) -> None:
    config = _config(family)
    captured, written = _captured(family, config), _written(family, config)
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        assert _work(written, phase) == _work(captured, phase)
