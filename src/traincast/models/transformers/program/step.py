"""Whole layers, what stands before the first and after the last, and whole training steps of a Transformer on one
GPU."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from traincast.ir.builder import ProgramBuilder
from traincast.ir.ops import Phase, StorageKind
from traincast.ir.program import Program
from traincast.ir.workload import Workload
from traincast.models.layers.builder import Ref, StepBuilder
from traincast.models.layers.optimizers import (
    make_optimizer_state,
    write_foreach_step,
    write_single_tensor_step,
)
from traincast.models.transformers.description import ATTENTION, DENSE, MAMBA, MIXTURE, Transformer
from traincast.models.transformers.program.attention import write_attention
from traincast.models.transformers.program.experts import write_feed_forward, write_mixture_of_experts
from traincast.models.transformers.program.graph import ALONE, Gradients, Graph
from traincast.models.transformers.program.parts import write_dropout, write_linear, write_norm, write_residual_add
from traincast.models.transformers.program.state_space import write_state_space
from traincast.models.transformers.program.style import LayerGroups, Region, Shard, Style, write_collective

_MODULES = {ATTENTION: "attention", MAMBA: "mamba", DENSE: "feed_forward", MIXTURE: "router"}
"""What the modules of a layer are called in a program, by their letters."""


def write_layer(
    graph: Graph, x: Ref, model: Transformer, shard: Shard, *, modules: str, window: int = 0, causal: bool = True,
    crossed: bool = False,
) -> Ref:  # fmt: skip
    """One layer, from the residual stream [rows, hidden] to the next: its `modules` in the letters of
    `Transformer.pattern`, each with a norm before and a sum after it; `crossed`: it also attends to an encoder."""
    graph.interleaved = MIXTURE in modules and graph.groups.overlap_ep
    for module in modules.replace(ATTENTION, 2 * ATTENTION) if crossed else modules:
        graph.module = _MODULES[module]
        normed = write_norm(graph, x, model.norm, bias=model.bias)
        inside = normed if module == MIXTURE else gather_tokens(graph, normed, shard, summed=True)
        if module == MIXTURE:
            changed = _write_shared_experts(graph, normed, model, shard)
        elif module == ATTENTION:
            changed = write_attention(graph, inside, model, shard, window=window, causal=causal)
        elif module == MAMBA:
            changed = write_state_space(graph, inside, model, shard)
        else:
            changed = write_feed_forward(graph, inside, model, max(1, model.ffn // shard.tp))
        graph.drop(normed)
        if module != MIXTURE:
            changed = scatter_tokens(graph, changed, shard, begun=True)
        if model.post_norm:
            result, changed = changed, write_norm(graph, changed, model.norm, bias=model.bias)
            graph.drop(result)
        x = write_residual_add(graph, x, changed)
    return x


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
        if overlaps and graph.style.tuned:  # a compiler fuses no collective with a sum of products
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


@dataclass(frozen=True, eq=False, slots=True)
class LayerBlock:
    """A part of a step on its own: forward and backward, and how many elements of its weights get a gradient. Backward
    begins at op `backward`, gradients of weights that come last at op `late`."""

    program: Program
    trained: int
    backward: int = 0
    late: int = 0


def build_inference_workload(model: Transformer, *, batch_size: int, seq_len: int, style: Style) -> Workload:
    """One forward pass on one GPU: every layer written out. Weights are in the style's type."""
    builder = _make_builder(batch_size, seq_len)
    graph = Graph(builder, style, training=False)
    shard = Shard(batch=batch_size, seq_len=seq_len)
    x, table = write_embedding(graph, model, shard)
    for _ in range(model.encoder_layers):
        x = write_layer(graph, x, model, shard, modules=ATTENTION + DENSE, causal=False)
    for layer in range(model.layers):
        x = write_layer(
            graph, x, model, shard, modules=model.list_modules(layer), window=model.window_of(layer),
            crossed=model.encoder_layers > 0,
        )  # fmt: skip
    write_head(graph, x, model, shard, table=table if model.tied else None)
    return Workload(name=model.name, programs=(builder.build_program(),), mode="inference", meta={"optimizer": ""})


@lru_cache(maxsize=2048)
def build_layer_block(
    model: Transformer, shard: Shard, style: Style, *, modules: str, window: int = 0, encoder: bool = False,
    groups: LayerGroups = ALONE, split: bool = False,
) -> LayerBlock:  # fmt: skip
    """One layer with its backward, as one rank runs it; `groups` and `split` as `Graph` takes them."""
    graph = Graph(_make_builder(shard.batch, shard.seq_len), style, groups=groups, split=split)
    x = graph.given(shard.rows, model.hidden, dtype=style.stream)
    result = write_layer(
        graph, x, model, shard, modules=modules, window=window, causal=not encoder,
        crossed=model.encoder_layers > 0 and not encoder,
    )  # fmt: skip
    return _finish_block(graph, result)


@lru_cache(maxsize=2048)
def build_embedding_block(
    model: Transformer, shard: Shard, style: Style, *, groups: LayerGroups = ALONE, split: bool = False
) -> LayerBlock:
    """What stands before the first layer."""
    graph = Graph(_make_builder(shard.batch, shard.seq_len), style, groups=groups, split=split)
    result, _ = write_embedding(graph, model, shard)
    return _finish_block(graph, result)


@lru_cache(maxsize=2048)
def build_head_block(
    model: Transformer, shard: Shard, style: Style, *, groups: LayerGroups = ALONE, split: bool = False
) -> LayerBlock:
    """What stands after the last layer, with the loss."""
    graph = Graph(_make_builder(shard.batch, shard.seq_len), style, groups=groups, split=split)
    x = graph.given(shard.rows, model.hidden, dtype=style.stream)
    return _finish_block(graph, write_head(graph, x, model, shard))


def build_optimizer_program(elements: int, tensors: int, *, master: bool, optimizer: str = "adam") -> Program:
    """Adam over this many weights in as many tensors; `master`: from fp32 copies into 16-bit weights. `optimizer` as
    `write_update` takes it."""
    builder = _make_builder(1, 0)
    write_update(builder, elements, tensors, dtype="bfloat16" if master else "float32", optimizer=optimizer)
    return builder.build_program()


def write_update(
    builder: StepBuilder, elements: int, tensors: int, *, dtype: str, optimizer: str, norm: bool = False
) -> None:
    """Adam over this many weights of a type: one kernel for all ("adam"), PyTorch's lists of tensors ("adam-foreach")
    or each tensor by ops of its own ("adam-loop"); `norm`: after the norm of all gradients."""
    each = max(1, elements // max(1, tensors))
    weights = [builder.add_resident_tensor((each,), StorageKind.PARAMETER, dtype) for _ in range(tensors)]
    gradients = [builder.add_resident_tensor((each,), StorageKind.GRADIENT, "float32") for _ in range(tensors)]
    if norm:
        builder.add_op("inductor::fused", [("inputs", gradients)], [builder.add_tensor((1,))], module="optimizer")
    if optimizer == "adam":
        write_adam(builder, weights, gradients)
        return
    write = write_single_tensor_step if optimizer == "adam-loop" else write_foreach_step
    write(builder, "adam", make_optimizer_state(builder, "adam", weights), gradients)


def _make_builder(batch: int, seq_len: int) -> StepBuilder:
    return StepBuilder(batch, target=ProgramBuilder(batch_size=batch, seq_len=seq_len))


def _finish_block(graph: Graph, result: Ref) -> LayerBlock:
    graph.settle()
    backward = graph.builder.target.num_ops
    graph.run_backward(result, graph.given(*result.shape, dtype=result.spec.dtype))
    late = graph.write_late()
    return LayerBlock(graph.builder.build_program(), sum(ref.spec.numel for ref in graph.weights), backward, late)


def write_adam(builder: StepBuilder, weights: list[Ref], gradients: list[Ref]) -> None:
    """One fused Adam over all weights; 16-bit ones are written from the fp32 copies that it updates."""
    state = StorageKind.OPTIMIZER_STATE
    exact = [
        ref if ref.spec.dtype == "float32" else builder.add_resident_tensor(ref.shape, state) for ref in weights
    ]  # fmt: skip
    moments = [[builder.add_resident_tensor(ref.shape, state) for ref in weights] for _ in range(2)]
    builder.open_scope("Optimizer.step#AdamW.step", Phase.OPTIMIZER)
    lists = [("self", exact), ("grads", gradients), ("exp_avgs", moments[0]), ("exp_avg_sqs", moments[1])]
    builder.add_op("aten::_fused_adamw_", lists, [])
    rounded = [(narrow, wide) for narrow, wide in zip(weights, exact, strict=True) if narrow is not wide]
    if rounded:
        narrow, wide = [pair[0] for pair in rounded], [pair[1] for pair in rounded]
        builder.add_op("aten::_foreach_copy_", [("self", narrow), ("src", wide)], [])
