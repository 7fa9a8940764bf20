"""What HugeCTR's DLRM steps do with rows on one node and on several: lookups, and gradients added where they belong."""

from __future__ import annotations

from collections.abc import Sequence

from traincast.ir.ops import StorageKind
from traincast.models.embeddings import Table
from traincast.models.embeddings.table import Part, total_load
from traincast.models.layers.builder import RankBuilder, Ref, Scalars
from traincast_evaluation.published.hugectr_dense import DIM, DenseStep
from traincast_evaluation.published.hugectr_hybrid import HybridRows

EMBEDDING = 6
"""The stream of embeddings, alongside those of the communicators."""


class RowsStep(DenseStep):
    """A step with hybrid embeddings; without `overlap` they run on the stream of the dense part. `early` is MLPerf
    1.0's code: which rows are whose is found in the step, and nothing shares the network."""

    def __init__(
        self, builder: RankBuilder, tables: Sequence[Table], rows: HybridRows, *, overlap: bool, early: bool
    ) -> None:
        super().__init__(builder, builder.batch_size, cross=False)
        self.tables, self.rows, self.early = tables, rows, early
        self.stream = EMBEDDING if overlap else 0
        height = sum(table.rows for table in tables) // builder.world_size
        self.weights = builder.add_resident_tensor((height, DIM), StorageKind.PARAMETER)
        self.lookups = self.local * len(tables)
        self.infrequent = round(rows.infrequent_share * self.lookups)

    def find_rows(self, nodes: int) -> None:
        """Which rows of the whole batch are whose, where that is not found ahead of the step."""
        builder = self.builder
        if not self.early:
            return
        keys, local = self.indices(self.lookups * builder.world_size), self.indices(self.lookups)
        scalars: Scalars = [("gpus", builder.world_size), ("nodes", nodes), ("frequent", self.rows.frequent)]
        builder.add_op("hugectr::hybrid_indices", [("keys", keys), ("local", local)], [], scalars, stream=self.stream)

    def look_up(self, lookups: int, share: float, stream: int) -> Ref:
        """`lookups` rows, that `share` of every table's, in half precision: [samples, tables, dim]."""
        builder = self.builder
        load = total_load([Part(table, DIM, share) for table in self.tables], self.local)
        scalars: Scalars = [
            ("load", tuple(int(value) for value in load.round())), ("longest_bag", 1),
            ("total_rows", sum(table.rows for table in self.tables)),
        ]  # fmt: skip
        result = builder.add_tensor((self.local, len(self.tables), DIM), self.dtype)
        arguments = [("weights", self.weights), ("indices", self.indices(lookups))]
        builder.add_op("traincast::batched_embedding_forward", arguments, [result], scalars, stream=stream)
        return result

    def add(self, target: Ref, grad: Ref, count: int) -> None:
        """This many rows of gradients added where they belong."""
        builder = self.builder
        arguments = [("self", target), ("index", self.indices(count)), ("source", builder.add_view(grad, (count, DIM)))]
        builder.add_op("aten::index_add_", arguments, [], [("dim", 0), ("alpha", 1)], stream=self.stream)

    def indices(self, count: int) -> Ref:
        """Numbers of this many rows."""
        return self.builder.add_resident_tensor((count,), StorageKind.INPUT, "int32")

    def bottom_part(self, grad: Ref) -> Ref:
        """Of the gradients of all vectors those of the bottom MLP's."""
        return self.builder.add_view(grad, (self.local, DIM), (grad.spec.numel // self.local, 1))
