"""The tables of one kernel of a rank: where their weights and states are, and the cache of those in host memory."""

from __future__ import annotations

from dataclasses import dataclass

from traincast.ir.ops import StorageKind
from traincast.models.embeddings.table import OPTIMIZER_STATE
from traincast.models.layers.builder import RankBuilder, Ref, Scalars
from traincast.models.layers.lookup import MODULE, TableBatchedLookup
from traincast.models.placement.kinds import ComputeKernel
from traincast.models.sharded_dlrm.layout import Batch

DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
_CACHE_WAYS = 32  # FBGEMM's set associativity


@dataclass(slots=True, eq=False)
class KernelLookup:
    """One table-batched kernel of a rank, for the lookups of `samples` samples."""

    builder: RankBuilder
    batch: Batch
    samples: int
    kernel: TableBatchedLookup
    cache: Ref | None

    @staticmethod
    def from_batch(builder: RankBuilder, batch: Batch, samples: int) -> KernelLookup:
        """The weights and states of the kernel, there before the step."""
        dtype, dense = DTYPES[batch.dtype], batch.kernel is ComputeKernel.DENSE
        place = "cpu:pinned" if batch.kernel.in_host_memory else "cuda"
        count = 0 if dense else OPTIMIZER_STATE[batch.optimizer].tensors
        shape = (batch.state_elements // max(count, 1),)
        # FBGEMM keeps the small row-wise state on the device, also of tables in host memory
        beside = "cuda" if OPTIMIZER_STATE[batch.optimizer].per_row else place
        kernel = TableBatchedLookup(
            builder=builder,
            tables=batch.tables,
            weights=builder.add_resident_tensor((batch.elements,), StorageKind.PARAMETER, dtype, place),
            states=[
                builder.add_resident_tensor(shape, StorageKind.OPTIMIZER_STATE, device=beside) for _ in range(count)
            ],
            forms=_make_scalars(batch),
            optimizer="dense" if dense else batch.optimizer,
            weighted=batch.weighted,
        )
        cached = batch.kernel.cached
        cache = builder.add_resident_tensor((batch.cached_elements,), StorageKind.PARAMETER, dtype) if cached else None
        return KernelLookup(builder, batch, samples, kernel, cache)

    @property
    def weights(self) -> Ref:
        """The tables, one after the other."""
        return self.kernel.weights

    def write_forward(self, indices: Ref, offsets: Ref, weights: Ref | None) -> Ref:
        """Pooled embeddings [samples, columns]; `weights` are those of weighted lookups."""
        self.kernel.write_bounds_check(indices, offsets, weights)
        if self.cache is not None:
            self._fill_cache(self.cache)
        return self.kernel.write_forward(self.samples, self.batch.columns)

    def _fill_cache(self, cache: Ref) -> None:
        """Rows that the cache misses come from the host, those they replace go back."""
        builder, batch, indices = self.builder, self.batch, self.kernel.indices
        assert indices is not None
        builder.open_scope("fbgemm::linearize_cache_indices")
        linear = builder.compute(
            "fbgemm::linearize_cache_indices", [("indices", indices)], indices.shape, dtype="int64", module=MODULE
        )
        builder.open_scope("fbgemm::lru_cache_populate")
        arguments = [("weights", self.weights), ("linear_cache_indices", linear), ("lxu_cache_weights", cache)]
        scalars: Scalars = [("fetched_rows", batch.fetched_rows), ("fetched_bytes", batch.fetched_bytes),
                            ("unique_rows", batch.load[2]), ("total_rows", batch.rows)]  # fmt: skip
        builder.add_op("fbgemm::lru_cache_populate", arguments, [], scalars, module=MODULE)
        builder.open_scope("fbgemm::lxu_cache_lookup")
        places = builder.compute(
            "fbgemm::lxu_cache_lookup", [("linear_cache_indices", linear)], indices.shape, [("ways", _CACHE_WAYS)],
            dtype="int32", module=MODULE,
        )  # fmt: skip
        builder.free_tensors(linear, places)


def _make_scalars(batch: Batch) -> Scalars:
    forms: Scalars = [
        ("total_D", batch.columns), ("max_D", batch.widest), ("total_rows", batch.rows), ("load", batch.load),
        ("longest_bag", batch.longest_bag),
    ]  # fmt: skip
    return [*forms, ("host", batch.kernel.host_access)] if batch.kernel.in_host_memory else forms
