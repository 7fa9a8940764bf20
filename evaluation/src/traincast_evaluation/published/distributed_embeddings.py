"""A step of distributed-embeddings' synthetic models, rank by rank as TensorFlow and Horovod run its published code.

Every input is looked up by an op of its own. Its gradient is repeated for every lookup; the gradients of all inputs of
a table are made unique, summed and applied by Adagrad, table by table. Ops are issued by TensorFlow's executor: one
thread of C++, like autograd's. The loss is averaged over ranks at the end of every step, which the host waits for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import ceil
from typing import Any

from traincast.ir.builder import share_templates
from traincast.ir.ops import Phase, StorageKind
from traincast.ir.program import Program
from traincast.ir.workload import Workload
from traincast.models.embeddings import Pooling, Table
from traincast.models.embeddings.table import Part, compute_part_load, count_hottest_row_lookups
from traincast.models.layers.builder import RankBuilder, Ref, Scalars
from traincast.utils.errors import TraincastError
from traincast_evaluation.published.distributed_embeddings_tables import EqualTables, Slice, place_slices
from traincast_evaluation.published.fused_layers import FusedMlp, FusedStep
from traincast_evaluation.published.run import Run, count_mlp_parameters


def write(sizes: Mapping[str, Any], run: Run) -> Workload:
    """One training step. Of `sizes`, `groups` are equal tables, `mlp` layer outputs (a last one of width 1 follows);
    `interact_stride` is that of the pooling that stands for an interaction (0: plain concatenation)."""
    placed = place_slices(_group_tables(sizes), run.gpus)
    if not all(placed):
        pieces = sum(len(held) for held in placed)
        raise TraincastError(
            f"distributed-embeddings deals out {pieces} pieces of tables, too few for {run.gpus} GPUs; give fewer GPUs"
        )
    columns = [[table.dim for part in held for table in part.inputs()] for held in placed]
    keys: dict[tuple[object, ...], int] = {}
    forms = [tuple((part.rows, part.dim, part.hotness) for part in held) for held in placed]
    ranks = tuple(keys.setdefault(form, len(keys)) for form in forms)
    programs = []
    for number in range(len(keys)):
        rank = ranks.index(number)
        builder = RankBuilder(run.global_batch // run.gpus, rank, run.gpus, run.gpus)
        programs.append(_Step(builder, sizes, placed[rank], columns).program())
    return Workload(
        name="distributed-embeddings",
        programs=tuple(share_templates(programs)),
        ranks=ranks,
        mode="training",
        synchronised=True,
    )


def parameters(sizes: Mapping[str, Any]) -> int:
    """Parameters of the whole model."""
    groups = _group_tables(sizes)
    width = sum(group.tables * group.dim * len(group.hotness) for group in groups)
    stride, dense = sizes["interact_stride"], sizes["dense_features"]
    joined = (ceil(width / stride) if stride else width) + dense
    return sum(group.tables * group.rows * group.dim for group in groups) + count_mlp_parameters(
        (joined, *sizes["mlp"], 1)
    )


def _group_tables(sizes: Mapping[str, Any]) -> list[EqualTables]:
    return [EqualTables(row["tables"], row["rows"], row["dim"], tuple(row["lookups"])) for row in sizes["groups"]]


@cache
def _load(table: Table, samples: int) -> Scalars:
    """What the lookups of a batch in a table ask of caches and memory."""
    load = tuple(int(value) for value in compute_part_load(Part(table, table.dim), samples).round())
    return [("load", load), ("longest_bag", int(table.pooling.mean)), ("total_rows", table.rows)]


@cache
def _count_repeated_rows(table: Table, samples: int) -> tuple[int, int]:
    """How many different rows a batch wants, and how often it wants the one it wants most."""
    return max(1, round(table.count_unique_rows(samples))), round(count_hottest_row_lookups(table, samples))


@dataclass(frozen=True, slots=True)
class _Variable:
    """A table on this rank with what reads it."""

    inputs: list[Table]
    weights: Ref
    accumulator: Ref


class _Step(FusedStep):
    """One rank's step in the order it runs."""

    def __init__(
        self, builder: RankBuilder, sizes: Mapping[str, Any], held: Sequence[Slice], columns: Sequence[Sequence[int]]
    ) -> None:
        super().__init__(builder, "float32", batch=builder.batch_size)
        self.stride, self.dense_features = sizes["interact_stride"], sizes["dense_features"]
        self.columns = columns
        self.whole = self.local * builder.world_size
        self.widths = [width for rank in columns for width in rank]
        self.held = [
            _Variable(
                part.inputs(),
                builder.add_resident_tensor((part.rows, part.dim), StorageKind.PARAMETER),
                builder.add_resident_tensor((part.rows, part.dim), StorageKind.OPTIMIZER_STATE),
            )
            for part in held
        ]
        width = sum(self.widths)
        self.joined_width = (ceil(width / self.stride) if self.stride else width) + self.dense_features
        self.dense = self.mlp((self.joined_width, *sizes["mlp"], 1))

    def program(self) -> Program:
        """Everything."""
        self._executor("aten::ones")
        pooled = [self._look_up(table, variable.weights) for variable in self.held for table in variable.inputs]
        received = self._exchange(self._concatenated(pooled), forward=True)
        self._forward_dense(received)
        grad = self._backward_dense()
        self._update(self._exchange(grad, forward=False))
        self._apply_dense()
        self._average_loss()
        return self.builder.build_program()

    def _average_loss(self) -> None:
        builder = self.builder
        if builder.world_size == 1:
            return
        self._executor("HorovodAllreduce")
        loss = builder.add_resident_tensor((1,), StorageKind.BUFFER)
        builder.wait_for_event(builder.add_all_reduce(builder.world, loss))

    def _executor(self, name: str) -> None:
        """The next op, issued by the executor's thread."""
        self.builder.open_engine_scope(name, Phase.FORWARD)

    def _look_up(self, table: Table, weights: Ref) -> Ref:
        """The rows of one input, summed over its lookups: [samples of all ranks, dim]."""
        builder = self.builder
        indices = builder.add_resident_tensor((self.whole * int(table.pooling.mean),), StorageKind.INPUT, "int64")
        self._executor("tensorflow::EmbeddingLookup")
        result = builder.add_tensor((self.whole, 1, table.dim))
        arguments = [("weights", weights), ("indices", indices)]
        self.op("traincast::batched_embedding_forward", arguments, result, _load(table, self.whole))
        return builder.add_view(result, (self.whole, table.dim))

    def _concatenated(self, parts: Sequence[Ref]) -> Ref:
        self._executor("tensorflow::ConcatV2")
        joined = self.builder.add_tensor((sum(part.spec.numel for part in parts),))
        lines = [self.builder.add_view(part, (part.spec.numel,)) for part in parts]
        self.builder.add_op("aten::cat", [("tensors", lines)], [joined], [("dim", 0)])
        self.builder.free_tensors(*parts)
        return joined

    def _exchange(self, source: Ref, *, forward: bool) -> Ref:
        """Horovod's all-to-all; alone there is none."""
        builder = self.builder
        if builder.world_size == 1:
            return source
        this_rank = [self.local * sum(self.columns[builder.rank])] * builder.world_size
        others = [self.local * sum(widths) for widths in self.columns]
        send, receive = (this_rank, others) if forward else (others, this_rank)
        self._executor("HorovodAlltoall")
        received = builder.add_tensor((sum(receive),))
        builder.wait_for_event(builder.add_all_to_all(builder.world, source, received, send, receive))
        builder.free_tensors(source)
        return received

    def _split(self, source: Ref, widths: Sequence[int], rows: int) -> list[Ref]:
        """A tensor cut up by columns: a copy for each part, in one kernel."""
        self._executor("tensorflow::SplitV")
        parts = [self.builder.add_tensor((rows, width)) for width in widths]
        self.builder.add_op("fsdp::split_with_sizes_copy", [("all_gather_output", source), ("out", parts)], [])
        return parts

    def _forward_dense(self, received: Ref) -> None:
        builder = self.builder
        parts = self._split(received, self.widths, self.local)
        joined = self._concatenated(parts)
        if self.stride:
            self._executor("tensorflow::AvgPool")
            shape = (1, self.local, sum(self.widths))
            pooled = builder.add_tensor((1, self.local, ceil(shape[-1] / self.stride)))
            scalars: Scalars = [("kernel_size", (self.stride,)), ("stride", (self.stride,))]
            joined = self.op("aten::avg_pool1d", [("self", builder.add_view(joined, shape))], pooled, scalars)
        features = builder.add_resident_tensor((self.local, self.dense_features), StorageKind.INPUT)
        self._executor("tensorflow::ConcatV2")
        x = builder.add_tensor((self.local, self.joined_width))
        pair = [builder.add_view(joined, (self.local, self.joined_width - self.dense_features)), features]
        builder.add_op("aten::cat", [("tensors", pair)], [x], [("dim", 1)])
        self._products_forward(self.dense, x)

    def _products_forward(self, mlp: FusedMlp, x: Ref) -> None:
        """A product per layer; bias and activation are one kernel that XLA makes."""
        mlp.layers = list(zip(mlp.masters[::2], mlp.masters[1::2], strict=True))
        mlp.results = [x]
        for weight, _ in mlp.layers:
            fan_out, fan_in = weight.shape
            self._executor("tensorflow::MatMul")
            turned = self.builder.add_view(weight, (fan_in, fan_out), (1, fan_in))
            result = self.builder.add_tensor((x.shape[0], fan_out))
            self.op("aten::mm", [("self", mlp.results[-1]), ("mat2", turned)], result)
            self._executor("tensorflow::XlaRun")
            mlp.results.append(self.op("aten::relu", [("self", result)], self.builder.add_tensor(result.shape)))

    def _backward_dense(self) -> Ref:
        """Back to the pooled embeddings, all in one flat tensor."""
        builder = self.builder
        grad = builder.add_resident_tensor((self.local, 1), StorageKind.ACTIVATION)
        for number in reversed(range(len(self.dense.layers))):
            weight, bias = self.dense.layers[number]
            fan_out, fan_in = weight.shape
            self._executor("tensorflow::XlaRun")
            inner = builder.add_tensor(grad.shape)
            self.op(
                "aten::threshold_backward", [("grad_output", grad), ("self", self.dense.results[number + 1])], inner
            )
            self._executor("tensorflow::BiasAddGrad")
            self.op("aten::sum", [("self", inner)], builder.add_tensor(bias.shape), [("dim", (0,))])
            self._executor("tensorflow::MatMul")
            grad = self.op("aten::mm", [("self", inner), ("mat2", weight)], builder.add_tensor((self.local, fan_in)))
            self._executor("tensorflow::MatMul")
            flipped = builder.add_view(inner, (fan_out, self.local), (1, fan_out))
            self.op(
                "aten::mm", [("self", flipped), ("mat2", self.dense.results[number])], builder.add_tensor(weight.shape)
            )
        width = sum(self.widths)
        if self.stride:
            self._executor("tensorflow::AvgPoolGrad")
            small = builder.add_view(grad, (1, self.local, self.joined_width - self.dense_features))
            scalars: Scalars = [("kernel_size", (self.stride,)), ("stride", (self.stride,))]
            whole = builder.add_tensor((1, self.local, width))
            grad = self.op("aten::avg_pool2d_backward", [("grad_output", small), ("self", whole)], whole, scalars)
        pieces = []
        for columns in self.widths:  # the gradient of a concatenation is a slice for each part
            self._executor("tensorflow::Slice")
            part = builder.add_view(grad, (self.local, columns), (width, 1))
            pieces.append(self.op("aten::clone", [("self", part)], builder.add_tensor((self.local, columns))))
        return self._concatenated(pieces)

    def _update(self, grad: Ref) -> None:
        """Gradients repeated for every lookup, then each table's own update."""
        tables = [table for variable in self.held for table in variable.inputs]
        parts = iter(self._split(grad, [table.dim for table in tables], self.whole))
        for variable in self.held:
            self._apply(variable, [self._repeated(table, next(parts)) for table in variable.inputs])

    def _repeated(self, table: Table, grad: Ref) -> Ref:
        builder, hotness = self.builder, int(table.pooling.mean)
        if hotness == 1:
            return grad
        self._executor("tensorflow::EmbeddingLookupGrad")
        bags = builder.add_view(grad, (self.whole, hotness, table.dim), (table.dim, 0, 1))
        values = self.op("aten::clone", [("self", bags)], builder.add_tensor((self.whole, hotness, table.dim)))
        return builder.add_view(values, (self.whole * hotness, table.dim))

    def _apply(self, variable: _Variable, grads: list[Ref]) -> None:
        """Adagrad of one table: gradients of all its inputs together, each row once."""
        builder, dim = self.builder, variable.weights.shape[1]
        count = sum(grad.shape[0] for grad in grads)
        indices, values = builder.add_resident_tensor((count,), StorageKind.INPUT, "int64"), grads[0]
        if len(grads) > 1:
            row_numbers = [builder.add_resident_tensor((grad.shape[0],), StorageKind.INPUT, "int64") for grad in grads]
            self._executor("tensorflow::ConcatV2")
            indices = builder.add_tensor((count,), "int64")
            builder.add_op("aten::cat", [("tensors", row_numbers)], [indices], [("dim", 0)])
            self._executor("tensorflow::ConcatV2")
            values = builder.add_tensor((count, dim))
            builder.add_op("aten::cat", [("tensors", grads)], [values], [("dim", 0)])
        if builder.world_size > 1:  # averaged over ranks, as the dense gradients are
            self._executor("tensorflow::RealDiv")
            values = self.op(
                "aten::div", [("self", values)], builder.add_tensor(values.shape), [("other", builder.world_size)]
            )
        one = replace(variable.inputs[0], pooling=Pooling.from_constant(count / self.whole))
        distinct, hottest = _count_repeated_rows(one, self.whole)
        self._executor("tensorflow::Unique")
        once, places = builder.add_tensor((distinct,), "int64"), builder.add_tensor((count,), "int32")
        builder.add_op("tensorflow::unique", [("x", indices)], [once, places])
        self._executor("tensorflow::UnsortedSegmentSum")
        summed = builder.add_tensor((distinct, dim))
        scalars = dict(_load(one, self.whole)) | {"longest_bag": hottest}
        arguments = [("data", values), ("segment_ids", places)]
        builder.add_op("tensorflow::unsorted_segment_sum", arguments, [summed], list(scalars.items()))
        self._executor("tensorflow::ResourceSparseApplyAdagradV2")
        arguments = [("grad", summed), ("indices", once), ("var", variable.weights), ("acc", variable.accumulator)]
        builder.add_op("tensorflow::resource_sparse_apply_adagrad", arguments, [])
        builder.free_tensors(values, once, places, summed)

    def _apply_dense(self) -> None:
        """Dense gradients summed over ranks, and a kernel for each parameter."""
        builder = self.builder
        grads = [builder.add_resident_tensor(ref.shape, StorageKind.GRADIENT) for ref in self.dense.masters]
        if builder.world_size > 1:
            self._executor("HorovodAllreduce")
            flat = builder.add_tensor((sum(grad.spec.numel for grad in grads),))
            builder.add_op(
                "aten::cat", [("tensors", [builder.add_view(g, (g.spec.numel,)) for g in grads])], [flat], [("dim", 0)]
            )
            builder.wait_for_event(builder.add_all_reduce(builder.world, flat))
        for parameter, grad in zip(self.dense.masters, grads, strict=True):
            self._executor("tensorflow::ResourceApplyAdagradV2")
            state = builder.add_resident_tensor(parameter.shape, StorageKind.OPTIMIZER_STATE)
            lists = [("self", [parameter]), ("tensor1", [grad]), ("tensor2", [state])]
            builder.add_op("aten::_foreach_addcdiv_", lists, [], [("value", 1)], overload="Scalar")
