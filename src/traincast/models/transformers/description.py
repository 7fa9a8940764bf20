"""What a Transformer is, in the numbers that decide how long a step of it takes; its parameters, and the arithmetic of
a step."""

from __future__ import annotations

from dataclasses import dataclass

NORMS = ("rms", "rms_by_ops", "layer")
ACTIVATIONS = ("swiglu", "geglu", "gelu", "gelu_new", "relu", "relu2")
POSITIONS = ("rotary", "learned", "alibi", "relative", "none")
GATED = ("swiglu", "geglu")
ATTENTION, MAMBA, DENSE, MIXTURE = "*M-E"
"""What layers consist of, as `Transformer.pattern` writes it."""


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
class StateSpace:
    """A state-space layer (Mamba-2; close to it, gated delta nets): `heads` of `head_dim` elements with a state of
    `state` numbers each, input and output matrices for `groups` of heads, and a convolution over `conv` tokens. Tokens
    are taken `chunk` at a time."""

    heads: int
    head_dim: int
    state: int
    groups: int = 8
    conv: int = 4
    chunk: int = 128

    @property
    def inner(self) -> int:
        """Elements of all heads."""
        return self.heads * self.head_dim

    @property
    def mixed(self) -> int:
        """Elements that the convolution passes over: those of heads and of both matrices."""
        return self.inner + 2 * self.groups * self.state


@dataclass(frozen=True, kw_only=True, slots=True)
class Experts:
    """A mixture of experts: `top_k` of `count` experts of width `ffn` for every token, and shared ones of width
    `shared_ffn` together (0: none) for all. The first `dense_layers` layers have none, then every `every`-th has.

    `capacity` is the share of an even load above which an expert drops tokens (0: none is dropped). `latent` is the
    width that tokens are projected to before they are sent to experts (0: they are sent as they are).
    """

    count: int
    top_k: int
    ffn: int
    shared_ffn: int = 0
    dense_layers: int = 0
    every: int = 1
    capacity: float = 0.0
    latent: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Transformer:
    """A Transformer: `layers` blocks of attention and feed-forward. Widths are elements, `seq_len` tokens.

    `ffn` is the width of dense feed-forward layers. `encoder_layers` more blocks without a mask stand before the
    decoder, whose blocks then attend to them as well (T5). `window` is how many tokens a sliding window sees (0: all)
    in all layers but every `full_every`-th (0: in all). `post_norm`: a norm after each module too, before the sum.
    `patch_inputs` values of every token are multiplied into the first layer instead of a token embedding (ViT; then
    `vocab` is the number of classes, told once per sample). `joined`: query, key and value are one GEMM, and so are
    gate and up. "gelu_new" is GELU's tanh formula written out op by op, "rms_by_ops" RMSNorm, as classes of Hugging
    Face and PyTorch before 2.9 run it; "relu2" is squared.

    `pattern` says what layers consist of where that is not attention and feed-forward: a letter for each layer, or
    (with spaces between) a word of letters, again from the first when all are used. "*" is attention, "M" a
    state-space layer (`mamba`), "-" a feed-forward network and "E" a mixture of experts. `decoder_len` are the tokens
    that a decoder sees beside an encoder's (0: as many).
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
    post_norm: bool = False
    tied: bool = False
    joined: bool = False
    causal: bool = True
    window: int = 0
    full_every: int = 0
    encoder_layers: int = 0
    patch_inputs: int = 0
    latent: LatentAttention | None = None
    experts: Experts | None = None
    mamba: StateSpace | None = None
    pattern: str = ""
    decoder_len: int = 0

    @property
    def positions(self) -> int | None:
        """Tokens of the longest sample, where positions are learned: its table has one row each."""
        return self.seq_len if self.position == "learned" else None

    @property
    def gated(self) -> bool:
        """Whether the feed-forward layer multiplies two projections."""
        return self.activation in GATED

    def list_modules(self, layer: int) -> str:
        """What this layer (from 0) consists of, in the letters of `pattern`."""
        if self.pattern:
            words = self.pattern.split() if " " in self.pattern else self.pattern
            return words[layer % len(words)]
        e = self.experts
        mixes = e is not None and layer >= e.dense_layers and (layer - e.dense_layers) % e.every == e.every - 1
        return ATTENTION + (MIXTURE if mixes else DENSE)

    def has_experts(self, layer: int) -> bool:
        """Whether this layer (from 0) has a mixture of experts."""
        return MIXTURE in self.list_modules(layer)

    @property
    def expert_layers(self) -> int:
        """How many layers are mixtures of experts."""
        return sum(self.has_experts(layer) for layer in range(self.layers))

    def window_of(self, layer: int) -> int:
        """Tokens that attention of this layer looks back (0: all)."""
        return 0 if self.full_every and (layer + 1) % self.full_every == 0 else self.window


def count_norm_parameters(model: Transformer) -> int:
    """Weights of one norm of the residual stream."""
    return model.hidden * (2 if model.norm == "layer" else 1)


def count_attention_parameters(model: Transformer) -> int:
    """Weights of one layer's attention, its norm included."""
    latent, width = model.latent, model.heads * model.head_dim
    norms = count_norm_parameters(model) * (1 + model.post_norm)
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


def count_state_space_parameters(model: Transformer) -> int:
    """Weights of one state-space layer, its norm included."""
    m = model.mamba
    assert m is not None
    projections = model.hidden * (m.inner + m.mixed + m.heads) + m.inner * model.hidden
    return projections + (m.conv + 1) * m.mixed + m.inner + 3 * m.heads + model.hidden


def count_expert_parameters(model: Transformer) -> int:
    """Weights of one expert."""
    e = model.experts
    assert e is not None
    projections = 3 if model.gated else 2
    return projections * (e.latent or model.hidden) * e.ffn + model.bias * ((projections - 1) * e.ffn + model.hidden)


def count_layer_parameters(model: Transformer, layer: int) -> tuple[int, int]:
    """Weights of one layer of the decoder: (all that every token meets, all experts together)."""
    norm = count_norm_parameters(model) * (1 + model.post_norm)
    dense, sparse = 0, 0
    for module in model.list_modules(layer):
        if module == ATTENTION:
            dense += count_attention_parameters(model) * (2 if model.encoder_layers else 1)  # also to the encoder
        elif module == MAMBA:
            dense += count_state_space_parameters(model)
        elif module == DENSE:
            dense += norm + count_feed_forward_parameters(model, model.ffn)
        else:
            e = model.experts
            assert e is not None
            shared = count_feed_forward_parameters(model, e.shared_ffn) if e.shared_ffn else 0
            dense += norm + shared + model.hidden * (e.count + 2 * e.latent)
            sparse += e.count * count_expert_parameters(model)
    return dense, sparse


def count_embedding_parameters(model: Transformer) -> int:
    """The token embedding (or the first projection) and of learned positions."""
    inputs = model.patch_inputs or model.vocab
    return model.hidden * (inputs + model.seq_len * (model.position == "learned"))


def count_head_parameters(model: Transformer) -> int:
    """The last norm and the projection to words; 0 of the latter where it is the table itself."""
    return count_norm_parameters(model) + (0 if model.tied else model.hidden * model.vocab)


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
    return total - model.expert_layers * (experts.count - experts.top_k) * count_expert_parameters(model)


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
        modules, window = model.list_modules(layer), model.window_of(layer)
        if MAMBA in modules and model.mamba is not None:  # the state's update, and what is read from it
            attention += 6.0 * 2 * model.mamba.inner * model.mamba.state
        if ATTENTION not in modules:
            continue
        seen = seq_len if not model.causal else (seq_len / 2 if not window else min(window, seq_len / 2))
        attention += 6.0 * model.heads * (key_dim + value_dim) * seen
    return tokens * (6.0 * count_active_parameters(model) + attention)
