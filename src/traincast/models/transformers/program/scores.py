"""Attention whose scores are written out: by a vendor's fused softmax, or op by op as PyTorch's models have it."""

from __future__ import annotations

from dataclasses import dataclass

from traincast.ir.ops import StorageKind
from traincast.ir.variants import BATCHED
from traincast.models.layers.builder import Ref
from traincast.models.transformers.program.graph import Gradients, Graph
from traincast.models.transformers.program.parts import write_dropout
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
    _write_batched_gemm(graph, (query, builder.add_view(query, (stack, local, width))), (key, turned), (scores, scores))
    # Megatron's kernel takes four matrices at a time; otherwise it falls back to ops of PyTorch
    by_ops = graph.style.fused and stack % _MATRICES_AT_ONCE > 0
    shares = _write_softmax_by_ops(graph, scores) if by_ops else _write_softmax(graph, scores, causal=heads.causal)
    graph.drop(scores)
    kept = write_dropout(graph, shares) if graph.style.dropout else shares
    result = graph.new(shard.tokens, heads.queries * width)
    mixed = builder.add_view(result, (stack, local, width))
    _write_batched_gemm(graph, (kept, kept), (value, builder.add_view(value, (stack, local, width))), (result, mixed))
    graph.drop(kept)
    return result


def write_attention_by_ops(graph: Graph, query: Ref, key: Ref, value: Ref, heads: Heads, shard: Shard) -> Ref:
    """Attention op by op, as PyTorch's models write it: heads copied side by side, two batched GEMMs, between them
    scale, mask, softmax (in fp32 under autocast) and dropout."""
    builder, stack, local, width = graph.builder, shard.batch * heads.queries, shard.local_seq, heads.width
    graph.scope("aten::matmul")
    left, right, last = (_write_head_copy(graph, ref, (stack, local, width)) for ref in (query, key, value))
    scores = graph.new(stack, local, local)
    turned = builder.add_view(right, (stack, width, local), (local * width, 1, width))
    _write_batched_gemm(graph, (left, left), (right, turned), (scores, scores))
    graph.drop(left, right)
    scaled = _write_score_op(graph, scores, "mul")
    masked = _write_score_op(graph, scaled, "where" if heads.causal else "add")
    shares = _write_stream_softmax(graph, masked)
    kept = write_dropout(graph, shares) if graph.style.dropout else shares
    mixed = graph.new(stack, local, width)
    _write_batched_gemm(graph, (kept, kept), (last, last), (mixed, mixed))
    graph.drop(kept, last)
    result = _write_head_copy(graph, mixed, (shard.tokens, heads.queries * width))
    graph.drop(mixed)
    return result


def _write_head_copy(graph: Graph, x: Ref, shape: tuple[int, ...]) -> Ref:
    """The elements in another order, and their gradients back in the first."""

    def write(source: Ref | None, form: tuple[int, ...]) -> Ref:
        assert source is not None
        result = graph.new(*form, dtype=source.spec.dtype)
        graph.fused([source], [result])
        return result

    before = x.shape
    result = write(x, shape)
    graph.node("CloneBackward0", [x], [result], [], lambda grads: [write(grads[0], before)])
    return result


def _write_score_op(graph: Graph, x: Ref, name: str) -> Ref:
    """Scores scaled or masked, in a kernel of their own; so are their gradients, but for a mask that was added."""

    def write(source: Ref | None) -> Ref:
        assert source is not None
        result = graph.new(*x.shape, dtype=x.spec.dtype)
        arguments = [("self", source)]
        if name == "where":
            arguments = [("condition", mask), ("self", source), ("other", lowest)]
        graph.op(f"aten::{name}", arguments, [result])
        return result

    graph.scope(f"aten::{name}")
    mask = graph.builder.add_resident_tensor((1, *x.shape[1:]), StorageKind.BUFFER, "bool")
    lowest = graph.builder.add_resident_tensor((), StorageKind.BUFFER, x.spec.dtype)
    result = write(x)
    graph.node(f"{name.capitalize()}Backward0", [x], [result], [], lambda g: [g[0] if name == "add" else write(g[0])])
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
    graph.drop(*({ref.storage: ref for ref in (scores, wide)}.values()))
    return graph.cast(shares, graph.style.element)


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
    graph.scope("aten::matmul")
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
        return [first, second]

    graph.node("BmmBackward0", [left[0], right[0]], [result[0]], [left[0], right[0]], backward)
