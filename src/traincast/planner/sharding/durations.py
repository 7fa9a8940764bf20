"""Durations that a plan decides, from what each group has on each rank; collectives by curves that are sampled once."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from functools import lru_cache

import numpy as np

from traincast.costs.collectives import COLLECTIVE, load_shipped_collectives
from traincast.costs.host.profile import HostProfile
from traincast.costs.kernels.contract import Calls
from traincast.hardware.topology import Topology
from traincast.models.embeddings.table import ITEM_BYTES
from traincast.models.placement.memory import INDEX_BYTES, LENGTH_BYTES, POOLED_BYTES
from traincast.models.placement.plan import ShardingKind
from traincast.models.sharded_dlrm.layout import ScopeRole
from traincast.planner.sharding.lookups import Preparation, TableGroup
from traincast.planner.sharding.max_plus import EXCHANGES, Part, Slot
from traincast.planner.sharding.result import Task
from traincast.planner.sharding.structure import Around, Structure, Surroundings, compute_load
from traincast.utils.arrays import FloatArray, IntArray

_GRID = np.concatenate([[0.0], 2.0 ** np.arange(3.0, 40.0, 0.125)])


class CommunicationCosts:
    """Collectives between `ranks` GPUs on `nodes` nodes."""

    def __init__(self, topology: Topology, ranks: int, nodes: int) -> None:
        self.topology, self.ranks, self.nodes = topology, ranks, nodes

    def seconds(self, kind: str, message: FloatArray) -> FloatArray:
        """Seconds from the last arrival, for messages of this many bytes (as `collectives.COLLECTIVE` counts them)."""
        if self.ranks < 2:
            return np.zeros_like(message)
        return np.asarray(np.interp(message, _GRID, _sample_curve(self.topology, kind, self.ranks, self.nodes)))


def make_task_communication(task: Task) -> tuple[CommunicationCosts, CommunicationCosts, CommunicationCosts]:
    """Collectives between all ranks of a task, those of a node, and one of each node."""
    topology, nodes = task.topology, task.nodes
    return (
        CommunicationCosts(topology, task.gpus, nodes),
        CommunicationCosts(topology, task.gpus_per_node, 1),
        CommunicationCosts(topology, nodes, nodes),
    )


@lru_cache(maxsize=256)
def _sample_curve(topology: Topology, kind: str, ranks: int, nodes: int) -> FloatArray:
    values = np.column_stack([_GRID, np.full(len(_GRID), ranks), np.full(len(_GRID), nodes)]).astype(np.float64)
    calls = Calls.from_columns(COLLECTIVE, [kind] * len(_GRID), ["fp32"] * len(_GRID), values)
    return load_shipped_collectives().predict(calls, topology).seconds


def find_busiest_bytes(received: FloatArray, gpus_per_node: int) -> FloatArray:
    """Bytes of the even all-to-all that lasts as long as one in which rank r receives `received[..., r]` in all.

    Every rank sends each rank the same, so the busiest receiver decides, or the busiest node over the network; as
    `collectives.even_bytes` counts.
    """
    ranks = received.shape[-1]
    even = received.max(axis=-1)
    nodes = -(-ranks // gpus_per_node)
    if nodes < 2:
        return np.asarray(even)
    padded = np.zeros((*received.shape[:-1], nodes * gpus_per_node))
    padded[..., :ranks] = received
    held = padded.reshape(*received.shape[:-1], nodes, gpus_per_node).sum(axis=-1)
    members = np.minimum(gpus_per_node, ranks - gpus_per_node * np.arange(nodes))
    across = held * (ranks - members) / ranks  # what comes from other nodes
    sent = held.sum(axis=-1, keepdims=True) / ranks * members - held * members / ranks  # what leaves each node
    most = np.maximum(across.max(axis=-1), sent.max(axis=-1))
    return np.asarray(np.maximum(even, most * nodes / (ranks / nodes * (nodes - 1))))


class Stage(IntEnum):
    """What a step needs to know of a group on a rank: the last axis of arrays of stages."""

    FORWARD = 0
    """Seconds of the kernel that looks up."""
    BACKWARD = 1
    """Seconds of the kernel that updates."""
    TABLES = 2
    """Shards."""
    LOOKUPS = 3
    """Lookups in a step."""
    COLUMNS = 4
    """Pooled columns."""
    ELEMENTS = 5
    """Weights."""
    LOOKUP = 6
    """Seconds of the lookup, with what the small kernels around it take beyond their least."""
    SORT = 7
    """Seconds of what comes before the update."""
    LAUNCHES = 8
    """Seconds of the host to launch that."""
    FILLS = 9
    """Seconds of the host to launch what fills the cache of tables in host memory."""


_STAGES: dict[ScopeRole | Part, Stage] = {
    ScopeRole.LOOKUP: Stage.LOOKUP,
    Part.SORT: Stage.SORT,
    Part.BACKWARD: Stage.BACKWARD,
    Part.LAUNCHES: Stage.LAUNCHES,
    Part.FILLS: Stage.FILLS,
}
_UPDATE, _FILL = "SplitLookupFunctionBackward", "fbgemm::lru_cache_populate"  # ops that sort
_SET_BITS = 2.0**32 - 1.0  # sets of a cache are sorted as 32 bits


class _Sums:
    """Stages summed over the groups of a kind, each worked out once."""

    def __init__(self, stages: FloatArray, groups: dict[ShardingKind, list[int]]) -> None:
        self._stages, self._groups = stages, groups
        self._known: dict[tuple[ShardingKind, Stage], FloatArray] = {}

    def of(self, kind: ShardingKind, stage: Stage) -> FloatArray:
        """[plans, ranks]."""
        if (kind, stage) not in self._known:
            first, *others = self._groups[kind]
            total = self._stages[:, :, first, stage]
            for group in others:
                total = total + self._stages[:, :, group, stage]
            self._known[kind, stage] = total
        return self._known[kind, stage]


class Durations:
    """Open durations of compiled simulations for stages [plans, ranks, groups, stages]."""

    def __init__(self, task: Task, groups: Sequence[TableGroup], around: Surroundings, host: HostProfile) -> None:
        self.task, self.groups, self.around, self._host = task, groups, around, host
        self._groups_of: dict[ShardingKind, list[int]] = {}
        for number, group in enumerate(groups):
            self._groups_of.setdefault(group.kind, []).append(number)
        self._preparation = Preparation(task.device)
        self.world, self._within, self._across = make_task_communication(task)

    def time_around_lookups(
        self, stages: FloatArray, rows: FloatArray, distinct: FloatArray, group: IntArray
    ) -> FloatArray:
        """Stages from `Stage.LOOKUP` on, [n, 4], of groups from their stages before it [n, :], rows, and rows that a
        batch touches."""
        further = np.zeros((len(stages), 4))
        for number in np.unique(group).tolist():
            chosen = np.flatnonzero(group == number)
            kind, weighted, known = self.groups[number].kind, self.groups[number].weighted, stages[chosen]
            lookup = Slot(ScopeRole.LOOKUP, kind, number)
            small = self.around[lookup].interpolate_beyond(self._load(lookup, number, known))
            further[chosen, 0] = known[:, Stage.FORWARD] + small
            around = self.around[Slot(Part.SORT, kind, number)]
            further[chosen, 1] = self._time_sort(around, self.groups[number], known, rows[chosen])
            further[chosen, 2] = self._preparation.host_seconds(
                known[:, Stage.LOOKUPS], rows[chosen], self._host, _UPDATE, weighted=weighted
            )
            if self.groups[number].kernel.cached:
                further[chosen, 3] = self._time_cache_fills(known, distinct[chosen])
        return further

    def of(self, structure: Structure, stages: FloatArray) -> dict[Slot, FloatArray]:
        """The durations of the structure's slots, [plans or 1, ranks or 1] each."""
        sums = _Sums(stages, self._groups_of)
        return {slot: self._time_slot(slot, structure, stages, sums) for slot in structure.slots}

    def _time_slot(self, slot: Slot, structure: Structure, stages: FloatArray, sums: _Sums) -> FloatArray:
        if slot.role in _STAGES:
            return np.asarray(stages[:, :, slot.group, _STAGES[slot.role]])
        if slot.role in (ScopeRole.SIZES, ScopeRole.DENSE):
            kind = "all_to_all" if slot.role is ScopeRole.SIZES else "all_reduce"
            return self.world.seconds(kind, np.full((1, 1), float(structure.bytes[slot])))
        if slot.role is Part.COPIES:
            item = ITEM_BYTES[self.groups[slot.group].dtype]
            return self.world.seconds("all_reduce", item * stages[:, :1, slot.group, Stage.ELEMENTS])
        if slot.role is ScopeRole.ORDER:
            return self.around[slot].interpolate_beyond(self._count_ordered_bytes(structure, sums))
        assert slot.kind is not None
        if slot.role is Part.HELD:
            return self._held(slot, slot.kind, stages)
        if slot.role in (Part.VIEWS, Part.GRADIENTS):
            return np.asarray(structure.per_sender[slot] * self._count_other_senders(slot.kind, sums))
        if slot.role in EXCHANGES:
            return self._exchange(slot, slot.kind, sums)
        return self._kernel(slot, slot.kind, stages, sums)

    def _kernel(self, slot: Slot, kind: ShardingKind, stages: FloatArray, sums: _Sums) -> FloatArray:
        """The small kernels of a kind: on every rank for its parts, or alike on all ranks for their samples."""
        around, samples = self.around[slot], float(self.task.batch_size)
        if slot.role is ScopeRole.BESIDE:
            samples = kind.count_samples(self.task.batch_size, self.task.gpus)
            return around.interpolate_beyond(samples * sums.of(kind, Stage.COLUMNS))
        if slot.role is ScopeRole.STEP:  # copied tables are equal on all ranks
            return around.interpolate_beyond(stages[:, :1, slot.group, Stage.ELEMENTS])
        if slot.role is ScopeRole.JOIN:
            least = 0.5 * float(around.seconds[0]) + self.task.device.kernel_gap  # of a copy, alongside the joining
            joined = around.interpolate_beyond(samples * self._sum_over_ranks(kind, sums, Stage.COLUMNS))
            return joined + self._count_other_senders(kind, sums) * least
        if slot.role is ScopeRole.BUCKET:
            lookups = sums.of(kind, Stage.LOOKUPS).sum(axis=1, keepdims=True) / self.task.gpus
            lengths = sums.of(kind, Stage.TABLES).sum(axis=1, keepdims=True)
            return around.interpolate_beyond(INDEX_BYTES * lookups + LENGTH_BYTES * samples * lengths)
        loads = (self._load(slot, group, stages[:, :, group]) for group in self._groups_of[kind])
        return around.interpolate_beyond(sum(loads, np.zeros(stages.shape[:2])))

    def _count_ordered_bytes(self, structure: Structure, sums: _Sums) -> FloatArray:
        """Bytes of all lookups of a rank's samples, in tables of all kinds in use: [plans, 1]."""
        used = {slot.kind for slot in structure.slots if slot.role is ScopeRole.LOOKUP}
        load = np.zeros((1, 1))
        for kind in (kind for kind in ShardingKind if kind in used):
            ranks = 1 if kind.copied else self.task.gpus
            lookups = sums.of(kind, Stage.LOOKUPS)[:, :ranks].sum(axis=1, keepdims=True) / ranks
            lengths = float(self.task.batch_size) * self._sum_over_ranks(kind, sums, Stage.TABLES)
            load = load + INDEX_BYTES * lookups + LENGTH_BYTES * lengths
        return load

    def _time_cache_fills(self, stages: FloatArray, distinct: FloatArray) -> FloatArray:
        """The host's seconds to sort lookups by row, and rows by the set of the cache."""
        lookups, elements = stages[:, Stage.LOOKUPS], stages[:, Stage.ELEMENTS]
        by_row = self._preparation.host_seconds(lookups, elements, self._host, _FILL, weighted=False)
        sets = np.full(len(stages), _SET_BITS)
        return by_row + self._preparation.host_seconds(distinct, sets, self._host, _FILL, weighted=False)

    def _held(self, slot: Slot, kind: ShardingKind, stages: FloatArray) -> FloatArray:
        """1 on ranks that have tables of the group, or of this many groups of the kind; else 0."""
        groups = [slot.group] if slot.group >= 0 else self._groups_of[kind]
        count = (stages[:, :, groups, Stage.TABLES] > 0.5).sum(axis=2)
        return np.asarray(count >= max(1, slot.number), dtype=np.float64)

    def _sum_over_ranks(self, kind: ShardingKind, sums: _Sums, stage: Stage) -> FloatArray:
        """The sum over ranks; of tables that all ranks, or those of a node, share, over one of them: [plans, 1]."""
        sharers = kind.count_sharers(self.task.gpus, self.task.gpus_per_node)
        return np.asarray(sums.of(kind, stage)[:, ::sharers].sum(axis=1, keepdims=True))

    def _count_other_senders(self, kind: ShardingKind, sums: _Sums) -> FloatArray:
        """Ranks (or nodes) beyond the first that send pooled rows of their own: [plans, 1]."""
        sharers = kind.count_sharers(self.task.gpus, self.task.gpus_per_node)
        sending = sums.of(kind, Stage.TABLES)[:, ::sharers] > 0.5
        return np.maximum(np.asarray(sending.sum(axis=1, keepdims=True), dtype=np.float64) - 1.0, 0.0)

    def _time_sort(self, around: Around, group: TableGroup, stages: FloatArray, rows: FloatArray) -> FloatArray:
        """What comes before an update; for data-parallel tables also what is done to their whole gradient."""
        prepare = self._preparation
        sorting = prepare.seconds(stages[:, Stage.LOOKUPS], rows, weighted=group.weighted)
        if not group.copied:
            return np.asarray(np.maximum(sorting - around.seconds[0], 0.0))
        then = prepare.seconds(around.lookups, around.rows, weighted=group.weighted)
        rest = np.maximum(around.seconds - then, 0.0)
        whole = np.interp(stages[:, Stage.ELEMENTS], around.load, rest)
        return np.asarray(np.maximum(sorting + whole - around.seconds[0], 0.0))

    def _load(self, slot: Slot, group: int, stages: FloatArray) -> FloatArray:
        samples = self.groups[group].kind.count_samples(self.task.batch_size, self.task.gpus)
        tables, lookups, elements = (stages[..., i] for i in (Stage.TABLES, Stage.LOOKUPS, Stage.ELEMENTS))
        return np.asarray(
            compute_load(slot.role, self.groups[group], samples, tables=tables, lookups=lookups, elements=elements)
        )

    def _exchange(self, slot: Slot, kind: ShardingKind, sums: _Sums) -> FloatArray:
        """Lengths, row numbers or weights of lookups on their way to the ranks that hold the tables; pooled rows on
        their way to the ranks of their samples, or gradients on the way back."""
        samples = float(self.task.batch_size * self.task.gpus)
        if slot.role is ScopeRole.LENGTHS:
            return self._all_to_all(LENGTH_BYTES * samples * sums.of(kind, Stage.TABLES))
        if slot.role is ScopeRole.VALUES:
            return self._all_to_all((INDEX_BYTES if slot.number == 0 else POOLED_BYTES) * sums.of(kind, Stage.LOOKUPS))
        pooled = POOLED_BYTES * samples * sums.of(kind, Stage.COLUMNS)
        reduction = "reduce_scatter" if slot.role is ScopeRole.OUT else "all_gather"
        if kind is ShardingKind.ROW_WISE:
            return self.world.seconds(reduction, pooled[:, :1])
        if slot.collective == "within":
            return self._within.seconds(reduction, pooled)
        if slot.collective == "across":
            nodes = self._across.ranks
            return self._across.seconds("all_to_all", pooled.max(axis=1, keepdims=True) * nodes / self.task.gpus)
        return self._all_to_all(pooled)

    def _all_to_all(self, received: FloatArray) -> FloatArray:
        """Seconds of a collective between all ranks: [plans, 1]."""
        return self.world.seconds("all_to_all", find_busiest_bytes(received, self.task.gpus_per_node))[:, None]
