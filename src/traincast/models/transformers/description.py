"""What a Transformer is, in the numbers that decide how long a step of it takes."""

from __future__ import annotations

from dataclasses import dataclass

NORMS = ("rms", "rms_by_ops", "layer")
ACTIVATIONS = ("swiglu", "geglu", "gelu", "gelu_new", "relu")
POSITIONS = ("rotary", "learned", "alibi", "relative", "none")
GATED = ("swiglu", "geglu")


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek): ranks of the compressed query (0: not compressed) and of keys and values,
    and the widths of a head: without and with rotary positions, and of its values."""

    q_rank: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Experts:
    """A mixture of experts: `top_k` of `count` experts of width `ffn` for every token, and shared ones of width
    `shared_ffn` together (0: none) for all. The first `dense_layers` layers have none, then every `every`-th has.

    `capacity` is the share of an even load above which an expert drops tokens (0: none is dropped).
    """

    count: int
    top_k: int
    ffn: int
    shared_ffn: int = 0
    dense_layers: int = 0
    every: int = 1
    capacity: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Transformer:
    """A Transformer: `layers` blocks of attention and feed-forward. Widths are elements, `seq_len` tokens.

    `ffn` is the width of dense feed-forward layers. `encoder_layers` more blocks without a mask stand before the
    decoder, whose blocks then attend to them as well (T5). `window` is how many tokens a sliding window sees, in every
    `window_every`-th layer (0: all see everything). `patch_inputs` values of every token are multiplied into the first
    layer instead of a token embedding (ViT; then `vocab` is the number of classes, told once per sample). `joined`:
    query, key and value are one GEMM, and so are gate and up. "gelu_new" is GELU's tanh formula written out op by op,
    "rms_by_ops" RMSNorm, as classes of Hugging Face and PyTorch before 2.9 run it.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    seq_len: int
    norm: str = "rms"
    activation: str = "swiglu"
    position: str = "rotary"
    bias: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    tied: bool = False
    joined: bool = False
    causal: bool = True
    window: int = 0
    window_every: int = 1
    encoder_layers: int = 0
    patch_inputs: int = 0
    latent: LatentAttention | None = None
    experts: Experts | None = None

    @property
    def positions(self) -> int | None:
        """Tokens of the longest sample, where positions are learned: its table has one row each."""
        return self.seq_len if self.position == "learned" else None

    @property
    def gated(self) -> bool:
        """Whether the feed-forward layer multiplies two projections."""
        return self.activation in GATED

    def has_experts(self, layer: int) -> bool:
        """Whether this layer (from 0) is a mixture of experts."""
        e = self.experts
        return e is not None and layer >= e.dense_layers and (layer - e.dense_layers) % e.every == e.every - 1

    @property
    def expert_layers(self) -> int:
        """How many layers are mixtures of experts."""
        return sum(self.has_experts(layer) for layer in range(self.layers))

    def window_of(self, layer: int) -> int:
        """Tokens that attention of this layer looks back (0: all)."""
        return self.window if self.window and layer % self.window_every == 0 else 0
