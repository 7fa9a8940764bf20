"""The attention half of a layer: projections, positions, the attention itself, and the way back."""

from __future__ import annotations

from traincast.ir.variants import FLASH2, RING, TRITON
from traincast.models.layers.builder import Ref
from traincast.models.transformers.description import LatentAttention, Transformer
from traincast.models.transformers.program.gemms import write_linear
from traincast.models.transformers.program.graph import Gradients, Graph
from traincast.models.transformers.program.parts import write_norm, write_rotary
from traincast.models.transformers.program.scores import Heads, write_attention_by_ops, write_unfused_attention
from traincast.models.transformers.program.style import Shard

_OLDER = {"triton": TRITON, "flash2": FLASH2}


def write_attention(
    graph: Graph, x: Ref, model: Transformer, shard: Shard, *, window: int = 0, causal: bool = True
) -> Ref:
    """From the normalised input, [tokens, hidden], to what is added to the residual stream."""
    if model.latent is not None:
        return _write_latent_attention(graph, x, model, model.latent, shard)
    q_heads, kv_heads = max(1, model.heads // shard.tp), max(1, model.kv_heads // shard.tp)
    heads = Heads(q_heads, kv_heads, model.head_dim, causal and model.causal, window)
    query, key, value = _project_qkv(graph, x, model, heads)
    if model.qk_norm:
        query, key = (_normalise_heads(graph, ref, model.head_dim, model.norm) for ref in (query, key))
    if model.position == "rotary":
        query, key = (write_rotary(graph, ref, model.head_dim) for ref in (query, key))
    mixed = _write_scores_and_values(graph, query, key, value, heads, shard)
    result = write_linear(graph, mixed, model.hidden, bias=model.bias, adapted=True)
    graph.drop(mixed)
    return result


def _project_qkv(graph: Graph, x: Ref, model: Transformer, heads: Heads) -> tuple[Ref, Ref, Ref]:
    """Queries, keys and values, by one product or by three."""
    widths = (heads.queries * heads.width, heads.keys * heads.width, heads.keys * heads.width)
    bias = model.bias or model.qkv_bias
    if not (graph.style.joined or model.joined):
        query, key, value = (write_linear(graph, x, width, bias=bias, adapted=True) for width in widths)
        return query, key, value
    return _split_columns(graph, write_linear(graph, x, sum(widths), bias=bias, adapted=True), widths)


def _split_columns(graph: Graph, joined: Ref, widths: tuple[int, int, int]) -> tuple[Ref, Ref, Ref]:
    """Views of columns side by side; backward puts their gradients together in one kernel."""
    rows, whole = joined.shape
    parts = tuple(graph.builder.add_view(joined, (rows, width), (whole, 1)) for width in widths)

    def backward(grads: Gradients) -> Gradients:
        arrived = [grad for grad in grads if grad is not None]
        together = graph.new(rows, whole)
        graph.op("aten::cat", [("tensors", arrived)], [together], [("dim", 1)])
        return [together]

    graph.node("SplitWithSizesBackward0", [joined], parts, [], backward)
    query, key, value = parts
    return query, key, value


def _normalise_heads(graph: Graph, x: Ref, width: int, kind: str) -> Ref:
    """A norm of every head on its own."""
    rows, whole = x.shape
    by_head = graph.builder.add_view(x, (rows * whole // width, width))
    graph.node("ViewBackward0", [x], [by_head], [], lambda grads: [_view_as_heads(graph, grads[0], (rows, whole))])
    normed = write_norm(graph, by_head, kind)
    flat = graph.builder.add_view(normed, (rows, whole))
    shape = (rows * whole // width, width)
    graph.node("ViewBackward0", [normed], [flat], [], lambda grads: [_view_as_heads(graph, grads[0], shape)])
    return flat


def _view_as_heads(graph: Graph, grad: Ref | None, shape: tuple[int, ...]) -> Ref:
    assert grad is not None
    return graph.builder.add_view(grad, shape)


def _write_latent_attention(graph: Graph, x: Ref, model: Transformer, latent: LatentAttention, shard: Shard) -> Ref:
    """Attention whose keys and values are told from one small vector a token (DeepSeek)."""
    heads = max(1, model.heads // shard.tp)
    key_dim = latent.nope_dim + latent.rope_dim
    small = write_norm(graph, write_linear(graph, x, latent.q_rank), model.norm) if latent.q_rank else x
    query = write_rotary(graph, write_linear(graph, small, heads * key_dim), key_dim)
    compressed = write_norm(graph, write_linear(graph, x, latent.kv_rank + latent.rope_dim), model.norm)
    narrow = graph.builder.add_view(compressed, (compressed.shape[0], latent.kv_rank), (compressed.shape[1], 1))
    shape = compressed.shape
    graph.node("SliceBackward0", [compressed], [narrow], [], lambda grads: [_pad_gradient(graph, grads[0], shape)])
    opened = write_linear(graph, narrow, heads * (latent.nope_dim + latent.value_dim))
    key = _assemble_heads(graph, opened, heads * key_dim)
    value = _assemble_heads(graph, opened, heads * latent.value_dim)
    graph.drop(opened)
    # keys of 192 and values of 128 cost what heads of their mean width do
    width = (key_dim + latent.value_dim) // 2
    mixed = _write_scores_and_values(graph, query, key, value, Heads(heads, heads, width, causal=True), shard)
    seen = graph.builder.add_view(mixed, (mixed.shape[0], heads * latent.value_dim), (mixed.shape[1], 1))
    wide = mixed.shape
    graph.node("SliceBackward0", [mixed], [seen], [], lambda grads: [_pad_gradient(graph, grads[0], wide)])
    return write_linear(graph, seen, model.hidden)


def _assemble_heads(graph: Graph, opened: Ref, width: int) -> Ref:
    """Keys (with the rotary part that all heads share) or values copied out of their projection, and back."""
    result = graph.new(opened.shape[0], width)
    part = graph.builder.add_view(opened, (opened.shape[0], min(width, opened.shape[1])), (opened.shape[1], 1))
    graph.scope("aten::cat")
    graph.fused([part], [result])
    shape = opened.shape
    graph.node("CatBackward0", [opened], [result], [], lambda grads: [_pad_gradient(graph, grads[0], shape)])
    return result


def _pad_gradient(graph: Graph, grad: Ref | None, shape: tuple[int, ...]) -> Ref:
    """The gradient of a slice, in the form of what it was cut from."""
    assert grad is not None
    whole = graph.new(*shape)
    graph.fused([grad], [whole])
    return whole


def _write_scores_and_values(graph: Graph, query: Ref, key: Ref, value: Ref, heads: Heads, shard: Shard) -> Ref:
    flash, fused = graph.style.attention != "unfused", graph.style.fused
    write = _write_flash_attention if flash else write_unfused_attention if fused else write_attention_by_ops
    mixed = write(graph, query, key, value, heads, shard)
    graph.drop(query, key, value)
    return mixed


def _list_attention_kernels(heads: Heads, shard: Shard) -> list[tuple[int, bool]]:
    """The kernels of one attention as (keys that each query meets, whether under a mask).

    Ranks that share the tokens of a sample each take one early and one late part of it: a masked square, and
    rectangles of which they meet half.
    """
    local = shard.document or shard.local_seq
    if heads.window and heads.window < local:
        return [(local, True)]
    if not heads.causal:
        return [(local, False)] * shard.cp
    return [(local, True)] + [(max(1, local // 2), False)] * (shard.cp - 1)


class _Ring:
    """Keys and values on their way round the ranks that share a sample: alongside attention to those that have arrived,
    or gathered before. Backward, `gradients` travel with them."""

    def __init__(self, graph: Graph, key: Ref, value: Ref, blocks: int, *, gradients: bool = False) -> None:
        self.graph, self.key, self.left, self.event = graph, key, blocks - 1, -1
        self.nbytes = (2 if gradients else 1) * float(key.spec.nbytes + value.spec.nbytes)
        groups = graph.groups
        if groups.cp is not None and groups.cp_gather:
            graph.collective("all_gather", groups.cp, self.nbytes * len(groups.cp.ranks), key)
            self.left = 0

    def begin(self) -> None:
        """Sends what the next piece of attention reads."""
        if self.left > 0 and self.graph.groups.cp is not None:
            self.event = self.graph.begin("send_recv", self.graph.groups.cp, self.nbytes, self.key)
        self.left -= 1

    def wait(self) -> None:
        """Until it has come."""
        if self.event >= 0:
            self.graph.builder.wait_for_event(self.event)
        self.event = -1


def _write_flash_attention(graph: Graph, query: Ref, key: Ref, value: Ref, heads: Heads, shard: Shard) -> Ref:
    """Fused attention, forward and backward; several kernels where tokens of a sample are shared by ranks. Documents of
    a sample are sequences of their own."""
    builder, local = graph.builder, shard.document or shard.local_seq
    batch = max(1, shard.tokens // local)
    queries = builder.add_view(query, (batch, local, heads.queries, heads.width))
    result = graph.new(shard.tokens, heads.queries * heads.width)
    shaped = builder.add_view(result, queries.shape)
    sums = graph.new(batch, heads.queries, local, dtype="float32")
    blocks = []
    for seen, masked in _list_attention_kernels(heads, shard):
        keys, values = (builder.add_view(ref, (batch, seen, heads.keys, heads.width)) for ref in (key, value))
        blocks.append((keys, values, masked))
    variant = graph.variant(_OLDER.get(graph.style.attention, ""), RING if graph.style.ring else "")
    if heads.window and heads.window < local:
        variant = [("window_size_left", heads.window - 1), *variant]
    graph.scope("aten::scaled_dot_product_attention")
    ring = _Ring(graph, key, value, len(blocks))
    for keys, values, causal in blocks:
        ring.begin()
        arguments = [("query", queries), ("key", keys), ("value", values)]
        graph.op("aten::_flash_attention_forward", arguments, [shaped, sums], [("is_causal", causal), *variant])
        ring.wait()

    def backward(grads: Gradients) -> Gradients:
        (grad,) = grads
        assert grad is not None
        below = [graph.new(*ref.shape) for ref in (query, key, value)]
        outer = builder.add_view(grad, queries.shape)
        ring = _Ring(graph, key, value, len(blocks), gradients=True)
        for keys, values, causal in blocks:
            ring.begin()
            arguments = [("grad_out", outer), ("query", queries), ("key", keys), ("value", values)]
            arguments += [("out", shaped), ("logsumexp", sums)]
            shapes = [
                builder.add_view(ref, form.shape) for ref, form in zip(below, (queries, keys, values), strict=True)
            ]
            graph.op("aten::_flash_attention_backward", arguments, shapes, [("is_causal", causal), *variant])
            ring.wait()
        return below

    saved = [query, key, value, result, sums]
    graph.node("ScaledDotProductFlashAttentionBackward0", [query, key, value], [result], saved, backward)
    graph.drop(sums)
    return result
