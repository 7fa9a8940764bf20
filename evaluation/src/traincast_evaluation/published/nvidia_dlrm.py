"""NVIDIA's PyTorch DLRM (DeepLearningExamples, MLPerf 0.7), rank by rank as its published code runs it.

The bottom MLP runs on rank 0 for the samples of all ranks; tables are dealt to the others by size (to all of up to four
ranks); one all-to-all brings both to the samples' ranks, where the top MLP is data parallel. MLPs are Apex's (bias and
activation are one kernel), the interaction is one kernel, tables are updated by a scaled copy and an `index_add`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from traincast.ir.builder import share_templates
from traincast.ir.compiled import find_scopes_in_phases, mark_graphs
from traincast.ir.ops import Phase, StorageKind
from traincast.ir.program import Program
from traincast.ir.workload import Workload
from traincast.models.dlrm.config import CRITEO_ROWS
from traincast.models.embeddings import Pooling, Table, Zipf
from traincast.models.layers.builder import RankBuilder, Ref, Scalars
from traincast.models.placement import Placement, Plan, ShardingKind
from traincast.models.sharded_dlrm.layout import Batch, Layout, assign_shards_to_ranks
from traincast_evaluation.published.fused_layers import FusedStep
from traincast_evaluation.published.run import Run, count_mlp_parameters

DIM = 128
BOTTOM = (13, 512, 256, DIM)
TOP = (480, 1024, 1024, 512, 256)  # padded from 479; the last layer, to 1, is a plain linear one
SKEW = 1.05
"""Exponent of the power law by which rows are wanted. Assumed: how skewed the Criteo data is was not published."""


def deal_tables(rows: Sequence[int], gpus: int) -> list[list[int]]:
    """The tables of each rank: largest first to the emptiest GPU, equally many tables each; none for rank 0 of many.

    >>> deal([5, 9, 1, 7], 2)
    [[1, 2], [3, 0]]
    """
    filling: list[list[int]] = [[] for _ in range(gpus - 1 if gpus > 4 else gpus)]
    most, full = -(-len(rows) // len(filling)), []
    for table in sorted(range(len(rows)), key=lambda i: -rows[i]):
        filling[0].append(table)
        if len(filling[0]) == most:
            full.append(filling.pop(0))
        filling.sort(key=lambda held: sum(rows[i] for i in held))
    return [[], *full, *filling] if gpus > 4 else [*full, *filling]


def write(sizes: Mapping[str, Any], run: Run) -> Workload:
    """One training step. Of `sizes`, `autocast` says that half precision is autocast's, which copies the weights every
    step, with a scaler whose verdict the host waits for; without it half-precision weights are kept and the scale is
    fixed (Apex O2). `graphs`: in half precision forward and backward are replayed as a CUDA graph."""
    tables = [
        Table(name=f"t{i}", rows=rows, dim=DIM, pooling=Pooling.from_constant(1), access=Zipf(SKEW))
        for i, rows in enumerate(list_rows_per_table(sizes))
    ]
    owners = deal_tables([table.rows for table in tables], run.gpus)
    where = {table: rank for rank, held in enumerate(owners) for table in held}
    plan = Plan(
        tuple(table.name for table in tables),
        tuple(Placement(ShardingKind.TABLE_WISE, (where[i],)) for i in range(len(tables))),
        run.gpus,
    )
    layout = assign_shards_to_ranks(tables, plan, batch_size=run.global_batch // run.gpus, gpus_per_node=run.gpus)
    keys: dict[tuple[object, ...], int] = {}
    ranks = tuple(keys.setdefault((rank == 0, *layout.make_program_key(rank)), len(keys)) for rank in range(run.gpus))
    casts = run.half and sizes["autocast"]
    programs = [_Step(layout, ranks.index(number), run, casts=casts).program() for number in range(len(keys))]
    if run.half and sizes["graphs"]:
        phases = (Phase.FORWARD, Phase.LOSS, Phase.BACKWARD)
        programs = [mark_graphs(program, find_scopes_in_phases(program, *phases)) for program in programs]
    return Workload(
        name="nvidia-dlrm",
        programs=tuple(share_templates(programs)),
        ranks=ranks,
        mode="training",
        synchronised=sizes["synchronised"],
    )


def list_rows_per_table(sizes: Mapping[str, Any]) -> Sequence[int]:
    """Rows of the tables; those of the MLPerf reference unless `sizes` say others."""
    rows: Sequence[int] = sizes.get("rows_per_table", CRITEO_ROWS)
    return rows


def parameters(sizes: Mapping[str, Any]) -> int:
    """Parameters of the whole model."""
    return sum(list_rows_per_table(sizes)) * DIM + count_mlp_parameters(BOTTOM) + count_mlp_parameters((*TOP, 1))


class _Step(FusedStep):
    """One rank's step in the order it runs."""

    def __init__(self, layout: Layout, rank: int, run: Run, *, casts: bool) -> None:
        builder = RankBuilder(layout.batch_size, rank, run.gpus, run.gpus)
        super().__init__(builder, run.element, casts=casts, batch=layout.batch_size)
        self.run, self.layout, self.rank = run, layout, rank
        self.keeps_half = run.half and not casts  # half-precision weights, as Apex O2 has them
        (section,) = layout.sections
        self.vectors = [count + (number == 0) for number, count in enumerate(section.tables)]
        self.batch: Batch | None = section.ranks[rank][0] if section.ranks[rank] else None
        self.local, self.whole = layout.batch_size, run.global_batch
        self.top = self.mlp((*TOP, 1))
        self.bottom = self.mlp(BOTTOM) if rank == 0 else None
        if self.batch is not None:
            self.weights = self.builder.add_resident_tensor((self.batch.rows, DIM), StorageKind.PARAMETER)

    def program(self) -> Program:
        """Everything."""
        sent = self._bottom_forward()
        joined = self._exchange_forward(sent)
        self._top_forward(joined)
        grad = self._top_backward(joined)
        to_bottom = self._exchange_backward(grad)
        self._bottom_backward(to_bottom)
        self._optimize()
        return self.builder.build_program()

    def _bottom_forward(self) -> Ref:
        """What this rank has for all samples: [samples, vectors, dim]."""
        builder, parts = self.builder, []
        builder.open_scope("aten::to", Phase.FORWARD)
        if self.bottom is not None:
            features = builder.add_resident_tensor((self.whole, BOTTOM[0]), StorageKind.INPUT)
            x = self.forward(self.bottom, self.cast(features, self.dtype), "MlpFunction")
            if self.keeps_half:  # Apex gives a model's results back in fp32, and they are wanted in fp16
                x = self.cast(self.cast(x, "float32"), self.dtype)
            parts.append(builder.add_view(x, (self.whole, 1, DIM)))
        if self.batch is not None:
            parts.append(self._look_up(self.batch))
        if len(parts) == 1:
            return parts[0]
        builder.open_scope("aten::cat", Phase.FORWARD)
        joined = builder.add_tensor((self.whole, sum(part.shape[1] for part in parts), DIM), self.dtype)
        builder.add_op("aten::cat", [("tensors", parts)], [joined], [("dim", 1)])
        return joined

    def _look_up(self, batch: Batch) -> Ref:
        builder, shape = self.builder, (self.whole, batch.tables)
        row_numbers = builder.add_resident_tensor(shape, StorageKind.INPUT, "int64")
        starts = builder.add_resident_tensor((batch.tables,), StorageKind.BUFFER, "int64")
        builder.open_scope("aten::add", Phase.FORWARD)
        self.indices = self.op(
            "aten::add", [("self", row_numbers), ("other", starts)], builder.add_tensor(shape, "int64")
        )
        builder.open_scope("EmbeddingGatherFunction")
        arguments = [("weights", self.weights), ("table_offsets", starts), ("indices", self.indices)]
        fused = self.run.gpus == 1  # then one kernel gathers and casts
        pooled = builder.add_tensor((*shape, DIM), self.dtype if fused else "float32")
        self.op("traincast::batched_embedding_forward", arguments, pooled, _load(batch))
        return self.cast(pooled, self.dtype)

    def _exchange_forward(self, sent: Ref) -> Ref:
        """All vectors of this rank's samples: [samples, 27, dim]."""
        builder, run = self.builder, self.run
        if run.gpus == 1:
            return sent
        send = [self.local * self.vectors[self.rank] * DIM] * run.gpus
        receive = [self.local * count * DIM for count in self.vectors]
        builder.open_scope("BottomToTop", Phase.FORWARD)
        flat = builder.add_view(sent, (sum(send),))
        received = builder.add_tensor((sum(receive),), self.dtype)
        builder.wait_for_event(builder.add_all_to_all(builder.world, flat, received, send, receive))
        pieces = [builder.add_view(received, (self.local, count * DIM)) for count in self.vectors]
        joined = builder.add_tensor((self.local, sum(self.vectors), DIM), self.dtype)
        builder.add_op("aten::cat", [("tensors", pieces)], [joined], [("dim", 1)])
        return joined

    def _top_forward(self, joined: Ref) -> None:
        builder, batch = self.builder, joined.shape[0]
        builder.open_scope("DotBasedInteract", Phase.FORWARD)
        interacted = builder.add_tensor((batch, TOP[0]), self.dtype)
        self.op("nvidia::dot_based_interact", [("input", joined)], interacted)
        result = self.forward(self.top, interacted, "MlpFunction")
        logits = self.cast(result, "float32")
        builder.open_scope("aten::binary_cross_entropy_with_logits", Phase.LOSS)
        target = builder.add_resident_tensor(logits.shape, StorageKind.INPUT)
        loss = [("self", logits), ("target", target)]
        self.op("aten::binary_cross_entropy_with_logits", loss, builder.add_tensor(()), [("reduction", 1)])

    def _top_backward(self, joined: Ref) -> Ref:
        """Back to the vectors, [samples, 27, dim]; the top MLP's gradients are all-reduced on the way."""
        builder, run = self.builder, self.run
        batch = joined.shape[0]
        builder.open_scope("aten::ones_like", Phase.BACKWARD)
        self.op(
            "aten::ones_like", [("self", builder.add_resident_tensor((), StorageKind.BUFFER))], builder.add_tensor(())
        )
        builder.open_scope("BinaryCrossEntropyWithLogitsBackward0")
        raw = builder.add_tensor((batch, 1))
        self.op("aten::sub", [("self", builder.add_resident_tensor((batch, 1), StorageKind.BUFFER))], raw)
        grad = self.backward(self.top, self.cast(raw, self.dtype, scope="ToCopyBackward0"), "MlpFunctionBackward",
                              input_grad=True)  # fmt: skip
        self.event = self._reduce_top()
        builder.open_scope("DotBasedInteractBackward", Phase.BACKWARD)
        arguments = [("input", joined), ("grad", grad)]
        whole = self.op("nvidia::dot_based_interact_backward", arguments, builder.add_tensor(joined.shape, self.dtype))
        if run.gpus > 1:  # the bottom MLP's output is one of the vectors, taken out by an index
            builder.open_scope("SelectBackward0")
            zeros = builder.add_tensor(joined.shape, self.dtype)
            builder.add_op("aten::zeros", [], [zeros], [("size", joined.shape)])
            builder.open_scope("aten::add_")
            self.op("aten::add_", [("self", whole), ("other", zeros)], whole)
        return whole

    def _reduce_top(self) -> int:
        """Apex's DDP: one bucket, copied together, summed, divided and copied apart."""
        if self.run.gpus == 1:
            return -1
        builder = self.builder
        builder.open_scope("ApexDDP", Phase.BACKWARD)
        numel = sum(ref.spec.numel for ref in self.top.masters)
        dtype = "float32" if self.casts else self.dtype
        flat = builder.add_tensor((numel,), dtype)
        grads = [builder.add_resident_tensor(ref.shape, StorageKind.GRADIENT, dtype) for ref in self.top.masters]
        builder.add_op(
            "aten::cat", [("tensors", [builder.add_view(g, (g.spec.numel,)) for g in grads])], [flat], [("dim", 0)]
        )
        return builder.add_all_reduce(builder.world, flat)

    def _exchange_backward(self, grad: Ref) -> Ref:
        """Gradients of what this rank had for all samples."""
        builder, run = self.builder, self.run
        if run.gpus == 1:
            return grad
        send = [self.local * count * DIM for count in self.vectors]
        receive = [self.local * self.vectors[self.rank] * DIM] * run.gpus
        builder.open_scope("BottomToTopBackward", Phase.BACKWARD)
        for count in self.vectors:
            piece = builder.add_view(grad, (self.local, count * DIM), (sum(self.vectors) * DIM, 1))
            copy = builder.add_tensor((self.local, count * DIM), self.dtype)
            self.op("aten::clone", [("self", piece)], copy, [("memory_format", "contiguous_format")])
        flat = builder.add_view(grad, (sum(send),))
        received = builder.add_tensor((sum(receive),), self.dtype)
        builder.wait_for_event(builder.add_all_to_all(builder.world, flat, received, send, receive))
        return received

    def _bottom_backward(self, grad: Ref) -> None:
        builder, run = self.builder, self.run
        if self.bottom is not None:
            from_result = builder.add_view(grad, (self.whole, DIM))
            if self.keeps_half:
                for dtype in ("float32", self.dtype):
                    from_result = self.cast(from_result, dtype, scope="ToCopyBackward0")
            self.backward(self.bottom, from_result, "MlpFunctionBackward", input_grad=False)
        if self.batch is not None:
            values = builder.add_view(grad, (self.whole * self.batch.tables, DIM))
            if self.bottom is not None:  # apart from the bottom MLP's
                builder.open_scope("CatBackward0", Phase.BACKWARD)
                copy: Scalars = [("memory_format", "contiguous_format")]
                strided = builder.add_view(
                    grad, (self.whole, self.batch.tables * DIM), ((self.batch.tables + 1) * DIM, 1)
                )
                whole = builder.add_tensor((self.whole, self.batch.tables * DIM), self.dtype)
                values = builder.add_view(self.op("aten::clone", [("self", strided)], whole, copy), values.shape)
            self.values = self.cast(values, "float32", scope="ToCopyBackward0")
            if run.gpus == 1 and not run.half:  # the fused gather's backward writes its own values in any case
                builder.open_scope("BuckleEmbeddingFusedGatherFunctionBackward")
                self.values = self.op("aten::clone", [("self", values)], builder.add_tensor(values.shape))

    def _optimize(self) -> None:
        builder = self.builder
        if self.event >= 0:
            builder.open_engine_scope("cuda::stream_wait_event", Phase.OTHER)
            builder.wait_for_event(self.event)
        mlps = [self.top, *([] if self.bottom is None else [self.bottom])]
        masters = [ref for mlp in mlps for ref in mlp.masters]
        grads = [builder.add_resident_tensor(ref.shape, StorageKind.GRADIENT) for ref in masters]
        builder.open_scope("Optimizer.step#FusedSGD.step", Phase.OPTIMIZER)
        if self.run.half:  # into fp32, and whether all are finite
            builder.add_op("aten::_amp_foreach_non_finite_check_and_unscale_", [("self", grads)], [])
        if self.casts:
            overflow = builder.add_resident_tensor((1,), StorageKind.BUFFER)
            builder.add_op("aten::_local_scalar_dense", [("self", overflow)])
        builder.add_op(
            "aten::_foreach_add_", [("self", masters), ("other", grads)], [], [("alpha", -0.1)], overload="List"
        )
        if self.batch is None:
            return
        builder.open_scope("Optimizer.step#SGD.step")
        update = partial(self.op, result=None)
        if self.casts:
            update("aten::_amp_foreach_non_finite_check_and_unscale_", [("self", self.values)])
        scaled = builder.add_tensor(self.values.shape)
        self.op("aten::mul", [("self", self.values)], scaled, [("other", -0.1)])
        arguments = [("self", self.weights), ("index", builder.add_view(self.indices, (self.values.shape[0],))),
                     ("source", scaled)]  # fmt: skip
        update("aten::index_add_", arguments, scalars=[("dim", 0), ("alpha", 1)])


def _load(batch: Batch) -> Scalars:
    return [("load", batch.load), ("longest_bag", batch.longest_bag), ("total_rows", batch.rows)]
