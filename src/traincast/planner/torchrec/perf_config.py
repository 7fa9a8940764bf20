"""Our fitted models as a hardware configuration of TorchRec's newest estimator (`planner.estimator`, from 1.8 on).

Its estimator walks over shards and asks a configuration for five times of each: lookup, update, the collective of row
numbers, of pooled rows, and of their gradients. Every result here is that of the shard alone on the platform; what
shards cost alongside each other is what `estimator.perf_plugins` says.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from traincast.costs.kernels.contract import Calls
from traincast.costs.kernels.cost import price_calls
from traincast.costs.kernels.embedding import EMBEDDING
from traincast.costs.kernels.embedding.physics import make_fill_call
from traincast.models.placement.memory import INDEX_BYTES, LENGTH_BYTES, POOLED_BYTES
from traincast.models.placement.options import Option
from traincast.models.placement.plan import ComputeKernel, ShardingKind
from traincast.planner.sharding.durations import make_task_communication
from traincast.planner.sharding.lookups import (
    COLUMNS,
    ELEMENTS,
    LOOKUPS,
    ROWS,
    TABLES,
    LookupKernels,
    Preparation,
    TableGroup,
    compute_shard_terms,
)
from traincast.planner.sharding.result import Task
from traincast.planner.torchrec.planner import import_torchrec, make_constraints, make_topology
from traincast.planner.torchrec.plans import DEFAULT_CACHE_FRACTION, KIND_OF
from traincast.planner.torchrec.shard_costs import time_outputs
from traincast.utils.errors import TraincastError

_MILLISECONDS = 1e3  # TorchRec's planner counts milliseconds


class ShardTimes(NamedTuple):
    """Seconds of one shard: lookup, update, and collectives of row numbers, pooled rows and their gradients."""

    forward: float
    backward: float
    inputs: float
    outputs: float
    gradients: float


def make_perf_estimator(task: Task) -> Any:
    """TorchRec's `EmbeddingPerfEstimator` with our configuration, for the tables, ranks and platform of a task."""
    estimator = _make_estimator()
    return estimator.EmbeddingPerfEstimatorFactory.create_with_config(
        make_perf_config(task), topology=make_topology(task), constraints=make_constraints(task.tables)
    )


def register_perf_config(task: Task) -> tuple[str, str]:
    """Registers our configuration with TorchRec's factory of estimators, under "traincast" and under "traincast-" with
    the platform's name, so that its own tools find it; gives both names. The last task registered holds."""
    factory, config = _make_estimator().EmbeddingPerfEstimatorFactory, type(make_perf_config(task))
    names = ("traincast", f"traincast-{task.platform.key}".lower())
    for name in names:
        factory.register(name)(config)
    return names


def make_perf_config(task: Task) -> Any:
    """A `HardwarePerfConfig` whose annotated functions answer from our fitted kernels and collectives, in TorchRec's
    milliseconds. It knows the tables of the task by name: their skew, pooling and optimizer."""
    notes = import_torchrec("distributed.planner.estimator.annotations")
    times = _Times(task)

    class TraincastPerfConfig(_make_estimator().HardwarePerfConfig):  # type: ignore[misc]
        name = f"traincast-{task.device.key}"

        @notes.forward_compute  # type: ignore[untyped-decorator]
        def lookup(self, shard: Any) -> float:
            return _MILLISECONDS * times.of(shard).forward

        @notes.backward_compute  # type: ignore[untyped-decorator]
        def update(self, shard: Any) -> float:
            return _MILLISECONDS * times.of(shard).backward

        @notes.prefetch_compute  # type: ignore[untyped-decorator]
        def fill(self, shard: Any) -> float:
            return 0.0  # the lookup waits for its cache: it is counted there

        @notes.input_dist_comms  # type: ignore[untyped-decorator]
        def inputs(self, shard: Any) -> float:
            return _MILLISECONDS * times.of(shard).inputs

        @notes.fwd_comms  # type: ignore[untyped-decorator]
        def outputs(self, shard: Any) -> float:
            return _MILLISECONDS * times.of(shard).outputs

        @notes.bwd_comms  # type: ignore[untyped-decorator]
        def gradients(self, shard: Any) -> float:
            return _MILLISECONDS * times.of(shard).gradients

    return TraincastPerfConfig()


def _make_estimator() -> Any:
    try:
        return import_torchrec("distributed.planner.estimator")
    except TraincastError:
        raise TraincastError(
            "this TorchRec has no 'planner.estimator'; install torchrec 1.8 or later, or use `perf_plugins`"
        ) from None


class _Times:
    """Times of shards as TorchRec describes them."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self._number = {table.name: number for number, table in enumerate(task.tables)}
        self._exchanges = make_task_communication(task)

    def of(self, shard: Any) -> ShardTimes:
        """The times of a `ShardPerfContext`."""
        name, kind = shard.table_name, shard.sharding_type
        if name not in self._number:
            raise TraincastError(f"TorchRec's planner asks for table '{name}', which the task does not have")
        if shard.world_size != self.task.gpus:
            raise TraincastError(f"TorchRec plans for {shard.world_size} GPUs, the task for {self.task.gpus}; give one")
        if kind not in KIND_OF or shard.compute_kernel not in list(ComputeKernel):
            raise TraincastError(
                f"table '{name}': {kind} with kernel {shard.compute_kernel} has no cost here; "
                "leave it out with the planner's constraints"
            )
        kernel = ComputeKernel(shard.compute_kernel)
        cached = (shard.caching_ratio or DEFAULT_CACHE_FRACTION) if kernel.cached else 0.0
        return self._compute_times(self._number[name], KIND_OF[kind], kernel, cached, shard.emb_dim)

    @lru_cache(maxsize=65536)  # noqa: B019  (lives as long as its configuration)
    def _compute_times(
        self, number: int, kind: ShardingKind, kernel: ComputeKernel, cached: float, columns: int
    ) -> ShardTimes:
        task, table = self.task, self.task.tables[number]
        slices = max(1, table.dim // columns) if kind is ShardingKind.COLUMN_WISE else int(not kind.everywhere)
        option = Option(kind, slices, kernel, cached)
        terms = compute_shard_terms(table, option, task.gpus, task.gpus_per_node, task.batch_size)
        group = TableGroup.of(table, option)
        kernels = LookupKernels([group], task.device, batch_size=task.batch_size, world_size=task.gpus)
        forward, backward = (float(seconds[0]) for seconds in kernels.seconds(terms[None], np.zeros(1, dtype=np.int64)))
        if kernel.cached:
            search = Calls.of(EMBEDDING, [make_fill_call(terms[LOOKUPS], 0.0)])
            forward += float(price_calls(search, task.device)[0].seconds[0])
        sort = Preparation(task.device).seconds(terms[None, LOOKUPS], terms[None, ROWS], weighted=table.weighted)
        if kind.copied:
            averaged = self._exchanges[0].seconds("all_reduce", np.array([POOLED_BYTES * terms[ELEMENTS]]))
            return ShardTimes(forward, backward + float(sort[0]), 0.0, 0.0, float(averaged[0]))
        samples = float(task.batch_size * task.gpus)
        arriving = LENGTH_BYTES * samples * terms[TABLES], (INDEX_BYTES + 4 * table.weighted) * terms[LOOKUPS]
        inputs = self._exchanges[0].seconds("all_to_all", np.array(arriving))
        pooled = np.array([POOLED_BYTES * samples * terms[COLUMNS]])
        ((outputs, gradients),) = time_outputs(kind, pooled, self._exchanges, task.gpus_per_node).tolist()
        return ShardTimes(forward, backward + float(sort[0]), float(inputs.sum()), outputs, gradients)
