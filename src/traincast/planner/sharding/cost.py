"""The fast cost of a whole step under a plan: the simulation of one rank, compiled, with what the plan decides left
open.

It differs from the full simulation in this only: small kernels around lookups are interpolated, kernels next to
transfers are not slowed down, and the longest bag of a rank is the root of a sum of high powers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

import numpy as np

from traincast.costs.host.profile import load_usual_host
from traincast.models.placement.memory import INDEX_BYTES, POOLED_BYTES, compute_common_bytes, compute_shard_bytes
from traincast.models.placement.options import Option, find_option, list_table_options
from traincast.models.placement.plan import Plan, Shard, ShardingKind
from traincast.models.sharded_dlrm.layout import Layout, assign_shards_to_ranks
from traincast.planner.sharding.assignment import ALL, NOWHERE, Assignment, Choices, Weights
from traincast.planner.sharding.durations import Durations, Stage
from traincast.planner.sharding.lookups import (
    COLUMNS,
    DISTINCT,
    ELEMENTS,
    LOOKUPS,
    ROWS,
    TABLES,
    LookupKernels,
    TableGroup,
    compute_shard_terms,
)
from traincast.planner.sharding.max_plus import Slot
from traincast.planner.sharding.result import Task
from traincast.planner.sharding.structure import (
    Heaviest,
    RankProgram,
    Structure,
    build_structure,
    compile_rank,
    merge_layouts,
    time_surroundings,
)
from traincast.utils.arrays import BoolArray, FloatArray, IntArray

_SMOOTH = 0.005  # weight of the average load alongside the step's time: between equal steps, the more even plan
_AT_ONCE = 1 << 14  # plans times ranks simulated together: clocks of all registers stay in the processor's cache
_NO_ROOM = (10.0, 1000.0)  # seconds that a plan without room takes longer, and more per share of a device exceeded
_OTHERS = 0.01  # weight of what all ranks exceed together: while the fullest stays, others may get better


class FastCost:
    """Costs of plans for one task; `plans` may bring options of their own."""

    def __init__(self, task: Task, plans: Sequence[Plan] = ()) -> None:
        self.task = task
        self._options = _collect_options(task, plans)
        pairs = zip(task.tables, self._options, strict=True)
        groups = {TableGroup.of(table, option) for table, options in pairs for option in options}
        self.groups = sorted(groups, key=lambda group: group.order)
        self._kernels = LookupKernels(self.groups, task.device, batch_size=task.batch_size, world_size=task.gpus)
        self._kind = np.array([group.kind.position for group in self.groups])
        self._programs: dict[tuple[int, ...], RankProgram] = {}
        self._structures: dict[tuple[tuple[int, ...], bool], Structure] = {}
        self._host = load_usual_host(task.device)
        self.scored = 0
        """How many plans have been scored."""

    @cached_property
    def choices(self) -> Choices:
        """All options of all tables with their terms."""
        task = self.task
        numbers = {group: number for number, group in enumerate(self.groups)}
        flat = [(t, option) for t, options in enumerate(self._options) for option in options]
        first = np.cumsum([0, *(len(options) for options in self._options)]).tolist()
        sizes = (task.gpus, task.gpus_per_node, task.batch_size)
        return Choices(
            options=tuple(option for _, option in flat),
            table=np.array([t for t, _ in flat]),
            group=np.array([numbers[TableGroup.of(task.tables[t], option)] for t, option in flat]),
            rows=tuple(range(start, end) for start, end in zip(first, first[1:], strict=False)),
            terms=np.array([compute_shard_terms(task.tables[t], option, *sizes) for t, option in flat]),
            memory=np.array([_count_shard_bytes(task, t, option) for t, option in flat]),
            base=np.array([compute_common_bytes(task.tables, batch_size=task.batch_size), 0.0]),
            groups=len(self.groups),
            world_size=task.gpus,
            gpus_per_node=task.gpus_per_node,
        )

    @cached_property
    def weights(self) -> Weights:
        """What one shard of each option adds to its rank when all ranks are about equally busy."""
        choices, task = self.choices, self.task
        mean = np.zeros((choices.groups, choices.terms.shape[1]))
        first = np.unique(choices.table * choices.groups + choices.group, return_index=True)[1]
        np.add.at(mean, choices.group[first], choices.terms[first] * choices.shards[first, None] / task.gpus)
        usual = mean[choices.group]
        more = self.stages(usual + choices.terms, choices.group)
        less = self.stages(usual, choices.group)
        kernels = (more - less)[:, [Stage.FORWARD, Stage.BACKWARD]].sum(axis=1)
        sent = task.batch_size * task.gpus * POOLED_BYTES * choices.terms[:, COLUMNS]
        message = max(1.0, task.batch_size * POOLED_BYTES * sum(table.dim for table in task.tables))
        double, single = self._durations.world.seconds("all_to_all", np.array([2.0 * message, message]))
        per_byte = float(double - single) / message
        bytes_moved = 2.0 * sent + INDEX_BYTES * choices.terms[:, LOOKUPS]
        copied = np.array([group.copied for group in self.groups])[choices.group]
        bytes_moved[copied] = 2.0 * POOLED_BYTES * choices.terms[copied, ELEMENTS]  # gradients there and back
        limits = task.limits
        room = max(limits.for_tables - float(choices.base[0]), 0.0)
        seconds = np.maximum(kernels, 0.0) + per_byte * bytes_moved
        whole = [rows[0] for rows in choices.rows]
        return Weights(seconds, choices.memory[:, 0], room, float(seconds[whole].sum()) / task.gpus)

    def assignment(self, plan: Plan) -> Assignment:
        """A plan as arrays; it must be one of those given, or made of the options worth trying."""
        choices = self.choices
        option = np.zeros(len(plan.placements), dtype=np.int64)
        places = np.full((len(option), choices.most_slices), NOWHERE, dtype=np.int64)
        for number, placement in enumerate(plan.placements):
            wanted = find_option(placement)
            option[number] = choices.rows[number][0] + self._options[number].index(wanted)
            if wanted.kind is ShardingKind.TABLE_ROW_WISE:
                places[number, 0] = placement.ranks[0] // self.task.gpus_per_node
            elif wanted.slices:
                places[number, : wanted.slices] = placement.ranks
        return Assignment(self, option, places)

    def stages(self, sums: FloatArray, group: IntArray) -> FloatArray:
        """Stages of groups from sums over their shards."""
        forward, backward = self._kernels.seconds(sums, group)
        linear = np.maximum(sums[:, [TABLES, LOOKUPS, COLUMNS, ELEMENTS]], 0.0)
        stages = np.column_stack([forward, backward, linear])
        rows, distinct = np.maximum(sums[:, [ROWS, DISTINCT]], 0.0).T
        return np.column_stack([stages, self._durations.time_around_lookups(stages, rows, distinct, group)])

    def objective(self, stages: FloatArray, memory: FloatArray) -> FloatArray:
        """Seconds of a step, a little more for uneven loads, and much more where memory is exceeded: there the fullest
        rank decides, as it does between plans that do not fit."""
        limits = np.array([self.task.limits.for_tables, self.task.limits.host])
        over = np.maximum(memory - limits, 0.0) / max(self.task.limits.device, 1.0)
        excess = over.max(axis=(1, 2)) + _OTHERS * over.sum(axis=(1, 2))
        load = stages[..., Stage.FORWARD].sum(axis=2) + stages[..., Stage.BACKWARD].sum(axis=2)
        even = _SMOOTH * np.sqrt((load**2).mean(axis=1))
        worse = np.where(excess > 0, _NO_ROOM[0] + _NO_ROOM[1] * excess, 0.0)
        return np.asarray(self.seconds(stages) + even + worse)

    def seconds(self, stages: FloatArray) -> FloatArray:
        """Seconds of a step for stages [plans, ranks, groups, stages]."""
        self.scored += len(stages)
        total = np.zeros(len(stages))
        at_once = max(1, _AT_ONCE // stages.shape[1])
        for alike, structure in self._group_by_structure(stages):
            rows = np.flatnonzero(alike)
            for first in range(0, len(rows), at_once):
                some = rows[first : first + at_once]
                chosen = stages[some[0] : some[-1] + 1] if some[-1] - some[0] + 1 == len(some) else stages[some]
                durations = self._durations.of(structure, chosen)
                total[some] = structure.code.seconds(durations, self.task.gpus_per_node, chosen.shape[:2])
        return total

    def terms(self, stages: FloatArray) -> dict[Slot, FloatArray]:
        """Seconds of everything that the plan decides, for one plan [ranks, groups, stages]; [ranks] each."""
        _, structure = next(self._group_by_structure(stages[None]))
        durations = self._durations.of(structure, stages[None])
        return {slot: np.array(np.broadcast_to(seconds[0], len(stages))) for slot, seconds in durations.items()}

    def _group_by_structure(self, stages: FloatArray) -> Iterator[tuple[BoolArray, Structure]]:
        """Which plans have each structure: kinds in use, and whether some ranks lack tables of some group of those."""
        held = stages[..., Stage.TABLES] > 0.5
        groups = np.asarray(held.any(axis=1))
        kinds = np.stack([groups[:, self._kind == kind].any(axis=1) for kind in range(len(ShardingKind))], axis=1)
        partial = (kinds[:, self._kind] & ~held.all(axis=1)).any(axis=1)
        keys, which = np.unique(np.column_stack([kinds, partial]), axis=0, return_inverse=True)
        for number, key in enumerate(keys.tolist()):
            used = tuple(kind for kind, present in enumerate(key[:-1]) if present)
            yield which.reshape(-1) == number, self._get_structure(used, key[-1])

    @cached_property
    def _durations(self) -> Durations:
        layout = self._build_layout(tuple(range(len(self.groups))))
        around = time_surroundings(self.task, layout, self.groups, self._find_heaviest_loads())
        return Durations(self.task, self.groups, around, self._host)

    def _find_heaviest_loads(self) -> list[Heaviest]:
        """What a rank may have in each group: its part of all tables, or the largest shard; all of their columns."""
        choices, heaviest = self.choices, []
        for group in range(len(self.groups)):
            rows = np.flatnonzero(choices.group == group)
            terms = choices.terms[rows][:, [LOOKUPS, ELEMENTS]]
            ranks = 1 if choices.scope[rows[0]] == ALL else self.task.gpus
            most = np.maximum(terms.sum(axis=0) / ranks, terms.max(axis=0))
            tables = np.unique(choices.table[rows]).tolist()
            columns = float(sum(self.task.tables[table].dim for table in tables))
            heaviest.append(Heaviest(len(tables) / ranks, float(most[0]), float(most[1]), columns))
        return heaviest

    def _get_structure(self, kinds: tuple[int, ...], partial: bool) -> Structure:
        """The structure of plans with tables of these kinds (numbers)."""
        if (kinds, partial) not in self._structures:
            if kinds not in self._programs:
                used = tuple(np.flatnonzero(np.isin(self._kind, kinds)).tolist())
                self._programs[kinds] = compile_rank(self.task, self._build_layout(used), self.groups)
            self._structures[kinds, partial] = build_structure(
                self.task, self._programs[kinds], self._host, self._durations.around, partial=partial
            )
        return self._structures[kinds, partial]

    def _build_layout(self, used: tuple[int, ...]) -> Layout:
        """A layout with tables in each of these groups; those that compete for the same tables take turns."""
        missing, layouts = used, []
        while missing:
            layout, placed = self._turn(missing, used)
            layouts.append(layout)
            missing = tuple(group for group in missing if group not in placed)
        return merge_layouts(layouts)

    def _turn(self, wanted: tuple[int, ...], used: tuple[int, ...]) -> tuple[Layout, set[int]]:
        """A plan with tables in as many of the wanted groups as can be, and which; the others anywhere in those used.
        Groups with fewest tables to choose from choose first."""
        task, choices = self.task, self.choices
        able = {g: np.unique(choices.table[choices.group == g]).tolist() for g in wanted}
        chosen: dict[int, int] = {}
        for group in sorted(wanted, key=lambda g: (len(able[g]), -g)):
            free = [table for table in able[group] if table not in chosen]
            if free:
                # copies of a huge table take launches that others do not: the smallest stands for them
                copied, tables = self.groups[group].copied, [task.tables[number] for number in free]
                heavy = [-table.rows * table.dim if copied else table.pooling.mean for table in tables]
                chosen[free[int(np.argmax(heavy))]] = group
        placements = []
        for table, rows in enumerate(choices.rows):
            allowed = (chosen[table],) if table in chosen else used
            row = next((row for group in allowed for row in rows if choices.group[row] == group), rows[0])
            option = choices.options[row]
            targets = option.count_targets(task.gpus, task.gpus_per_node)
            places = [(table + slot) % targets for slot in range(option.slices)]
            placements.append(option.make_placement(places, task.gpus, task.gpus_per_node))
        plan = Plan(tuple(table.name for table in task.tables), tuple(placements), task.gpus)
        layout = assign_shards_to_ranks(task.tables, plan, batch_size=task.batch_size, gpus_per_node=task.gpus_per_node)
        return layout, set(chosen.values())


def _collect_options(task: Task, plans: Sequence[Plan]) -> list[tuple[Option, ...]]:
    """The options worth trying, and those of the plans."""
    every = list_table_options(task.tables, task.limits, task.gpus, task.gpus_per_node)
    for plan in plans:
        every = [
            options if find_option(placement) in options else (*options, find_option(placement))
            for options, placement in zip(every, plan.placements, strict=True)
        ]
    return every


def _count_shard_bytes(task: Task, number: int, option: Option) -> tuple[float, float]:
    """Device and host bytes of one shard, the first of its table."""
    table = task.tables[number]
    placement = option.make_placement([0] * max(1, option.slices), task.gpus, task.gpus_per_node)
    height, width = option.shard_shape(table, task.gpus, task.gpus_per_node)
    shard = Shard(number, 0, (0, height), (0, width))
    return compute_shard_bytes(table, placement, shard, batch_size=task.batch_size, world_size=task.gpus)
