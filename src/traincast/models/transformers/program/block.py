"""Whole layers, and what stands before the first and after the last."""

from __future__ import annotations

from traincast.ir.ops import StorageKind
from traincast.models.layers.builder import Ref
from traincast.models.transformers.description import Transformer
from traincast.models.transformers.program.attention import write_attention
from traincast.models.transformers.program.communication import Region, write_collective
from traincast.models.transformers.program.experts import write_feed_forward, write_mixture_of_experts
from traincast.models.transformers.program.gemms import write_linear
from traincast.models.transformers.program.graph import Gradients, Graph
from traincast.models.transformers.program.parts import write_dropout, write_norm, write_residual_add
from traincast.models.transformers.program.style import Shard


def write_layer(
    graph: Graph, x: Ref, model: Transformer, shard: Shard, *, experts: bool, window: int = 0, causal: bool = True,
    crossed: bool = False,
) -> Ref:  # fmt: skip
    """One layer, from the residual stream [rows, hidden] to the next; `crossed`: it also attends to an encoder."""
    graph.interleaved = experts and graph.groups.overlap_ep
    for _ in range(2 if crossed else 1):
        graph.module = "attention"
        normed = write_norm(graph, x, model.norm, bias=model.bias)
        inside = gather_tokens(graph, normed, shard, summed=True)
        mixed = write_attention(graph, inside, model, shard, window=window, causal=causal)
        graph.drop(normed)
        x = write_residual_add(graph, x, scatter_tokens(graph, mixed, shard, begun=True))
    graph.module = "router" if experts else "feed_forward"
    normed = write_norm(graph, x, model.norm, bias=model.bias)
    if experts:
        changed = _write_shared_experts(graph, normed, model, shard)
        graph.drop(normed)
        return write_residual_add(graph, x, changed)
    inside = gather_tokens(graph, normed, shard, summed=True)
    changed = write_feed_forward(graph, inside, model, max(1, model.ffn // shard.tp))
    graph.drop(normed)
    return write_residual_add(graph, x, scatter_tokens(graph, changed, shard, begun=True))


def _write_shared_experts(graph: Graph, normed: Ref, model: Transformer, shard: Shard) -> Ref:
    """The mixture of experts; where ranks share single experts, they also share tokens around it."""
    if shard.etp == 1 or graph.groups.tp is None:
        return write_mixture_of_experts(graph, normed, model, shard)
    group, whole = graph.groups.tp, float(shard.tokens * normed.shape[1] * 2)
    ways = [("all_gather", whole)], [("reduce_scatter", whole)]
    inside = graph.communicated(normed, group, *ways, beside=False)
    return graph.communicated(
        write_mixture_of_experts(graph, inside, model, shard), group, *reversed(ways), beside=False
    )


def gather_tokens(graph: Graph, x: Ref, shard: Shard, *, summed: bool = False) -> Ref:
    """All tokens of the micro-batch where each rank held a part: gathered forward, summed and scattered backward.
    Without sequence parallelism every rank has them all, and sums gradients backward. `summed`: `scattered` follows;
    the GEMM before that hides a part of its collective, which therefore begins here."""
    if shard.tp == 1 or graph.groups.tp is None:
        return _write_single_rank_collective(graph, x, shard, shard.tokens, "GatherBackward")
    group, groups = graph.groups.tp, graph.groups
    rows, width = x.shape
    element = x.spec.nbytes // max(1, x.spec.numel)
    whole = float(shard.tokens * width * element)
    if shard.sequence:
        _communicate(graph, "all_gather", _count_bytes_sent(graph, whole), x)
    if summed and groups.overlap_tp == "all":
        graph.begin_until_next(_choose_sum_collective(shard), group, whole * groups.hidden_tp, x)
    result = graph.builder.add_view(x, (shard.tokens, width))
    region = graph.regions[result.tensor] = Region()
    overlaps = groups.overlap_tp != "none" and graph.training
    arrived: list[int] = []

    def regather() -> None:
        region.regather = None
        if overlaps:
            arrived.append(graph.begin("all_gather", group, _count_bytes_sent(graph, whole), x))
        else:
            graph.collective("all_gather", group, _count_bytes_sent(graph, whole), x)

    region.regather = regather if shard.sequence and graph.training else None

    def backward(grads: Gradients) -> Gradients:
        (grad,) = grads
        assert grad is not None
        kind = _choose_sum_collective(shard)
        if overlaps:
            graph.settle()
            done = graph.begin(kind, group, whole, grad)
            _write_weights(graph, region, arrived)
            graph.builder.wait_for_event(done)
        else:
            _write_weights(graph, region, arrived)
            graph.collective(kind, group, whole, grad)
        return [graph.builder.add_view(grad, (rows, width))]

    graph.node("GatherBackward", [x], [result], [], backward)
    return result


def _write_weights(graph: Graph, region: Region, arrived: list[int]) -> None:
    """The gradients of a region's weights, once its input has been gathered again."""
    for event in arrived:
        graph.builder.wait_for_event(event)
    arrived.clear()
    for write in region.late:
        write()
    region.late.clear()


def _count_bytes_sent(graph: Graph, nbytes: float) -> float:
    """Bytes of tokens, or of their gradients, that ranks gather: torchao casts both to 8 bits before."""
    return nbytes / 2 if graph.groups.token_bytes == 1 else nbytes


def _choose_sum_collective(shard: Shard) -> str:
    return "reduce_scatter" if shard.sequence else "all_reduce"


def _communicate(graph: Graph, kind: str, nbytes: float, ref: Ref, *, begun: bool = False) -> None:
    """A tensor-parallel collective: kernels wait for it, or where GEMMs run in parts for one part only, the first or
    (`begun`: the others have run beside the GEMM) the last."""
    groups = graph.groups
    assert groups.tp is not None
    if groups.overlap_tp != "all":
        graph.collective(kind, groups.tp, nbytes, ref)
        return
    graph.settle()
    if not begun:
        graph.begin_until_next(kind, groups.tp, nbytes * groups.hidden_tp, ref)
    if groups.hidden_tp < 1:
        write_collective(graph.builder, kind, groups.tp, nbytes * (1 - groups.hidden_tp), ref)


def scatter_tokens(graph: Graph, x: Ref, shard: Shard, *, begun: bool = False) -> Ref:
    """The sum over tensor-parallel ranks: each keeps its own tokens, or (without sequence parallelism) all of them.
    `begun`: `gathered` has begun it."""
    if shard.tp == 1 or graph.groups.tp is None:
        return _write_single_rank_collective(graph, x, shard, shard.rows, "ScatterBackward")
    before, width = x.shape
    whole = float(x.spec.nbytes)
    _communicate(graph, _choose_sum_collective(shard), whole, x, begun=begun)
    result = graph.builder.add_view(x, (shard.rows, width))

    def backward(grads: Gradients) -> Gradients:
        (grad,) = grads
        assert grad is not None
        if shard.sequence:
            _communicate(graph, "all_gather", _count_bytes_sent(graph, whole), grad)
        return [graph.builder.add_view(grad, (before, width))]

    graph.node("ScatterBackward", [x], [result], [], backward)
    return result


def _write_single_rank_collective(graph: Graph, x: Ref, shard: Shard, rows: int, node: str) -> Ref:
    """What a collective makes where nothing is exchanged. Megatron also calls its function where one rank is alone."""
    if shard.sequence and shard.tp > 1:
        return _view_rows(graph, x, rows)
    return _view_rows(graph, x, rows, node) if graph.style.tuned else x


def _view_rows(graph: Graph, x: Ref, rows: int, node: str = "ViewBackward0") -> Ref:
    """The same tensor with another number of rows; ranks keep their own part only."""
    before, width = x.shape
    result = graph.builder.add_view(x, (rows, width))

    def backward(grads: Gradients) -> Gradients:
        (grad,) = grads
        assert grad is not None
        return [graph.builder.add_view(grad, (before, width))]

    graph.node(node, [x], [result], [], backward)
    return result


def write_embedding(graph: Graph, model: Transformer, shard: Shard) -> tuple[Ref, Ref]:
    """The first residual stream, [rows, hidden], and the table it was looked up in (a projection for images)."""
    rows, builder, graph.module = shard.rows, graph.builder, "embedding"
    if model.patch_inputs:
        inputs = graph.given(rows, model.patch_inputs)
        weight = graph.weight(model.hidden, model.patch_inputs)
        return write_linear(graph, inputs, model.hidden, weight=weight), weight
    table = graph.weight(max(1, model.vocab // shard.tp), model.hidden)
    words = builder.add_resident_tensor((shard.tokens,), StorageKind.INPUT, "int64")
    graph.scope("aten::embedding")
    looked_up = graph.new(shard.tokens, model.hidden, dtype=table.spec.dtype)
    graph.op("aten::embedding", [("weight", table), ("indices", words)], [looked_up])

    def backward(grads: Gradients) -> Gradients:
        (grad,) = grads
        assert grad is not None
        if not graph.wants(table):
            return []
        update = graph.new(*table.shape, dtype=table.spec.dtype)
        whole = builder.add_view(grad, (shard.tokens, model.hidden))
        scalars = [("num_weights", table.shape[0]), ("padding_idx", -1), ("scale_grad_by_freq", False)]
        graph.op("aten::embedding_dense_backward", [("grad_output", whole), ("indices", words)], [update], scalars)
        graph.accumulate(table, update)
        return []

    graph.node("EmbeddingBackward0", [], [looked_up], [], backward)
    x = scatter_tokens(graph, looked_up, shard)
    if model.position == "learned":
        x = _add_positions(graph, x, model)
    return (write_dropout(graph, x) if graph.style.dropout else x), table


def _add_positions(graph: Graph, x: Ref, model: Transformer) -> Ref:
    """Learned positions added."""
    table = graph.weight(model.seq_len, model.hidden)
    graph.scope("aten::add")
    total = graph.new(*x.shape, dtype=x.spec.dtype)
    graph.fused([x, table], [total])

    def backward(grads: Gradients) -> Gradients:
        (grad,) = grads
        assert grad is not None
        update = graph.new(*table.shape, dtype=table.spec.dtype)
        graph.fused([grad], [update])
        graph.accumulate(table, update)
        return [grad]

    graph.node("AddBackward0", [x], [total], [], backward)
    graph.drop(x)
    return total


def write_head(graph: Graph, x: Ref, model: Transformer, shard: Shard, *, table: Ref | None = None) -> Ref:
    """The last norm, the projection to words and the loss of every token; `table`: weights shared with the first."""
    graph.module = "head"
    normed = write_norm(graph, x, model.norm, bias=model.bias)
    graph.drop(x)
    whole = gather_tokens(graph, normed, shard)
    if model.patch_inputs:
        whole = _view_rows(graph, whole, shard.batch)
    # Transformer Engine and torchao both leave this product in 16 bits
    logits = write_linear(graph, whole, max(1, model.vocab // shard.tp), weight=table, narrow=False)
    graph.drop(normed)
    return write_cross_entropy(graph, logits)


def write_cross_entropy(graph: Graph, logits: Ref) -> Ref:
    """The mean loss of all rows. Unfused: in fp32, a log-softmax and the picked values; fused: one kernel each way."""
    rows, words = logits.shape
    told = graph.builder.add_resident_tensor((rows,), StorageKind.INPUT, "int64")
    loss = graph.new(1, dtype="float32")
    graph.scope("aten::cross_entropy_loss")
    if graph.style.loss_by_ops:
        return _write_parallel_cross_entropy(graph, logits, told, loss)
    if graph.style.fused:
        shares = graph.new(rows, words, dtype="float32") if graph.style.compiled_loss else logits
        graph.fused([logits, told], [loss, shares] if graph.style.compiled_loss else [loss])
    else:
        wide, shares = graph.copy_as(logits, "float32"), graph.new(rows, words, dtype="float32")
        graph.op("aten::_log_softmax", [("self", wide)], [shares], [("dim", 1), ("half_to_float", False)])
        if wide is not logits:
            graph.drop(wide)
        total = graph.new(1, dtype="float32")
        graph.op("aten::nll_loss_forward", [("self", shares), ("target", told)], [loss, total], [("reduction", 1)])

    def backward(_: Gradients) -> Gradients:
        if graph.style.compiled_loss:
            below = graph.new(rows, words)
            wide = graph.new(rows, words, dtype="float32")
            graph.fused([shares, told], [wide])
            graph.fused([wide], [below])
            graph.drop(wide)
            return [below]
        if graph.style.fused:
            below = graph.new(rows, words)
            graph.fused([logits, told], [below])
            return [below]
        picked, wide = graph.new(rows, words, dtype="float32"), graph.new(rows, words, dtype="float32")
        graph.op("aten::nll_loss_backward", [("grad_output", loss), ("self", shares), ("target", told)], [picked])
        graph.op(
            "aten::_log_softmax_backward_data", [("grad_output", picked), ("output", shares)], [wide], [("dim", 1)]
        )
        graph.drop(picked)
        return [graph.move_as(wide, graph.style.element)]

    graph.node("CrossEntropyBackward0", [logits], [loss], [shares], backward)
    graph.drop(*{ref.storage: ref for ref in (logits, shares)}.values())
    return loss


def _write_parallel_cross_entropy(graph: Graph, logits: Ref, told: Ref, loss: Ref) -> Ref:
    """Megatron's loss over parts of the vocabulary before it was fused: fp32 logits, less their maximum, their
    exponentials, those divided by their sum, each a pass over all of them; backward scales and rounds them."""
    rows, words = logits.shape
    wide, shares = (graph.new(rows, words, dtype="float32") for _ in range(2))
    largest, total = (graph.new(rows, dtype="float32") for _ in range(2))
    graph.op("aten::_to_copy", [("self", logits)], [wide], [("dtype", "float32")])
    graph.fused([wide], [largest])
    graph.fused([wide, largest], [wide])
    graph.fused([wide], [shares])
    graph.fused([shares], [total])
    graph.fused([shares, total, told], [shares, loss])
    graph.drop(wide, largest, total)

    def backward(_: Gradients) -> Gradients:
        below = graph.new(rows, words)
        graph.fused([shares, told], [shares])
        graph.op("aten::_to_copy", [("self", shares)], [below], [("dtype", graph.style.element)])
        return [below]

    graph.node("CrossEntropyBackward0", [logits], [loss], [shares], backward)
    graph.drop(logits, shares)
    return loss
