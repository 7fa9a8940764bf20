"""Our cost inside TorchRec's planner: a `ShardEstimator` for its search and a `PerfModel` for its choice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from traincast.models.placement.plan import ComputeKernel, Placement, Plan, check_plan
from traincast.planner.sharding.result import Task
from traincast.planner.torchrec.planner import (
    import_torchrec,
    make_constraints,
    make_reservation,
    make_topology,
    run_planner,
    silence_torchrec,
)
from traincast.planner.torchrec.plans import DEFAULT_CACHE_FRACTION, KIND_OF
from traincast.planner.torchrec.shard_costs import ShardCosts
from traincast.utils.errors import TraincastError

_MILLISECONDS = 1e3  # TorchRec's planner counts milliseconds


def plan_with_our_cost(task: Task, *, timeout_seconds: int | None = None, kernels: Sequence[str] | None = None) -> Plan:
    """The plan that TorchRec's planner makes when shards and plans cost what we say they cost."""
    with silence_torchrec():
        return run_planner(make_planner_with_our_cost(task, timeout_seconds=timeout_seconds, kernels=kernels), task)


def make_planner_with_our_cost(
    task: Task, *, timeout_seconds: int | None = None, kernels: Sequence[str] | None = None
) -> Any:
    """An `EmbeddingShardingPlanner` that searches and chooses by our cost, and keeps to TorchRec's memory estimates.

    `timeout_seconds` ends its search with the best plan so far; with `kernels` it tries only these.
    """
    planner, hardware = import_torchrec("distributed.planner"), make_topology(task)
    wanted = make_constraints(task.tables, kernels)
    storage = planner.shard_estimators.EmbeddingStorageEstimator(topology=hardware, constraints=wanted)
    perf, model = make_perf_plugins(task)
    return planner.EmbeddingShardingPlanner(
        topology=hardware,
        batch_size=task.batch_size,
        constraints=wanted,
        enumerator=planner.enumerators.EmbeddingEnumerator(
            topology=hardware, batch_size=task.batch_size, constraints=wanted, estimator=[perf, storage]
        ),
        performance_model=model,
        storage_reservation=make_reservation(task.limits),
        stats=[],
        debug=False,
        timeout_seconds=timeout_seconds,
    )


def make_perf_plugins(task: Task) -> tuple[Any, Any]:
    """A `ShardEstimator` and a `PerfModel` for TorchRec's planner: the seconds (in its milliseconds) of a shard, and of
    a step under a plan. The task must be for the planner's tables, batch size and number of ranks."""
    types = import_torchrec("distributed.planner.types")
    shared = _Shared(task)

    class TraincastEstimator(types.ShardEstimator):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            pass

        def estimate(self, sharding_options: list[Any], sharder_data_map: Any) -> None:
            shared.estimate(types, sharding_options)

    class TraincastPerfModel(types.PerfModel):  # type: ignore[misc,name-defined]
        def rate(self, plan: list[Any]) -> float:
            return shared.rate(plan)

    return TraincastEstimator(), TraincastPerfModel()


class _Shared:
    """What the two plug-ins have in common: the costs of all shards, made when the planner first says which."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self._number = {table.name: number for number, table in enumerate(task.tables)}
        self._costs: ShardCosts | None = None

    def estimate(self, types: Any, options: Sequence[Any]) -> None:
        placements: list[list[Placement]] = [[] for _ in self.task.tables]
        for option in options:
            placements[self._table(option)].append(self._placement(option, placed=False))
        unplaced = [table.name for table, ways in zip(self.task.tables, placements, strict=True) if not ways]
        if unplaced:
            raise TraincastError(f"TorchRec's planner has no table '{unplaced[0]}'; give it the tables of the task")
        self._costs = ShardCosts(self.task, placements)
        for option in options:
            seconds = self._costs.seconds(self._table(option), self._placement(option, placed=False))
            for shard in option.shards:
                shard.perf = types.Perf(
                    fwd_compute=_MILLISECONDS * seconds.forward,
                    bwd_compute=_MILLISECONDS * seconds.backward,
                    fwd_comms=_MILLISECONDS * seconds.exchange_forward,
                    bwd_comms=_MILLISECONDS * seconds.exchange_backward,
                )

    def rate(self, options: Sequence[Any]) -> float:
        if self._costs is None:
            raise TraincastError("the perf model was asked before the estimator; give both to one planner")
        placed = {self._table(option): self._placement(option, placed=True) for option in options}
        plan = Plan(
            tuple(table.name for table in self.task.tables),
            tuple(placed[number] for number in range(len(placed))),
            self.task.gpus,
        )
        check_plan(plan, self.task.tables, self.task.gpus, self.task.gpus_per_node)
        return _MILLISECONDS * self._costs.step_seconds(plan)

    def _table(self, option: Any) -> int:
        if option.name not in self._number:
            raise TraincastError(f"TorchRec's planner asks for table '{option.name}', which the task does not have")
        if option.batch_size != self.task.batch_size:
            raise TraincastError(
                f"TorchRec plans for batch size {option.batch_size}, the task for {self.task.batch_size}; give one"
            )
        return self._number[option.name]

    def _placement(self, option: Any, *, placed: bool) -> Placement:
        """The placement of a sharding option; before the planner has chosen ranks, on the first that can be."""
        if option.sharding_type not in KIND_OF or option.compute_kernel not in list(ComputeKernel):
            raise TraincastError(
                f"table '{option.name}': {option.sharding_type} with kernel {option.compute_kernel} has no cost here; "
                "leave it out with the planner's constraints"
            )
        kind, kernel = KIND_OF[option.sharding_type], ComputeKernel(option.compute_kernel)
        count = len(option.shards)
        ranks = [shard.rank for shard in option.shards] if placed else [n % self.task.gpus for n in range(count)]
        cached = 0.0
        if kernel.cached:
            cached = option.cache_load_factor or DEFAULT_CACHE_FRACTION
        return Placement(kind, tuple(ranks), kernel, cached)
