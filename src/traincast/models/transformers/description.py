"""What a Transformer is, in the numbers that decide how long a step of it takes; its parameters, and the arithmetic of
a step."""

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


def count_attention_parameters(model: Transformer) -> int:
    """Weights of one layer's attention, its norm included."""
    latent, width = model.latent, model.heads * model.head_dim
    norms = model.hidden * (2 if model.norm == "layer" else 1)
    if latent is None:
        kv = 2 * model.kv_heads * model.head_dim
        biases = (width + kv) * (model.bias or model.qkv_bias) + model.hidden * model.bias
        return model.hidden * (width + kv) + width * model.hidden + biases + norms + 2 * model.head_dim * model.qk_norm
    query_in = latent.q_rank or model.hidden
    query = query_in * model.heads * (latent.nope_dim + latent.rope_dim)
    down = model.hidden * (latent.q_rank + latent.kv_rank + latent.rope_dim) + latent.q_rank + latent.kv_rank
    up = latent.kv_rank * model.heads * (latent.nope_dim + latent.value_dim)
    return query + down + up + model.heads * latent.value_dim * model.hidden + norms


def count_feed_forward_parameters(model: Transformer, width: int) -> int:
    """Weights of one feed-forward network of this width."""
    projections = 3 if model.gated else 2
    return projections * model.hidden * width + model.bias * ((projections - 1) * width + model.hidden)


def count_layer_parameters(model: Transformer, layer: int) -> tuple[int, int]:
    """Weights of one layer of the decoder: (all that every token meets, all experts together)."""
    norm = model.hidden * (2 if model.norm == "layer" else 1)
    dense = count_attention_parameters(model) + norm
    if model.encoder_layers:
        dense += count_attention_parameters(model)  # to the encoder
    if not model.has_experts(layer):
        return dense + count_feed_forward_parameters(model, model.ffn), 0
    experts = model.experts
    assert experts is not None
    shared = count_feed_forward_parameters(model, experts.shared_ffn) if experts.shared_ffn else 0
    return dense + shared + model.hidden * experts.count, experts.count * count_feed_forward_parameters(
        model, experts.ffn
    )


def count_embedding_parameters(model: Transformer) -> int:
    """The token embedding (or the first projection) and of learned positions."""
    inputs = model.patch_inputs or model.vocab
    return model.hidden * (inputs + model.seq_len * (model.position == "learned"))


def count_head_parameters(model: Transformer) -> int:
    """The last norm and the projection to words; 0 of the latter where it is the table itself."""
    norm = model.hidden * (2 if model.norm == "layer" else 1)
    return norm + (0 if model.tied else model.hidden * model.vocab)


def count_all_parameters(model: Transformer) -> int:
    """All weights."""
    layers = sum(sum(count_layer_parameters(model, layer)) for layer in range(model.layers))
    encoder = model.encoder_layers * (
        count_attention_parameters(model) + count_feed_forward_parameters(model, model.ffn) + model.hidden
    )
    return count_embedding_parameters(model) + encoder + layers + count_head_parameters(model)


def count_active_parameters(model: Transformer) -> int:
    """Weights that one token is multiplied with: without tables, and of the experts those it is sent to."""
    total = count_all_parameters(model) - count_embedding_parameters(model)
    if model.tied:
        total += model.hidden * model.vocab
    experts = model.experts
    if experts is None:
        return total
    unused = (experts.count - experts.top_k) * count_feed_forward_parameters(model, experts.ffn)
    return total - model.expert_layers * unused


def count_model_flops(model: Transformer, samples: int, seq_len: int, *, document_len: int = 0) -> float:
    """Arithmetic of a training step as MFU counts it: six a weight and token, and attention's two GEMMs.

    Masked halves of attention are not counted, and nothing that is computed again is; tokens of other documents than
    their own (`document_len` tokens, 0: the whole sample) are masked too.
    """
    tokens, seq_len = float(samples) * seq_len, document_len or seq_len
    key_dim = model.head_dim if model.latent is None else model.latent.nope_dim + model.latent.rope_dim
    value_dim = model.head_dim if model.latent is None else model.latent.value_dim
    attention = 0.0
    for layer in range(model.layers):
        window = model.window_of(layer)
        seen = seq_len if not model.causal else (seq_len / 2 if not window else min(window, seq_len / 2))
        attention += 6.0 * model.heads * (key_dim + value_dim) * seen
    return tokens * (6.0 * count_active_parameters(model) + attention)
