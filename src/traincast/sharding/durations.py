"""Durations that a plan decides, from what each group has on each rank."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from traincast.errors import TraincastError
from traincast.kernels.call import FloatArray, IntArray
from traincast.sharding.exchanges import Exchanges, busiest
from traincast.sharding.lookups import Group
from traincast.sharding.memory import INDEX_BYTES, POOLED_BYTES
from traincast.sharding.plan import KINDS
from traincast.sharding.preparation import Preparation
from traincast.sharding.slots import Slot
from traincast.sharding.structure import LENGTH_BYTES, Around, Structure, Surroundings, load_of
from traincast.sharding.task import Task

FORWARD, BACKWARD, PARTS, KEYS, WIDTH, WEIGHTS, LOOKUP, SORT = range(8)
"""Stages of a group on a rank: seconds of lookup and update; shards; lookups; columns; elements; seconds of the lookup
with the small kernels around it beyond their least, and of what comes before the update."""
_STAGES = {"forward": LOOKUP, "sort": SORT, "backward": BACKWARD}


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

    def __init__(self, task: Task, groups: Sequence[Group], around: Surroundings) -> None:
        self.task, self.groups, self.around = task, groups, around
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

    def around_lookups(self, own: FloatArray, rows: FloatArray, group: IntArray) -> FloatArray:
        """Stages `LOOKUP` and `SORT` [n, 2] of groups from their other stages [n, :] and rows."""
        found = np.zeros((len(own), 2))
        for number in np.unique(group).tolist():
            chosen = np.flatnonzero(group == number)
            kind, stages = self.groups[number].kind, own[chosen]
            forward = Slot("forward", kind, number)
            small = self._small(forward, self._load(forward, number, stages))
            found[chosen, 0] = stages[:, FORWARD] + small
            around = self.around[Slot("sort", kind, number)]
            found[chosen, 1] = self._sort(around, self.groups[number], stages, rows[chosen])
        return found

    def of(self, structure: Structure, stages: FloatArray) -> list[FloatArray]:
        """The durations in the order of the structure's slots, [plans or 1, ranks or 1] each."""
        sums = _Sums(stages, self._kind)
        durations = []
        for slot in structure.slots:
            if not slot.meeting:
                durations.append(self._kernel(slot, stages))
            elif slot.role in ("sizes", "dense"):
                kind = "all_to_all" if slot.role == "sizes" else "all_reduce"
                durations.append(self.world.seconds(kind, np.full((1, 1), float(structure.bytes[slot]))))
            elif slot.role == "copies":
                copied = sum(structure.bytes[each] for each in structure.slots if each.role == "copies")
                share = structure.bytes[slot] / max(1, copied)
                elements = sums.of(slot.kind, WEIGHTS)[:, :1]
                durations.append(self.world.seconds("all_reduce", share * POOLED_BYTES * elements))
            elif slot.role in ("lengths", "values"):
                durations.append(self._input(slot, sums))
            else:
                durations.append(self._output(slot, sums.of(slot.kind, WIDTH)))
        return durations

    def _kernel(self, slot: Slot, stages: FloatArray) -> FloatArray:
        """A lookup or update, or the arrival of indices, with the small kernels around it."""
        if slot.role in _STAGES:
            return np.asarray(stages[:, :, slot.group, _STAGES[slot.role]])
        if slot.role == "step":  # of copies, equal on all ranks
            stages = stages[:, :1]
        groups = np.flatnonzero(self._kind == slot.kind).tolist()
        load = sum((self._load(slot, group, stages[:, :, group]) for group in groups), np.zeros(stages.shape[:2]))
        return self._small(slot, load)

    def _small(self, slot: Slot, load: FloatArray) -> FloatArray:
        """The small kernels around an open one, beyond their least."""
        around = self.around[slot]
        return np.asarray(np.interp(load, around.load, around.seconds - around.seconds[0]))

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
