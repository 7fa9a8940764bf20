"""Bytes that a plan needs on every rank, term by term, against what a device holds.

A rank looks its shards up for the samples of all ranks. Pooled rows and their gradients are fp32 and live at the same
time at the start of the backward pass; optimizer state of an element is where the weights are, that of a row always on
the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from traincast.models.embeddings.table import ITEM_BYTES, OPTIMIZER_STATE, STATE_ITEM_BYTES, Table
from traincast.models.placement.plan import Placement, Plan, Shard
from traincast.utils.arrays import FloatArray
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
TERMS = ("weights", "optimizer", "gradients", "activations", "communication", "host")
"""Terms in bytes; `host` is in host memory, the others on the device."""
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


@dataclass(frozen=True, eq=False, slots=True)
class MemoryNeed:
    """Bytes by rank and term, [ranks, TERMS], against the limits."""

    bytes: FloatArray
    limits: MemoryLimits

    @property
    def device(self) -> FloatArray:
        """Bytes on the device of each rank, with the dense part and without the headroom."""
        return np.asarray(self.bytes[:, :-1].sum(axis=1) + self.limits.dense)

    @property
    def host(self) -> FloatArray:
        """Bytes in host memory for each rank."""
        return np.asarray(self.bytes[:, -1])

    @property
    def missing(self) -> float:
        """Bytes by which the fullest rank exceeds its device or its part of the host; 0 when all fit."""
        device, host = self._beyond
        return float(max(device.max(), host.max(), 0.0))

    @property
    def _beyond(self) -> tuple[FloatArray, FloatArray]:
        """Bytes of each rank beyond its device, and beyond its part of the host."""
        device = self.device - self.limits.device * (1.0 - self.limits.headroom)
        return device, np.asarray(self.host - self.limits.host)

    @property
    def fullest(self) -> tuple[int, str]:
        """The rank that lacks most, and where if that is not its device (" of host memory")."""
        device, host = self._beyond
        if host.max() > device.max():
            return int(np.argmax(host)), " of host memory"
        return int(np.argmax(device)), ""

    @property
    def fits(self) -> bool:
        """Whether every rank has room."""
        return self.missing <= 0.0


def compute_shard_bytes(
    table: Table, placement: Placement, shard: Shard, *, batch_size: int, world_size: int
) -> FloatArray:
    """Bytes of one shard by term. `batch_size` is that of one rank."""
    item, width, height = ITEM_BYTES[table.dtype], shard.width, shard.height
    share = height / table.rows
    weights = float(height * width * item)
    samples = placement.kind.count_samples(batch_size, world_size)
    keys = samples * (table.pooling.mean * share * (INDEX_BYTES + 4 * table.weighted) + INDEX_BYTES)
    pooled = 2.0 * samples * width * POOLED_BYTES  # with its gradient
    terms = dict.fromkeys(TERMS, 0.0)
    terms["activations"] = keys + pooled
    if placement.kind.copied:  # parameters of a dense optimizer, which has no row-wise kind
        adagrad = table.optimizer in ("adagrad", "rowwise_adagrad")
        state = weights * (1 if adagrad else OPTIMIZER_STATE[table.optimizer].per_weight)
        # before the step the gradient and its bucket; in it the bucket and what the optimizer makes of it
        gradients = weights * (_ADAGRAD_COPIES if adagrad else 1)
        terms |= {"weights": weights, "optimizer": state, "gradients": gradients, "communication": weights}
        return np.array([terms[name] for name in TERMS])
    # what other ranks sent: keys unpacked into table order; pooled rows received, and gradients sent back
    terms["communication"] = keys
    row_wise = table.optimizer == "rowwise_adagrad"
    state = float(height * STATE_ITEM_BYTES * OPTIMIZER_STATE[table.optimizer].count_state_per_row(width))
    if placement.kernel.in_host_memory:  # FBGEMM keeps one number per row on the device all the same
        terms |= {"weights": placement.cache_fraction * weights, "optimizer": state if row_wise else 0.0}
        terms["host"] = weights + (0.0 if row_wise else state)
    else:
        terms |= {"weights": weights, "optimizer": state}
    return np.array([terms[name] for name in TERMS])


def compute_common_bytes(tables: Sequence[Table], *, batch_size: int) -> FloatArray:
    """Bytes that every rank needs whatever the plan, by term: indices and pooled rows of its own samples."""
    keys = sum(table.pooling.mean * (INDEX_BYTES + 4 * table.weighted) + INDEX_BYTES for table in tables)
    pooled = 2.0 * sum(table.dim for table in tables) * POOLED_BYTES
    terms = {"activations": batch_size * pooled, "communication": batch_size * keys}
    return np.array([terms.get(name, 0.0) for name in TERMS])


def compute_memory_need(plan: Plan, tables: Sequence[Table], limits: MemoryLimits, *, batch_size: int) -> MemoryNeed:
    """What every rank needs under a plan."""
    need = np.tile(compute_common_bytes(tables, batch_size=batch_size), (plan.world_size, 1))
    for shard in plan.make_shards(tables):
        table, placement = tables[shard.table], plan.placements[shard.table]
        need[shard.rank] += compute_shard_bytes(
            table, placement, shard, batch_size=batch_size, world_size=plan.world_size
        )
    return MemoryNeed(need, limits)


def check_sizes(tables: Sequence[Table], limits: MemoryLimits, world_size: int) -> None:
    """Rejects a table that is larger than the memory of all ranks together, host memory included."""
    room = world_size * (limits.for_tables + limits.host)
    for table in tables:
        if table.memory_bytes > room:
            raise TraincastError(
                f"table '{table.name}' needs {table.memory_bytes / 1e9:,.1f} GB with its optimizer state, more than "
                f"the {room / 1e9:,.1f} GB of {world_size} GPUs and their hosts together; use more GPUs"
            )
