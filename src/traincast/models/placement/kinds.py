"""How a table can be sharded, and which kernel looks it up: TorchRec's names, which files and JSON use too."""

from __future__ import annotations

from enum import StrEnum

from traincast.utils.errors import make_unknown_error


class ShardingKind(StrEnum):
    """How a table is cut and who has the parts, in the order in which a step goes through them."""

    TABLE_WISE = "table_wise"
    """Whole, on one rank."""
    ROW_WISE = "row_wise"
    """A block of rows on every rank."""
    COLUMN_WISE = "column_wise"
    """Equal slices of columns, each on a rank of its own choice."""
    TABLE_ROW_WISE = "table_row_wise"
    """A block of rows on every rank of one node."""
    DATA_PARALLEL = "data_parallel"
    """A copy on every rank, for that rank's samples."""

    @classmethod
    def _missing_(cls, value: object) -> ShardingKind:
        raise make_unknown_error("kind of sharding", str(value), list(cls), f"Choose {', '.join(cls)}.")

    @property
    def position(self) -> int:
        """Its number in the order of the kinds."""
        return _POSITIONS[self]

    @property
    def copied(self) -> bool:
        """Whether every rank has the whole table, for its own samples."""
        return self is ShardingKind.DATA_PARALLEL

    @property
    def by_rows(self) -> bool:
        """Whether ranks hold blocks of rows, and add up what they pooled."""
        return self in (ShardingKind.ROW_WISE, ShardingKind.TABLE_ROW_WISE)

    @property
    def everywhere(self) -> bool:
        """Whether every rank has a part of every such table."""
        return self in (ShardingKind.ROW_WISE, ShardingKind.DATA_PARALLEL)

    def count_samples(self, batch_size: int, world_size: int) -> int:
        """The samples that a rank looks up, at `batch_size` samples per rank."""
        return batch_size if self.copied else batch_size * world_size

    def count_sharers(self, world_size: int, gpus_per_node: int) -> int:
        """How many ranks have equal parts of one table between them, or of a slice of its columns."""
        if self is ShardingKind.TABLE_ROW_WISE:
            return min(gpus_per_node, world_size)
        return world_size if self.everywhere else 1

    def count_row_blocks(self, world_size: int, gpus_per_node: int) -> int:
        """Into how many blocks of rows per table is cut."""
        return self.count_sharers(world_size, gpus_per_node) if self.by_rows else 1


_POSITIONS = {kind: position for position, kind in enumerate(ShardingKind)}


class ComputeKernel(StrEnum):
    """Where the weights of a table are, and who updates them."""

    FUSED = "fused"
    """In device memory, updated in the backward pass."""
    FUSED_UVM = "fused_uvm"
    """In host memory."""
    FUSED_UVM_CACHING = "fused_uvm_caching"
    """In host memory, with a cache on the device."""
    DENSE = "dense"
    """In device memory, updated by the optimizer of the dense part: that of copied tables."""

    @classmethod
    def _missing_(cls, value: object) -> ComputeKernel:
        raise make_unknown_error("kernel", str(value), list(cls), f"Choose {', '.join(cls)}.")

    @property
    def in_host_memory(self) -> bool:
        """Whether the weights are in host memory."""
        return self.host_access > 0

    @property
    def cached(self) -> bool:
        """Whether the device has a cache of weights that are in host memory."""
        return self is ComputeKernel.FUSED_UVM_CACHING

    @property
    def host_access(self) -> int:
        """What kernel calls say of host memory: 0 not used, 1 read over the link, 2 cached on the device."""
        return {ComputeKernel.FUSED_UVM: 1, ComputeKernel.FUSED_UVM_CACHING: 2}.get(self, 0)
