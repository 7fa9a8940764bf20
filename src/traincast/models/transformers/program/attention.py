"""The attention half of a layer, forward and backward: projections, positions, and attention fused or with its scores
written out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from traincast.ir.ops import BATCHED, FLASH2, RING, TRITON, Phase, StorageKind
from traincast.models.layers.builder import Ref
from traincast.models.transformers.description import LatentAttention, Transformer
from traincast.models.transformers.program.graph import Gradients, Graph
from traincast.models.transformers.program.parts import write_dropout, write_linear, write_norm, write_rotary
from traincast.models.transformers.program.style import Shard

_MATRICES_AT_ONCE = 4  # of scores, by Megatron's fused softmax: FusedScaleMaskSoftmax.is_kernel_available


@dataclass(frozen=True, slots=True)
class Heads:
    """What the attention of one rank is asked to do: heads of queries and of keys, and the width of a head.

    `causal`: tokens see those before them; `window` of them at most (0: all).
    """

    queries: int
    keys: int
    width: int
    causal: bool
    window: int = 0


def write_unfused_attention(graph: Graph, query: Ref, key: Ref, value: Ref, heads: Heads, shard: Shard) -> Ref:
    """Attention whose scores are written out: two batched GEMMs around a softmax, which masks and scales."""
    builder, stack, local, width = graph.builder, shard.batch * heads.queries, shard.local_seq, heads.width
    scores = graph.new(stack, local, local)
    turned = builder.add_view(key, (stack, width, local), (local * width, 1, width))
    graph.scope("aten::matmul")
    _write_batched_gemm(graph, (query, builder.add_view(query, (stack, local, width))), (key, turned), (scores, scores))
    # Megatron's kernel takes four matrices at a time; otherwise it falls back to ops of PyTorch
    by_ops = graph.style.fused and stack % _MATRICES_AT_ONCE > 0
    shares = _write_softmax_by_ops(graph, scores) if by_ops else _write_softmax(graph, scores, causal=heads.causal)
    graph.drop(scores)
    kept = write_dropout(graph, shares) if graph.style.dropout else shares
    result = graph.new(shard.tokens, heads.queries * width)
    mixed = builder.add_view(result, (stack, local, width))
    graph.scope("aten::matmul")
    _write_batched_gemm(graph, (kept, kept), (value, builder.add_view(value, (stack, local, width))), (result, mixed))
    graph.drop(kept)
    return result


def write_attention_by_ops(graph: Graph, query: Ref, key: Ref, value: Ref, heads: Heads, shard: Shard) -> Ref:
    """Attention op by op, as PyTorch's models write it: heads copied side by side, two batched GEMMs, between them
    scale, mask, softmax (in fp32 under autocast) and dropout."""
    builder, stack, local, width = graph.builder, shard.batch * heads.queries, shard.local_seq, heads.width
    graph.add_host_ops("aten::transpose", phase=Phase.FORWARD)
    graph.scope("aten::matmul")
    views = ("CloneBackward0", "ExpandBackward0", "UnsafeViewBackward0", *_HEAD_VIEWS)
    left, right, last = (_write_head_copy(graph, ref, (stack, local, width), views) for ref in (query, key, value))
    scores = graph.new(stack, local, local)
    turned = builder.add_view(right, (stack, width, local), (local * width, 1, width))
    _write_batched_gemm(graph, (left, left), (right, turned), (scores, scores))
    graph.drop(left, right)
    scaled = _write_score_op(graph, scores, "mul")
    masked = _write_score_op(graph, scaled, "where" if heads.causal else "add")
    shares = _write_stream_softmax(graph, masked)
    if heads.causal:  # Hugging Face's decoders cast before dropout, its encoders leave that to the product
        shares = _cast_and_drop(graph, shares)
    dropped = write_dropout(graph, shares) if graph.style.dropout else shares
    graph.scope("aten::matmul")
    kept = _cast_and_drop(graph, dropped)
    mixed = graph.new(stack, local, width)
    _write_batched_gemm(graph, (kept, kept), (last, last), (mixed, mixed))
    graph.drop(last, kept)
    graph.scope("aten::contiguous")
    result = _write_head_copy(graph, mixed, (shard.tokens, heads.queries * width), ("CloneBackward0", *_HEAD_VIEWS[:1]))
    graph.drop(mixed)
    return result


def _cast_and_drop(graph: Graph, x: Ref) -> Ref:
    """A tensor in the type of activations, which takes its place."""
    result = graph.cast(x, graph.style.element)
    if result is not x:
        graph.drop(x)
    return result


def _write_head_copy(graph: Graph, x: Ref, shape: tuple[int, ...], views: Sequence[str] = ()) -> Ref:
    """The elements in another order, and their gradients back in the first, through the nodes `views`, which launch
    nothing."""

    def write(source: Ref | None, form: tuple[int, ...]) -> Ref:
        assert source is not None
        result = graph.new(*form, dtype=source.spec.dtype)
        graph.fused([source], [result])
        return result

    before = x.shape
    result = write(x, shape)

    def backward(grads: Gradients) -> Gradients:
        below = write(grads[0], before)
        graph.add_host_ops(*views)
        return [below]

    graph.node("ViewBackward0", [x], [result], [], backward)
    return result


def _write_score_op(graph: Graph, x: Ref, name: str) -> Ref:
    """Scores scaled or masked, in a kernel of their own; so are their gradients, but for a mask that was added, whose
    sum has the type of the residual stream."""

    def write(source: Ref | None) -> Ref:
        assert source is not None
        result = graph.new(*x.shape, dtype=graph.style.stream if name == "add" else x.spec.dtype)
        arguments = [("self", source)]
        if name == "where":
            arguments = [("condition", mask), ("self", source), ("other", lowest)]
        graph.op(f"aten::{name}", arguments, [result])
        return result

    graph.scope(f"aten::{name}")
    mask = graph.builder.add_resident_tensor((1, *x.shape[1:]), StorageKind.BUFFER, "bool")
    lowest = graph.builder.add_resident_tensor((), StorageKind.BUFFER, x.spec.dtype)
    result = write(x)

    def backward(grads: Gradients) -> Gradients:
        return [graph.copy_as(grads[0], x.spec.dtype) if name == "add" else write(grads[0])]

    graph.node(f"{name.capitalize()}Backward0", [x], [result], [], backward)
    graph.drop(x)
    return result


def _write_stream_softmax(graph: Graph, scores: Ref) -> Ref:
    """A softmax in the type of the residual stream, and back."""
    graph.scope("aten::softmax")
    wide = graph.cast(scores, graph.style.stream)
    shares = graph.new(*wide.shape, dtype=wide.spec.dtype)
    graph.op("aten::_softmax", [("self", wide)], [shares], [("dim", -1), ("half_to_float", False)])

    def backward(grads: Gradients) -> Gradients:
        (grad,) = grads
        assert grad is not None
        below = graph.new(*wide.shape, dtype=wide.spec.dtype)
        arguments = [("grad_output", grad), ("output", shares)]
        graph.op("aten::_softmax_backward_data", arguments, [below], [("dim", -1)])
        return [below]

    graph.node("SoftmaxBackward0", [wide], [shares], [shares], backward)
    graph.drop(*{ref.storage: ref for ref in (scores, wide)}.values())
    return shares


def _write_softmax(graph: Graph, scores: Ref, *, causal: bool) -> Ref:
    """One kernel each way."""
    builder, (stack, local, columns) = graph.builder, scores.shape
    graph.scope("aten::softmax")
    shares = graph.new(stack, local, columns)
    # Megatron's fused softmax reads and writes no more than what the mask leaves: half of each matrix
    kept_columns = max(1, columns // 2) if causal and graph.style.fused else columns
    seen, written = (builder.add_view(ref, (stack, local, kept_columns)) for ref in (scores, shares))
    graph.op("aten::_softmax", [("self", seen)], [written], [("dim", -1), ("half_to_float", False)])

    def backward(grads: Gradients) -> Gradients:
        (grad,) = grads
        assert grad is not None
        below = graph.new(stack, local, columns)
        arguments = [("grad_output", builder.add_view(grad, written.shape)), ("output", written)]
        graph.op("aten::_masked_softmax_backward", arguments, [builder.add_view(below, written.shape)], [("dim", -1)])
        return [below]

    graph.node("SoftmaxBackward0", [scores], [shares], [shares], backward)
    return shares


def _write_softmax_by_ops(graph: Graph, scores: Ref) -> Ref:
    """Scores to fp32, masked, their softmax, and back to 16 bits: a kernel for each, and for each one backward."""
    shape, element = scores.shape, graph.style.element
    wide, masked, exact = (graph.new(*shape, dtype="float32") for _ in range(3))
    shares = graph.new(*shape)

    def cast(source: Ref, target: Ref) -> None:
        graph.op("aten::_to_copy", [("self", source)], [target], [("dtype", target.spec.dtype)])

    graph.scope("aten::to")
    cast(scores, wide)
    graph.scope("aten::masked_fill_")
    graph.fused([wide], [masked])
    graph.scope("aten::softmax")
    graph.op("aten::_softmax", [("self", masked)], [exact], [("dim", -1), ("half_to_float", False)])
    graph.scope("aten::to")
    cast(exact, shares)
    graph.drop(wide, masked)

    def backward(grads: Gradients) -> Gradients:
        (grad,) = grads
        assert grad is not None
        raised, through, unmasked = (graph.new(*shape, dtype="float32") for _ in range(3))
        below = graph.new(*shape, dtype=element)
        cast(grad, raised)
        graph.op("aten::_softmax_backward_data", [("grad_output", raised), ("output", exact)], [through], [("dim", -1)])
        graph.fused([through], [unmasked])
        cast(unmasked, below)
        graph.drop(raised, through, unmasked)
        return [below]

    graph.node("SoftmaxBackward0", [scores], [shares], [exact], backward)
    graph.drop(exact)
    return shares


def _write_batched_gemm(graph: Graph, left: tuple[Ref, Ref], right: tuple[Ref, Ref], result: tuple[Ref, Ref]) -> None:
    """A batched product of tensors, each given as it is and as a stack of matrices; two more of them backward."""
    builder, (a, b, c) = graph.builder, (left[1], right[1], result[1])
    (stack, rows, depth), columns = a.shape, b.shape[-1]
    variant = graph.variant(BATCHED if graph.style.fused else "")
    graph.op("aten::bmm", [("self", a), ("mat2", b)], [c], variant)

    def backward(grads: Gradients) -> Gradients:
        (grad,) = grads
        assert grad is not None
        outer = builder.add_view(grad, (stack, rows, columns))
        first, second = graph.new(*left[0].shape), graph.new(*right[0].shape)
        b_turned = builder.add_view(b, (stack, columns, depth), (depth * columns, 1, columns))
        a_turned = builder.add_view(a, (stack, depth, rows), (rows * depth, 1, depth))
        graph.op(
            "aten::bmm", [("self", outer), ("mat2", b_turned)], [builder.add_view(first, (stack, rows, depth))], variant
        )
        graph.op(
            "aten::bmm",
            [("self", a_turned), ("mat2", outer)],
            [builder.add_view(second, (stack, depth, columns))],
            variant,
        )
        graph.add_host_ops("UnsafeViewBackward0", "ViewBackward0")
        return [first, second]

    graph.node("BmmBackward0", [left[0], right[0]], [result[0]], [left[0], right[0]], backward)


_HEAD_VIEWS = ("TransposeBackward0", "ViewBackward0")  # nodes of a tensor's view as heads
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
    graph.add_host_ops(*3 * ("aten::view", "aten::transpose"), phase=Phase.FORWARD)
    mixed = _write_scores_and_values(graph, query, key, value, heads, shard)
    graph.add_host_ops("aten::transpose", "aten::view", phase=Phase.FORWARD)
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
    graph.add_host_ops("aten::split", phase=Phase.FORWARD)
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
    if not shard.by_heads:
        mixed = write(graph, query, key, value, heads, shard)
        graph.drop(query, key, value)
        return mixed
    whole = replace(shard, cp=1, by_heads=False)
    mine = replace(heads, queries=heads.queries // shard.cp, keys=heads.keys // shard.cp)
    query, key, value = _swap_tokens_for_heads(graph, (query, key, value), shard.cp)
    mixed = write(graph, query, key, value, mine, whole)
    graph.drop(query, key, value)
    (result,) = _swap_tokens_for_heads(graph, (mixed,), 1 / shard.cp)
    return result


def _swap_tokens_for_heads(graph: Graph, refs: Sequence[Ref], times: float) -> list[Ref]:
    """Tensors with `times` as many tokens and as many times fewer heads: copied side by side for each rank, sent, and
    put in the order of tokens (Transformer Engine's all-to-all between ranks of a sample). Their gradients go back."""

    def move(sources: Sequence[Ref], share: float) -> list[Ref]:
        packed = [graph.new(*source.shape) for source in sources]
        for source, copy in zip(sources, packed, strict=True):
            graph.fused([source], [copy])
        if graph.groups.cp is not None:
            nbytes = sum(float(copy.spec.nbytes) for copy in packed)
            graph.collective("all_to_all", graph.groups.cp, nbytes, packed[0])
        moved = [graph.new(round(copy.shape[0] * share), round(copy.shape[1] / share)) for copy in packed]
        for copy, result in zip(packed, moved, strict=True):
            graph.fused([copy], [result])
        graph.drop(*packed)
        return moved

    results = move(refs, times)

    def backward(grads: Gradients) -> Gradients:
        return move([grad for grad in grads if grad is not None], 1 / times)

    graph.node("AllToAllBackward", list(refs), results, [], backward)
    graph.drop(*refs)
    return results


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
    or gathered before, as for windows, which no ring is written for. Backward, `gradients` travel with them."""

    def __init__(self, graph: Graph, key: Ref, value: Ref, blocks: int, parts: int, *, gradients: bool = False) -> None:
        self.graph, self.key, self.left, self.event = graph, key, blocks - 1, -1
        self.nbytes = (2 if gradients else 1) * float(key.spec.nbytes + value.spec.nbytes)
        groups = graph.groups
        if groups.cp is not None and parts > 1 and (groups.cp_gather or blocks == 1):
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
    ring = _Ring(graph, key, value, len(blocks), shard.cp)
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
        ring = _Ring(graph, key, value, len(blocks), shard.cp, gradients=True)
        for keys, values, causal in blocks:
            ring.begin()
            arguments = [("grad_out", outer), ("query", queries), ("key", keys), ("value", values)]
            arguments += [("out", shaped), ("logsumexp", sums)]
            shapes = [
                builder.add_view(ref, form.shape) for ref, form in zip(below, (queries, keys, values), strict=True)
            ]
            graph.op("aten::_flash_attention_backward", arguments, shapes, [("is_causal", causal), *variant])
            ring.wait()
        graph.add_host_ops(*4 * _HEAD_VIEWS)
        return below

    saved = [query, key, value, result, sums]
    graph.node("ScaledDotProductFlashAttentionBackward0", [query, key, value], [result], saved, backward)
    graph.drop(sums)
    return result
