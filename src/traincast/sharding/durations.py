"""Durations that a plan decides, from what each group has on each rank."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from traincast.arrays import FloatArray, IntArray
from traincast.embeddings.table import ITEM_BYTES
from traincast.errors import TraincastError
from traincast.host.profile import HostProfile
from traincast.placement.memory import INDEX_BYTES, POOLED_BYTES
from traincast.placement.plan import KINDS
from traincast.sharding.exchanges import Exchanges, busiest
from traincast.sharding.lookups import Group
from traincast.sharding.preparation import Preparation
from traincast.sharding.slots import Slot
from traincast.sharding.structure import LENGTH_BYTES, Around, Structure, Surroundings, load_of
from traincast.sharding.task import Task

FORWARD, BACKWARD, PARTS, KEYS, WIDTH, WEIGHTS, LOOKUP, SORT, LAUNCHES, FILLS = range(10)
"""Stages of a group on a rank: seconds of lookup and update; shards; lookups; columns; elements; seconds of the lookup
with the small kernels around it beyond their least, of what comes before the update, of the host to launch that, and to
launch what fills the cache of tables in host memory."""
_STAGES = {"forward": LOOKUP, "sort": SORT, "backward": BACKWARD, "launches": LAUNCHES, "fills": FILLS}
_UPDATE, _FILL = "SplitLookupFunctionBackward", "fbgemm::lru_cache_populate"  # ops that sort
_SET_BITS = 2.0**32 - 1.0  # sets of a cache are sorted as 32 bits


class _Sums:
    """Stages summed over the groups of a kind, each worked out once."""

    def __init__(self, stages: FloatArray, kinds: IntArray) -> None:
        self._stages, self._kinds = stages, kinds
        self._known: dict[tuple[int, int], FloatArray] = {}

    def of(self, kind: int, stage: int) -> FloatArray:
        """[plans, ranks]."""
        if (kind, stage) not in self._known:
            first, *others = np.flatnonzero(self._kinds == kind).tolist()
            total = self._stages[:, :, first, stage]
            for group in others:
                total = total + self._stages[:, :, group, stage]
            self._known[kind, stage] = total
        return self._known[kind, stage]


class Durations:
    """Open durations of compiled walks for stages [plans, ranks, groups, stages]."""

    def __init__(self, task: Task, groups: Sequence[Group], around: Surroundings, host: HostProfile) -> None:
        self.task, self.groups, self.around, self._host = task, groups, around, host
        self._kind = np.array([group.kind for group in groups])
        self._preparation = Preparation(task.device)
        topology = task.platform.topology
        if topology is None:
            raise TraincastError(
                f"'{task.platform.key}' says nothing of the links between its GPUs; name a node such as dgx-a100"
            )
        nodes = -(-task.gpus // task.gpus_per_node)
        self.world = Exchanges(topology, task.gpus, nodes)
        self._within = Exchanges(topology, task.gpus_per_node, 1)
        self._across = Exchanges(topology, nodes, nodes)

    def around_lookups(self, own: FloatArray, rows: FloatArray, distinct: FloatArray, group: IntArray) -> FloatArray:
        """Stages from `LOOKUP` on, [n, 4], of groups from their other stages [n, :], rows, and rows that a batch
        touches."""
        found = np.zeros((len(own), 4))
        for number in np.unique(group).tolist():
            chosen = np.flatnonzero(group == number)
            kind, stages = self.groups[number].kind, own[chosen]
            forward = Slot("forward", kind, number)
            small = self.around[forward].beyond(self._load(forward, number, stages))
            found[chosen, 0] = stages[:, FORWARD] + small
            around = self.around[Slot("sort", kind, number)]
            found[chosen, 1] = self._sort(around, self.groups[number], stages, rows[chosen])
            found[chosen, 2] = self._preparation.host_seconds(
                stages[:, KEYS], rows[chosen], self._host, _UPDATE, weighted=self.groups[number].weighted
            )
            if self.groups[number].cached:
                found[chosen, 3] = self._fills(stages, distinct[chosen])
        return found

    def of(self, structure: Structure, stages: FloatArray) -> list[FloatArray]:
        """The durations in the order of the structure's slots, [plans or 1, ranks or 1] each."""
        sums = _Sums(stages, self._kind)
        durations = []
        for slot in structure.slots:
            if slot.role in _STAGES:
                durations.append(np.asarray(stages[:, :, slot.group, _STAGES[slot.role]]))
            elif slot.role in ("arrive", "step", "beside"):
                durations.append(self._kernel(slot, stages, sums))
            elif slot.role == "held":
                durations.append(self._held(slot, stages))
            elif slot.role in ("order", "bucket", "join", "views", "parts"):
                durations.append(self._local(slot, structure, sums))
            elif slot.role in ("sizes", "dense"):
                kind = "all_to_all" if slot.role == "sizes" else "all_reduce"
                durations.append(self.world.seconds(kind, np.full((1, 1), float(structure.bytes[slot]))))
            elif slot.role == "copies":
                item = ITEM_BYTES[self.groups[slot.group].dtype]
                durations.append(self.world.seconds("all_reduce", item * stages[:, :1, slot.group, WEIGHTS]))
            elif slot.role in ("lengths", "values"):
                durations.append(self._input(slot, sums))
            else:
                durations.append(self._output(slot, sums.of(slot.kind, WIDTH)))
        return durations

    def _kernel(self, slot: Slot, stages: FloatArray, sums: _Sums) -> FloatArray:
        """The small kernels of all groups of a kind: the arrival of indices, the step of copied tables (equal on all
        ranks), pooled rows side by side."""
        around = self.around[slot]
        if slot.role == "beside":
            samples = self.task.batch_size * (1 if KINDS[slot.kind] == "data_parallel" else self.task.gpus)
            return around.beyond(samples * sums.of(slot.kind, WIDTH))
        if slot.role == "step":
            return around.beyond(stages[:, :1, slot.group, WEIGHTS])
        groups = np.flatnonzero(self._kind == slot.kind).tolist()
        load = sum((self._load(slot, group, stages[:, :, group]) for group in groups), np.zeros(stages.shape[:2]))
        return around.beyond(load)

    def _fills(self, own: FloatArray, distinct: FloatArray) -> FloatArray:
        """The host's seconds to sort lookups by row, and rows by the set of the cache."""
        by_row = self._preparation.host_seconds(own[:, KEYS], own[:, WEIGHTS], self._host, _FILL, weighted=False)
        sets = np.full(len(own), _SET_BITS)
        return by_row + self._preparation.host_seconds(distinct, sets, self._host, _FILL, weighted=False)

    def _held(self, slot: Slot, stages: FloatArray) -> FloatArray:
        """1 on ranks that have tables of the group, or of so many groups of the kind; else 0."""
        groups = [slot.group] if slot.group >= 0 else np.flatnonzero(self._kind == slot.kind)
        count = (stages[:, :, groups, PARTS] > 0.5).sum(axis=2)
        return np.asarray(count >= max(1, slot.number), dtype=np.float64)

    def _local(self, slot: Slot, structure: Structure, sums: _Sums) -> FloatArray:
        """What every rank does alike, for its own samples: [plans, 1]."""
        samples = float(self.task.batch_size)
        if slot.role in ("views", "parts"):
            return np.asarray(structure.each[slot] * np.maximum(self._senders(slot.kind, sums) - 1.0, 0.0))
        if slot.role == "join":
            around = self.around[slot]
            more = np.maximum(self._senders(slot.kind, sums) - 1.0, 0.0)
            least = 0.5 * float(around.seconds[0]) + self.task.device.kernel_gap  # of a copy, beside the joining
            return around.beyond(samples * self._once(slot.kind, sums, WIDTH)) + more * least
        if slot.role == "bucket":
            lookups = sums.of(slot.kind, KEYS).sum(axis=1, keepdims=True) / self.task.gpus
            lengths = sums.of(slot.kind, PARTS).sum(axis=1, keepdims=True)
            return self.around[slot].beyond(INDEX_BYTES * lookups + LENGTH_BYTES * samples * lengths)
        load = np.zeros((1, 1))
        for kind in {each.kind for each in structure.slots if each.role == "forward"}:
            shared = 1 if KINDS[kind] == "data_parallel" else self.task.gpus
            lookups = sums.of(kind, KEYS)[:, : 1 if shared == 1 else None].sum(axis=1, keepdims=True) / shared
            load = load + INDEX_BYTES * lookups + LENGTH_BYTES * samples * self._once(kind, sums, PARTS)
        return self.around[slot].beyond(load)

    def _once(self, kind: int, sums: _Sums, stage: int) -> FloatArray:
        """The sum over ranks; of tables that all ranks, or those of a node, share, over one of them: [plans, 1]."""
        step = {"table_wise": 1, "column_wise": 1, "table_row_wise": self.task.gpus_per_node}
        return np.asarray(sums.of(kind, stage)[:, :: step.get(KINDS[kind], self.task.gpus)].sum(axis=1, keepdims=True))

    def _senders(self, kind: int, sums: _Sums) -> FloatArray:
        """Ranks (or nodes) that send pooled rows of their own: [plans, 1]."""
        step = {"table_wise": 1, "column_wise": 1, "table_row_wise": self.task.gpus_per_node}
        held = sums.of(kind, PARTS)[:, :: step.get(KINDS[kind], self.task.gpus)] > 0.5
        return np.asarray(held.sum(axis=1, keepdims=True), dtype=np.float64)

    def _sort(self, around: Around, group: Group, own: FloatArray, rows: FloatArray) -> FloatArray:
        """What comes before an update; for data-parallel tables also what is done to their whole gradient."""
        prepare = self._preparation
        sorting = prepare.seconds(own[:, KEYS], rows, weighted=group.weighted)
        if not group.copied:
            return np.asarray(np.maximum(sorting - around.seconds[0], 0.0))
        then = prepare.seconds(around.lookups, around.rows, weighted=group.weighted)
        rest = np.maximum(around.seconds - then, 0.0)
        whole = np.interp(own[:, WEIGHTS], around.load, rest)
        return np.asarray(np.maximum(sorting + whole - around.seconds[0], 0.0))

    def _load(self, slot: Slot, group: int, own: FloatArray) -> FloatArray:
        samples = self.task.batch_size * (1 if self.groups[group].copied else self.task.gpus)
        parts, lookups, elements = own[..., PARTS], own[..., KEYS], own[..., WEIGHTS]
        return np.asarray(
            load_of(slot.role, self.groups[group], samples, parts=parts, lookups=lookups, elements=elements)
        )

    def _input(self, slot: Slot, sums: _Sums) -> FloatArray:
        """Lengths, row numbers or weights of lookups on their way to the ranks that hold the tables."""
        if slot.role == "lengths":
            received = LENGTH_BYTES * float(self.task.batch_size * self.task.gpus) * sums.of(slot.kind, PARTS)
        else:
            received = (INDEX_BYTES if slot.number == 0 else POOLED_BYTES) * sums.of(slot.kind, KEYS)
        return self.world.seconds("all_to_all", busiest(received, self.task.gpus_per_node))[:, None]

    def _output(self, slot: Slot, columns: FloatArray) -> FloatArray:
        """Pooled rows on their way to the ranks of their samples, or gradients on the way back."""
        pooled = POOLED_BYTES * float(self.task.batch_size * self.task.gpus) * columns
        kind = KINDS[slot.kind]
        reduction = "reduce_scatter" if slot.role == "out" else "all_gather"
        if kind == "row_wise":
            return self.world.seconds(reduction, pooled[:, :1])
        if kind == "table_row_wise" and slot.meeting == "within":
            return self._within.seconds(reduction, pooled)
        if kind == "table_row_wise":
            nodes = self._across.ranks
            return self._across.seconds("all_to_all", pooled.max(axis=1, keepdims=True) * nodes / self.task.gpus)
        return self.world.seconds("all_to_all", busiest(pooled, self.task.gpus_per_node))[:, None]
