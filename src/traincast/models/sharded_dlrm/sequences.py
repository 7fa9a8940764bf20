"""Rows that are not pooled on their way to the ranks whose samples want them, as TorchRec's `EmbeddingCollection` sends
them, and their gradients back."""

from __future__ import annotations

from dataclasses import dataclass, replace

from traincast.ir.ops import Phase, StorageKind
from traincast.models.layers.builder import RankBuilder, Ref, Scalars
from traincast.models.placement.plan import ShardingKind
from traincast.models.recommenders.storage import DEVICE, Storage
from traincast.models.sharded_dlrm.collection import ShardedTables
from traincast.models.sharded_dlrm.communication import (
    LENGTH_DTYPE,
    Features,
    HostOpNames,
    OutputCommunication,
    redistribute_lookups,
)
from traincast.models.sharded_dlrm.layout import Layout, Mark, ScopeRole, Section
from traincast.utils.errors import TraincastError

MODULE = "EmbeddingCollection"
KINDS = (ShardingKind.TABLE_WISE, ShardingKind.ROW_WISE)
"""How tables of unpooled rows can be sharded here."""


def count_rows_to_each_rank(layout: Layout, section: Section) -> int:
    """Rows of one table that a rank which has it, or a block of it, gives to each rank."""
    by_rows = section.kind is ShardingKind.ROW_WISE
    return -(-layout.batch_size // layout.world_size) if by_rows else layout.batch_size


@dataclass(slots=True, eq=False)
class SequenceOutputs(OutputCommunication):
    """The collective of one section on one rank: every lookup of `layout.batch_size` per table is a row that goes to
    the rank that asked. `count_samples` is how many samples of a rank these lookups come from; `unbucketize` says where
    each row belongs that a rank of blocks of rows sends."""

    samples: int
    module = MODULE
    unbucketize: Ref | None = None

    @property
    def dim(self) -> int:
        """Columns of a row; all tables of a collection are as wide as each other."""
        return max(batch.widest for batches in self.section.ranks for batch in batches)

    @property
    def columns(self) -> int:
        """Columns of the rows of all tables side by side."""
        return self.section.features * self.dim

    def start_forward(self, rows: Ref) -> None:
        """Sends the rows of all lookups (flat) on their way: in the order of samples' ranks first."""
        builder, kind = self.builder, self.section.kind
        with builder.label_scopes(Mark(ScopeRole.OUT, kind)):
            builder.open_scope("All2All_Seq_Req", Phase.FORWARD)
            sent = self._permute_by_rank(rows)
            elements = self._count_received_elements()
            self._received = self.write_empty(sent, sum(elements))
            own = [elements[builder.rank]] * builder.world_size
            self._event = builder.add_all_to_all(builder.world, sent, self._received, own, elements, module=MODULE)
        self._sent = sent

    def finish_forward(self) -> list[Ref]:
        """Waits; gives [own lookups, dim] of each table."""
        builder, dim = self.builder, self.dim
        assert self._received is not None
        builder.open_scope("All2All_Seq_Req_Wait", Phase.FORWARD)
        self.write_wait(module=MODULE)
        rows = self._received.shape[0] // dim
        whole = builder.add_view(self._received, (rows, dim))
        size: Scalars = [("size", (-1, dim))]
        self._ops["wait"] = builder.add_op("aten::view", [("self", self._received)], [whole], size, module=MODULE)
        if self.section.kind is ShardingKind.ROW_WISE:
            whole = self._restore_order(whole)
        count = self.layout.batch_size
        builder.open_scope("aten::split_with_sizes")
        parts = [builder.add_view(whole, (count, dim)) for _ in range(self.section.features)]
        sizes: Scalars = [("split_sizes", (count,) * self.section.features), ("dim", 0)]
        self._ops["split"] = builder.add_op("aten::split_with_sizes", [("self", whole)], parts, sizes, module=MODULE)
        return parts

    def start_backward(self, grads: list[Ref]) -> None:
        """Sends the gradients of what `finish_communication` gave on their way back."""
        builder, kind, dim = self.builder, self.section.kind, self.dim
        with builder.label_scopes(Mark(ScopeRole.JOIN, kind)):
            builder.open_scope("SplitWithSizesBackward0", Phase.BACKWARD)
            shape = (self.layout.batch_size * len(grads), dim)
            joined = builder.compute(
                "aten::cat", [("tensors", grads)], shape, [("dim", 0)], module=MODULE, forward=self._ops["split"]
            )
            builder.free_tensors(*grads)
            if kind is ShardingKind.ROW_WISE:
                joined = self._sort_by_block(joined)
        with builder.label_scopes(Mark(ScopeRole.BACK, kind)):
            builder.open_scope("All2All_Seq_Req_WaitBackward", Phase.BACKWARD)
            elements = self._count_received_elements()
            own = [elements[builder.rank]] * builder.world_size
            flat = builder.add_view(joined, (joined.shape[0] * dim,))
            self._received = self.write_empty(flat, sum(own), self._ops["wait"])
            self._event = builder.add_all_to_all(
                builder.world, flat, self._received, elements, own, module=MODULE, forward=self._ops["wait"]
            )
        self._sent = flat

    def finish_backward(self) -> Ref:
        """Waits; gives the gradients of the rows that this rank looked up (flat), in their order."""
        builder = self.builder
        assert self._received is not None
        builder.open_scope("All2All_Seq_ReqBackward", Phase.BACKWARD)
        self.write_wait(module=MODULE)
        return self._permute_by_rank(self._received)

    def _count_received_elements(self) -> list[int]:
        """Elements that come from each rank."""
        rows = count_rows_to_each_rank(self.layout, self.section)
        return [columns * rows for columns in self.section.columns]

    def _permute_by_rank(self, rows: Ref) -> Ref:
        """Rows (flat) from the order of tables to that of the ranks they go to, or back."""
        builder, tables = self.builder, self.section.tables[self.builder.rank]
        if not tables:
            return rows
        bags = tables * builder.world_size * self.samples
        lengths = builder.add_resident_tensor((bags,), StorageKind.BUFFER, LENGTH_DTYPE)
        moved = [builder.add_tensor((bags,), LENGTH_DTYPE), builder.add_tensor(rows.shape)]
        arguments = [("lengths", lengths), ("indices", rows)]
        builder.add_op("fbgemm::permute_2D_sparse_data", arguments, moved, module=MODULE)
        builder.free_tensors(rows, moved[0])
        return moved[1]

    def _restore_order(self, rows: Ref) -> Ref:
        """Rows that came by the rank of their block, in the order in which they were asked for."""
        builder = self.builder
        assert self.unbucketize is not None
        builder.open_scope("aten::index_select")
        selected = builder.add_tensor((self.layout.batch_size * self.section.features, self.dim))
        arguments = [("self", rows), ("index", self.unbucketize)]
        self._ops["select"] = builder.add_op("aten::index_select", arguments, [selected], [("dim", 0)], module=MODULE)
        builder.free_tensors(rows)
        return selected

    def _sort_by_block(self, grads: Ref) -> Ref:
        """Gradients by the rank that holds the block of their row."""
        builder, forward = self.builder, self._ops["select"]
        assert self.unbucketize is not None
        builder.open_scope("IndexSelectBackward0", Phase.BACKWARD)
        shape = (sum(self._count_received_elements()) // self.dim, self.dim)
        scalars: Scalars = [("size", shape), ("dtype", None)]
        zeros = builder.compute("aten::new_zeros", [("self", grads)], shape, scalars, module=MODULE, forward=forward)
        arguments = [("self", zeros), ("index", self.unbucketize), ("source", grads)]
        builder.add_op(
            "aten::index_add_", arguments, [zeros], [("dim", 0), ("alpha", 1)], module=MODULE, forward=forward
        )
        builder.free_tensors(grads, self.unbucketize)
        return zeros


class ShardedSequences(ShardedTables):
    """Tables whose rows are not pooled: `layout.batch_size` counts the lookups of a rank in each table, which are those
    of `count_samples` samples. Every lookup gives a row."""

    def __init__(
        self, builder: RankBuilder, layout: Layout, *, index_dtype: str, names: HostOpNames, samples: int,
        storage: Storage = DEVICE,
    ) -> None:  # fmt: skip
        for section in layout.sections:
            if section.kind not in KINDS:
                raise TraincastError(
                    f"tables whose rows are not pooled cannot be sharded {section.kind}; choose {' or '.join(KINDS)}"
                )
        self._samples = samples
        super().__init__(builder, layout, index_dtype=index_dtype, names=names, storage=storage)

    @property
    def own_samples(self) -> int:
        """Samples of one rank."""
        return self._samples

    def _count_rows(self, section: Section) -> int:
        """Rows that a kernel gives of each of its tables: all that are asked for, or those of its block."""
        return self.layout.world_size * count_rows_to_each_rank(self.layout, section)

    def _make_output(self, section: Section) -> SequenceOutputs:
        return SequenceOutputs(self.builder, self.layout, section, self._samples)

    def _redistribute_lookups(self, section: Section, features: Features) -> Features | None:
        return redistribute_lookups(self.builder, section, features, self.own_samples, with_order=True)

    def make_resident_lookups(self) -> list[list[Features]]:
        """The lookups of each kernel as if they had been distributed before, and where they were."""
        features = super().make_resident_lookups()
        return [
            [self._add_order(section, one) for one in several]
            for section, several in zip(self.sections, features, strict=True)
        ]

    def look_up(self, features: list[list[Features]]) -> None:
        """Runs the kernels of every section and sends their rows on their way."""
        for output, several in zip(self.outputs, features, strict=True):
            if isinstance(output, SequenceOutputs) and several:
                output.unbucketize = several[0].order
        super().look_up(features)

    def _add_order(self, section: Section, features: Features) -> Features:
        """Lookups that were there before with where they were, if that must be known."""
        if not section.kind.by_rows:
            return features
        shape = (section.own_lookups,)
        return replace(features, order=self.builder.add_resident_tensor(shape, StorageKind.INPUT, self.index_dtype))
