"""Parameters of a Transformer, and the arithmetic of a step."""

from __future__ import annotations

from traincast.models.transformers.description import Transformer


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
