"""TorchRec's own planner on one of our platforms: the baseline that `traincast shard` is compared with.

It is configured as a careful user would: memory, bandwidths and nodes of the platform, the mean pooling of every table,
its optimizer, the same headroom as ours, and otherwise its defaults (all kinds of sharding, kernels and proposers).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from traincast.models.embeddings.table import Table
from traincast.models.placement.memory import MemoryLimits
from traincast.models.placement.plan import Plan
from traincast.planner.sharding.task import Task
from traincast.planner.torchrec.objects import convert_sharding_plan, import_torchrec, make_embedding_modules
from traincast.planner.torchrec.plans import KIND_OF, plan_from_json
from traincast.utils.errors import TraincastError

_PER_MILLISECOND = 1e-3  # TorchRec's rates are bytes per millisecond


def plan_with_torchrec(task: Task, *, timeout_seconds: int | None = None, kernels: Sequence[str] | None = None) -> Plan:
    """The plan that TorchRec's planner makes; `timeout_seconds` ends its search with the best plan so far.

    With `kernels` it tries only these (with "fused" alone it is two to three times as fast, and copies no table).
    """
    names, task = tuple(table.name for table in task.tables), _rename_tables(task)
    with silence_torchrec():
        planner = import_torchrec("distributed.planner").EmbeddingShardingPlanner(
            topology=make_topology(task),
            batch_size=task.batch_size,
            constraints=make_constraints(task.tables, kernels),
            storage_reservation=make_reservation(task.limits),
            stats=[],
            debug=False,
            timeout_seconds=timeout_seconds,
        )
        return replace(run_planner(planner, task), tables=names)


def _rename_tables(task: Task) -> Task:
    """Tables under names that TorchRec can take: it makes attributes of modules of them (no dots, no `items`)."""
    named = (replace(table, name=f"table_{number}") for number, table in enumerate(task.tables))
    return replace(task, tables=tuple(named))


def run_planner(planner: Any, task: Task) -> Plan:
    """What an `EmbeddingShardingPlanner` plans for the tables of a task."""
    errors = import_torchrec("distributed.planner.types").PlannerError
    sharders = [import_torchrec("distributed.embeddingbag").EmbeddingBagCollectionSharder()]
    try:
        planned = planner.plan(make_embedding_modules(task.tables), sharders)
    except errors as error:
        reason = " ".join(str(error).split())[:300]
        raise TraincastError(f"TorchRec's planner found no plan for {task.gpus} GPUs: {reason}") from error
    content = convert_sharding_plan(planned)
    return plan_from_json(content, task.tables, world_size=task.gpus, gpus_per_node=task.gpus_per_node)


def make_topology(task: Task) -> Any:
    """TorchRec's `Topology` for a task: data-sheet bandwidths, in one direction, for each GPU."""
    types = import_torchrec("distributed.planner.types")
    topology, gpus, local = task.topology, task.gpus, task.gpus_per_node
    intra = topology.get_all_to_all_bandwidth(local) if local > 1 else topology.link_bandwidth
    return types.TopologyFactory.create_topology(
        types.TrainerConfig(world_size=gpus, local_world_size=local),
        types.HardwareConfig(
            hbm_cap_bytes=int(task.limits.device),
            ddr_cap_bytes=int(task.limits.host),
            hbm_mem_bw=task.device.dram_bandwidth * _PER_MILLISECOND,
            hbm_to_ddr_mem_bw=topology.host_bandwidth * _PER_MILLISECOND,
            intra_host_bw=intra * _PER_MILLISECOND,
            inter_host_bw=topology.get_network_bandwidth(local) / local * _PER_MILLISECOND,
        ),
        types.KernelConfig(compute_device="cuda", use_hardware_based_bandwidth=True),
    )


def make_constraints(tables: Sequence[Table], kernels: Sequence[str] | None = None) -> dict[str, Any]:
    """What TorchRec's planner wants to know of each table beyond its config; `kernels` limits what it tries."""
    types = import_torchrec("distributed.planner.types")
    kinds = None
    if kernels is not None:
        kinds = [kind for kind in KIND_OF if not KIND_OF[kind].copied or "dense" in kernels]
    return {
        table.name: types.ParameterConstraints(
            pooling_factors=[table.pooling.mean],
            is_weighted=table.weighted,
            sharding_types=kinds,
            compute_kernels=None if kernels is None else list(kernels),
        )
        for table in tables
    }


def make_reservation(limits: MemoryLimits) -> Any:
    """Memory that the planner leaves free: our headroom and the dense part of the model."""
    share = limits.headroom + limits.dense / limits.device
    if share >= 1.0:
        raise TraincastError(f"the dense part needs {limits.dense / 1e9:,.1f} GB and leaves no memory for tables")
    return import_torchrec("distributed.planner.storage_reservations").FixedPercentageStorageReservation(
        percentage=share
    )


@contextmanager
def silence_torchrec() -> Iterator[None]:
    """Keeps TorchRec's progress notes out of the result."""
    import_torchrec("distributed.planner.planners")
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
