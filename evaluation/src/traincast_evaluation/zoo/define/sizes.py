"""Sizes of the language models."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class LanguageModelSizes:
    """Sizes of a language model; fields that a model does not have are 0. `attention` is "eager" or "sdpa"."""

    num_layers: int
    hidden_size: int
    num_heads: int
    head_dim: int = 0
    ffn_size: int = 0
    vocab_size: int
    max_seq_len: int = 0
    dropout: float = 0.1
    attention: str = "eager"


BERT_LARGE = LanguageModelSizes(
    num_layers=24, hidden_size=1024, num_heads=16, ffn_size=4096, vocab_size=30522, max_seq_len=512
)
GPT2_LARGE = LanguageModelSizes(num_layers=36, hidden_size=1280, num_heads=20, vocab_size=50257, max_seq_len=1024)
GPT3_XL = LanguageModelSizes(num_layers=24, hidden_size=3072, num_heads=24, vocab_size=50257, max_seq_len=2048)
GPT3_27 = LanguageModelSizes(num_layers=32, hidden_size=2560, num_heads=32, vocab_size=50257, max_seq_len=2048)
OPT_13 = LanguageModelSizes(
    num_layers=24, hidden_size=2048, num_heads=32, ffn_size=8192, vocab_size=50272, max_seq_len=2048
)
TRANSFORMER_BASE = LanguageModelSizes(
    num_layers=6, hidden_size=512, num_heads=8, ffn_size=2048, vocab_size=37000, max_seq_len=1024
)
XLNET_BASE = LanguageModelSizes(
    num_layers=12, hidden_size=768, num_heads=12, head_dim=64, ffn_size=3072, vocab_size=32000
)


@dataclass(frozen=True, kw_only=True, slots=True)
class SwitchSizes(LanguageModelSizes):
    """Sizes of a Switch Transformer; those of the XL model with four experts are `SWITCH_XL4`."""

    num_experts: int = 4
    expert_capacity: int = 64
    sparse_every: int = 2
    jitter: float = 0.01


SWITCH_XL4 = SwitchSizes(num_layers=24, hidden_size=1024, num_heads=32, head_dim=128, ffn_size=16384, vocab_size=32128)
