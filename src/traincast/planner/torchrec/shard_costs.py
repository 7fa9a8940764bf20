"""What one shard adds to a step, whatever else the plan does: our cost in the form TorchRec's planner can add up.

TorchRec gives every shard a time of its own and takes the rank with the largest sum. So a shard is charged what it adds
where all tables already are: to a rank that holds its even part of every table, sharded in the same way. Floors of
kernels and messages are then paid for by that load, and a byte costs what it costs in a message of that size. Shards in
host memory pay for their kernel themselves: a plan has few of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from traincast.costs.kernels.contract import Calls
from traincast.costs.kernels.cost import price_calls
from traincast.costs.kernels.embedding import EMBEDDING
from traincast.costs.kernels.embedding.physics import make_fill_call
from traincast.models.embeddings.table import ITEM_BYTES, OPTIMIZER_STATE, Part, count_fetched_rows
from traincast.models.placement.memory import INDEX_BYTES, LENGTH_BYTES, POOLED_BYTES
from traincast.models.placement.options import Option, find_option
from traincast.models.placement.plan import ComputeKernel, Placement, Plan, ShardingKind
from traincast.planner.sharding.assignment import ALL, NODE, find_scope
from traincast.planner.sharding.cost import FastCost
from traincast.planner.sharding.durations import CommunicationCosts, Stage, make_task_communication
from traincast.planner.sharding.lookups import COLUMNS, ELEMENTS, LOOKUPS, ROWS, TABLES, Preparation
from traincast.planner.sharding.result import Task
from traincast.utils.arrays import FloatArray, IntArray


class ShardSeconds(NamedTuple):
    """Seconds that a shard adds: lookup and update, and the collectives before the dense part and after it."""

    forward: float
    backward: float
    exchange_forward: float
    exchange_backward: float


class ShardCosts:
    """Costs of the shards of a task's tables, and of whole plans made of them.

    `placements` holds for each table one placement (on any ranks) of every way in which it may be sharded.
    """

    def __init__(self, task: Task, placements: Sequence[Sequence[Placement]]) -> None:
        self.task = task
        self._exchanges = make_task_communication(task)
        self._world = self._exchanges[0]
        self.cost = _make_fast_cost(task, placements)
        choices = self.cost.choices
        self._row = {(table, choices.options[row]): row for table, rows in enumerate(choices.rows) for row in rows}
        self._seconds = self._added()

    def seconds(self, table: int, placement: Placement) -> ShardSeconds:
        """What a shard of table number `table` adds under a placement of this kind."""
        return ShardSeconds(*self._seconds[self._row[table, find_option(placement)]].tolist())

    def step_seconds(self, plan: Plan) -> float:
        """Seconds of a step under a whole plan, much more where memory is exceeded."""
        placed = self.cost.assignment(plan)
        return float(self.cost.objective(placed.stages[None], placed.memory[None])[0])

    def _added(self) -> FloatArray:
        """[rows of the choices, fields of `ShardSeconds`]."""
        choices = self.cost.choices
        usual = self._compute_even_load()[choices.group]
        added = self._at(usual + choices.terms, choices.group) - self._at(usual, choices.group)
        added = np.maximum(added, 0.0)
        added[:, 0] += self._time_fetches()
        for (table, option), row in self._row.items():
            device = self._row.get((table, replace(option, kernel=ComputeKernel.FUSED, cache_fraction=0.0)))
            if option.kernel.in_host_memory and device is not None:
                # alone in its kernel it has the cache to itself; alongside the others it is no faster than on the
                # device
                added[row] = np.maximum(added[row], added[device])
        return added

    def _time_fetches(self) -> FloatArray:
        """Seconds of bringing rows from the host into a cache on the device, for each row of the choices."""
        choices, task = self.cost.choices, self.task
        seconds = np.zeros(len(choices.options))
        cached = [row for row, option in enumerate(choices.options) if option.kernel.cached]
        if cached:
            calls = []
            for row in cached:
                table, option = task.tables[choices.table[row]], choices.options[row]
                _, columns = option.shard_shape(table, task.gpus, task.gpus_per_node)
                part = Part(table, columns, 1.0 / option.kind.count_row_blocks(task.gpus, task.gpus_per_node))
                rows = count_fetched_rows(part, task.batch_size * task.gpus, option.cache_fraction)
                calls.append(make_fill_call(0.0, rows * columns * ITEM_BYTES[table.dtype]))
            seconds[cached] = price_calls(Calls.of(EMBEDDING, calls), task.device)[0].seconds
        return seconds

    def _compute_even_load(self) -> FloatArray:
        """Terms of each group on a rank when all its tables are in it, dealt out evenly: [groups, terms]."""
        choices = self.cost.choices
        usual = np.zeros((choices.groups, choices.terms.shape[1]))
        first = np.unique(choices.table * choices.groups + choices.group, return_index=True)[1]
        for row in first.tolist():
            if not choices.options[row].kernel.in_host_memory:
                usual[choices.group[row]] += choices.terms[row] * self._share(choices.options[row])
        return usual

    def _share(self, option: Option) -> float:
        """Shards of a table on an average rank."""
        scope = find_scope(option)
        return 1.0 if scope == ALL else 1.0 / self.task.nodes if scope == NODE else option.slices / self.task.gpus

    def _at(self, sums: FloatArray, group: IntArray) -> FloatArray:
        """Seconds by field of ranks that have these sums in these groups."""
        stages = self.cost.stages(sums, group)
        fields = np.column_stack([stages[:, Stage.FORWARD], stages[:, Stage.BACKWARD], np.zeros((len(sums), 2))])
        kind = np.array([self.cost.groups[number].kind.position for number in group.tolist()])
        weighted = np.array([self.cost.groups[number].weighted for number in group.tolist()])
        copied = kind == ShardingKind.DATA_PARALLEL.position
        for flag in (False, True):
            alike = ~copied & (weighted == flag)
            sort = Preparation(self.task.device).seconds(sums[alike, LOOKUPS], sums[alike, ROWS], weighted=flag)
            fields[alike, 1] += sort
        fields[copied, 1] += self._time_updates(sums[copied], group[copied])
        fields[copied, 3] = self._world.seconds("all_reduce", POOLED_BYTES * sums[copied, ELEMENTS])
        samples = float(self.task.batch_size * self.task.gpus)
        arriving = LENGTH_BYTES * samples * sums[:, TABLES], (INDEX_BYTES + 4 * weighted) * sums[:, LOOKUPS]
        inputs = sum(self._world.seconds("all_to_all", message) for message in arriving)
        fields[:, 2] = np.where(copied, 0.0, inputs)
        pooled = POOLED_BYTES * samples * sums[:, COLUMNS]
        for one in (one for one in ShardingKind if not one.copied):
            alike = kind == one.position
            fields[alike, 2:] += time_outputs(one, pooled[alike], self._exchanges, self.task.gpus_per_node)
        return fields

    def _time_updates(self, sums: FloatArray, group: IntArray) -> FloatArray:
        """A copied table's gradient is as large as the table: cleared, read, and all weights and state updated."""
        states = np.array([OPTIMIZER_STATE[self.cost.groups[number].optimizer].per_weight for number in group.tolist()])
        moved = POOLED_BYTES * sums[:, ELEMENTS] * (4.0 + 2.0 * states)
        return np.asarray(moved / self.task.device.dram_bandwidth)


def time_outputs(
    kind: ShardingKind,
    pooled: FloatArray,
    exchanges: tuple[CommunicationCosts, CommunicationCosts, CommunicationCosts],
    gpus_per_node: int,
) -> FloatArray:
    """Seconds of sending pooled rows of this many bytes, and of sending their gradients back: [n, 2]."""
    world, within, across = exchanges
    if not kind.by_rows:
        both = world.seconds("all_to_all", pooled)
        return np.column_stack([both, both])
    inner = within if kind is ShardingKind.TABLE_ROW_WISE else world
    outward, back = (inner.seconds(name, pooled) for name in ("reduce_scatter", "all_gather"))
    if kind is ShardingKind.TABLE_ROW_WISE:
        between = across.seconds("all_to_all", pooled / gpus_per_node)
        outward, back = outward + between, back + between
    return np.column_stack([outward, back])


def _make_fast_cost(task: Task, placements: Sequence[Sequence[Placement]]) -> FastCost:
    """The fast cost of plans made of these placements of each table."""
    names = tuple(table.name for table in task.tables)
    plans = [
        Plan(names, tuple(ways[min(number, len(ways) - 1)] for ways in placements), task.gpus)
        for number in range(max(len(ways) for ways in placements))
    ]
    return FastCost(task, plans)
