"""Whole training steps of a Transformer on one GPU, and single layers for those who put steps together themselves."""

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
from traincast.models.transformers.description import Transformer
from traincast.models.transformers.program.block import write_embedding, write_head, write_layer
from traincast.models.transformers.program.communication import LayerGroups
from traincast.models.transformers.program.graph import ALONE, Graph
from traincast.models.transformers.program.style import Shard, Style


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
        x = write_layer(graph, x, model, shard, experts=False, causal=False)
    for layer in range(model.layers):
        x = write_layer(
            graph, x, model, shard, experts=model.has_experts(layer), window=model.window_of(layer),
            crossed=model.encoder_layers > 0,
        )  # fmt: skip
    write_head(graph, x, model, shard, table=table if model.tied else None)
    return Workload(name=model.name, programs=(builder.build_program(),), mode="inference", meta={"optimizer": ""})


@lru_cache(maxsize=2048)
def build_layer_block(
    model: Transformer, shard: Shard, style: Style, *, experts: bool, window: int = 0, encoder: bool = False,
    groups: LayerGroups = ALONE, split: bool = False,
) -> LayerBlock:  # fmt: skip
    """One layer with its backward, as one rank runs it; `groups` and `split` as `Graph` takes them."""
    graph = Graph(_make_builder(shard.batch, shard.seq_len), style, groups=groups, split=split)
    x = graph.given(shard.rows, model.hidden, dtype=style.stream)
    result = write_layer(
        graph, x, model, shard, experts=experts, window=window, causal=not encoder,
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
