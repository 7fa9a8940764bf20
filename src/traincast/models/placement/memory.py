"""Bytes of shards, added up: with these a search leaves plans out for which there is no room. What a plan needs is what
its step holds by lifetimes (`simulator/memory`), which is less.

A rank looks its shards up for the samples of all ranks. Pooled rows and their gradients are fp32 and live at the same
time at the start of the backward pass; optimizer state of an element is where the weights are, that of a row always on
the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from traincast.models.embeddings.table import ITEM_BYTES, OPTIMIZER_STATE, STATE_ITEM_BYTES, Table
from traincast.models.placement.plan import Placement, Shard
from traincast.utils.errors import TraincastError

HEADROOM = 0.15
"""Share of device memory left free for the CUDA context, NCCL's buffers and the allocator. TorchRec's default."""
HOST_BYTES_PER_GPU = 128e9
"""Host memory that a rank can use for tables. Platforms do not state it; this is TorchRec's default."""
POOLED_BYTES = 4
"""Of a pooled element: FBGEMM pools in fp32 whatever the type of the table."""
INDEX_BYTES = 8
"""Of a row number: FBGEMM works on int64."""
LENGTH_BYTES = 4
"""Of the length of a bag: TorchRec sends int32."""
_ADAGRAD_COPIES = 2  # of a gradient, which a step over a whole table makes: scaled, and the root of its moment


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryLimits:
    """What a rank has, in bytes: its device, of which `headroom` (a share) stays free and `dense` is taken by the
    dense part of the model, and its part of the host's memory."""

    device: float
    headroom: float = HEADROOM
    dense: float = 0.0
    host: float = HOST_BYTES_PER_GPU

    @property
    def for_tables(self) -> float:
        """Bytes of the device that tables, their activations and messages may take."""
        return max(self.device * (1.0 - self.headroom) - self.dense, 0.0)


def compute_shard_bytes(
    table: Table, placement: Placement, shard: Shard, *, batch_size: int, world_size: int
) -> tuple[float, float]:
    """Bytes of one shard on its device and in host memory. `batch_size` is that of one rank."""
    width, height = shard.width, shard.height
    weights = float(height * width * ITEM_BYTES[table.dtype])
    samples = placement.kind.count_samples(batch_size, world_size)
    found = table.pooling.mean * height / table.rows
    keys = samples * (found * (INDEX_BYTES + 4 * table.weighted) + INDEX_BYTES)
    pooled = 2.0 * samples * width * POOLED_BYTES  # with its gradient
    if placement.kind.copied:  # parameters of a dense optimizer, which has no row-wise kind
        adagrad = table.optimizer in ("adagrad", "rowwise_adagrad")
        copies = 1 if adagrad else OPTIMIZER_STATE[table.optimizer].per_weight
        # before the step the gradient and its bucket; in it the bucket and what the optimizer makes of it
        gradients = 1 + (_ADAGRAD_COPIES if adagrad else 1)
        return keys + pooled + weights * (1 + copies + gradients), 0.0
    # what other ranks sent: keys unpacked into table order; pooled rows received, and gradients sent back
    moved = 2.0 * keys + pooled
    state = float(height * STATE_ITEM_BYTES * OPTIMIZER_STATE[table.optimizer].count_state_per_row(width))
    if not placement.kernel.in_host_memory:
        return moved + weights + state, 0.0
    # FBGEMM keeps one number per row on the device all the same
    row_wise = table.optimizer == "rowwise_adagrad"
    held = moved + placement.cache_fraction * weights + (state if row_wise else 0.0)
    return held, weights + (0.0 if row_wise else state)


def compute_common_bytes(tables: Sequence[Table], *, batch_size: int) -> float:
    """Bytes that the device of every rank needs whatever the plan: indices and pooled rows of its own samples."""
    keys = sum(table.pooling.mean * (INDEX_BYTES + 4 * table.weighted) + INDEX_BYTES for table in tables)
    pooled = 2.0 * sum(table.dim for table in tables) * POOLED_BYTES
    return batch_size * (pooled + keys)


def check_sizes(tables: Sequence[Table], limits: MemoryLimits, world_size: int) -> None:
    """Rejects a table that is larger than the memory of all ranks together, host memory included."""
    room = world_size * (limits.for_tables + limits.host)
    for table in tables:
        if table.memory_bytes > room:
            raise TraincastError(
                f"table '{table.name}' needs {table.memory_bytes / 1e9:,.1f} GB with its optimizer state, more than "
                f"the {room / 1e9:,.1f} GB of {world_size} GPUs and their hosts together; use more GPUs"
            )
