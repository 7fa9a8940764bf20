"""State-space layers (Mamba-2) forward and backward: a projection, a short convolution over tokens, the scan by chunks
of tokens as mamba-ssm's kernels run it, a gated norm, and the projection back.

Inside a chunk the scan is attention without a softmax; between chunks a state for every head is handed on.
"""

from __future__ import annotations

from dataclasses import dataclass

from traincast.models.layers.builder import Ref
from traincast.models.transformers.description import StateSpace, Transformer
from traincast.models.transformers.program.graph import Gradients, Graph
from traincast.models.transformers.program.parts import write_linear
from traincast.models.transformers.program.style import Shard


@dataclass(frozen=True, slots=True)
class _Scan:
    """What one rank scans: heads and groups of them, elements of a head, numbers of a state, tokens of a chunk, and
    chunks of all samples together."""

    heads: int
    groups: int
    width: int
    state: int
    chunk: int
    chunks: int

    @property
    def inner(self) -> int:
        return self.heads * self.width

    @property
    def mixed(self) -> int:
        return self.inner + 2 * self.groups * self.state


def write_state_space(graph: Graph, x: Ref, model: Transformer, shard: Shard) -> Ref:
    """From the normalised input, [tokens, hidden], to what is added to the residual stream."""
    m = model.mamba
    assert m is not None
    scan = _make_scan(m, shard)
    tokens = x.shape[0]
    gate, mixed, steps = _split(graph, write_linear(graph, x, scan.inner + scan.mixed + scan.heads), scan)
    spread = _exchange_heads(graph, _write_convolution(graph, mixed, m.conv), forth=True)
    scanned = _exchange_heads(graph, _write_scan(graph, spread, steps, scan), forth=False)
    normed = _write_gated_norm(graph, scanned, gate, tokens)
    result = write_linear(graph, normed, model.hidden)
    graph.drop(normed)
    return result


def _make_scan(m: StateSpace, shard: Shard) -> _Scan:
    """Ranks of a sample's parts exchange heads for tokens: what each scans is as large as if they did not."""
    chunk = min(m.chunk, shard.local_seq)
    return _Scan(
        heads=max(1, m.heads // shard.tp),
        groups=max(1, m.groups // shard.tp),
        width=m.head_dim,
        state=m.state,
        chunk=chunk,
        chunks=max(1, shard.tokens // chunk),
    )


def _split(graph: Graph, joined: Ref, scan: _Scan) -> tuple[Ref, Ref, Ref]:
    """Gate, what the convolution reads, and step sizes as columns of one product; backward puts them together."""
    rows, whole = joined.shape
    widths = (scan.inner, scan.mixed, scan.heads)
    gate, mixed, steps = (graph.builder.add_view(joined, (rows, width), (whole, 1)) for width in widths)

    def backward(grads: Gradients) -> Gradients:
        together = graph.new(rows, whole)
        graph.fused([grad for grad in grads if grad is not None], [together])
        return [together]

    graph.node("SplitWithSizesBackward0", [joined], [gate, mixed, steps], [], backward)
    return gate, mixed, steps


def _exchange_heads(graph: Graph, x: Ref, *, forth: bool) -> Ref:
    """Under context parallelism a rank scans all tokens of some heads: an all-to-all before and one after."""
    group = graph.groups.cp
    if group is None:
        return x
    ways = [("all_to_all", float(x.spec.nbytes))]
    return graph.communicated(x, group, ways, ways, beside=False)


def _write_convolution(graph: Graph, x: Ref, taps: int) -> Ref:
    """A convolution over the last `taps` tokens of each column, with its SiLU: one kernel each way."""
    shape = x.shape
    weight = graph.weight(shape[1], taps)
    graph.scope("CausalConv1dFnBackward")
    result = graph.new(*shape)
    graph.fused([x, weight], [result])

    def backward(grads: Gradients) -> Gradients:
        (grad,) = grads
        assert grad is not None
        below, update = graph.new(*shape), graph.new(shape[1], taps, dtype=weight.spec.dtype)
        graph.fused([grad, x, weight], [below, update])
        graph.accumulate(weight, update)
        return [below]

    graph.node("CausalConv1dFnBackward", [x], [result], [x], backward)
    graph.drop(x)
    return result


def _write_scan(graph: Graph, x: Ref, steps: Ref, scan: _Scan) -> Ref:
    """The scan: states of chunks, handed on from chunk to chunk, and what tokens read from their own chunk and from the
    state before it. Backward makes states and scores anew, and has two products for each of forward's."""
    each, half = scan.chunks * scan.heads, scan.chunk // 2  # of a chunk is masked

    def prepare() -> list[Ref]:
        decays = graph.new(*steps.shape, dtype="float32")
        graph.fused([steps], [decays])
        states = _multiply(graph, x, each, scan.width, scan.chunk, scan.state)
        graph.fused([states], [states])  # handed on: each becomes the one that its chunk begins with
        return [decays, states, _multiply(graph, x, scan.chunks * scan.groups, scan.chunk, scan.state, scan.chunk)]

    graph.scope("MambaChunkScanCombinedFn")
    made = prepare()
    result = graph.new(x.shape[0], scan.inner)
    _multiply(graph, x, each, scan.chunk, half + scan.state, scan.width, into=result)  # two products in one kernel
    graph.drop(*made)

    def backward(grads: Gradients) -> Gradients:
        (grad,) = grads
        assert grad is not None
        made = prepare()
        below, of_steps = graph.new(*x.shape), graph.new(*steps.shape)
        states = _multiply(graph, grad, each, scan.width, scan.chunk, scan.state)
        graph.fused([states], [states])
        _multiply(graph, grad, each, scan.chunk, half + scan.state, scan.width, into=below)  # of inputs
        for depth, columns in ((scan.width, scan.state), (scan.width, scan.state), (scan.width, half)):
            graph.drop(_multiply(graph, grad, each, scan.chunk, depth, columns))  # of both matrices, and of scores
        for _ in range(2):  # of both matrices, from scores
            graph.drop(_multiply(graph, x, scan.chunks * scan.groups, scan.chunk, scan.chunk, scan.state))
        graph.fused(made[:1], [of_steps])
        graph.drop(states, *made)
        return [below, of_steps]

    graph.node("MambaChunkScanCombinedFnBackward", [x, steps], [result], [x, steps], backward)
    graph.drop(x, steps)
    return result


def _multiply(
    graph: Graph, of: Ref, batch: int, rows: int, depth: int, columns: int, *, into: Ref | None = None
) -> Ref:
    """A product for each chunk and head, or group of them, whose operands are parts `of` a tensor that is there; its
    result is a part of another where that is given."""
    operands = ((batch, rows, depth), (batch, depth, columns))
    left, right = (graph.builder.add_view(of, shape, (0, shape[2], 1)) for shape in operands)
    made = graph.new(batch, rows, columns) if into is None else into
    graph.op("aten::bmm", [("self", left), ("mat2", right)], [graph.builder.add_view(made, (batch, rows, columns))])
    return made


def _write_gated_norm(graph: Graph, x: Ref, gate: Ref, tokens: int) -> Ref:
    """RMSNorm of the product with the gate's SiLU, as one kernel each way."""
    shape = (tokens, x.shape[1])
    weight = graph.weight(shape[1])
    graph.scope("LayerNormFn")
    result = graph.new(*shape)
    graph.fused([x, gate, weight], [result])

    def backward(grads: Gradients) -> Gradients:
        (grad,) = grads
        assert grad is not None
        below, to_gate, update = graph.new(*shape), graph.new(*shape), graph.new(shape[1], dtype=weight.spec.dtype)
        graph.fused([grad, x, gate, weight], [below, to_gate, update])
        graph.accumulate(weight, update)
        return [below, to_gate]

    graph.node("LayerNormFnBackward", [x, gate], [result], [x, gate], backward)
    graph.drop(x, gate)
    return result
