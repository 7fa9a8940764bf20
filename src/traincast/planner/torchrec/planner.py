"""TorchRec's own objects from ours and ours from them, and its own planner on our platforms. Needs the extra
`torchrec`.

It is configured as a careful user would: memory, bandwidths and nodes of the platform, the mean pooling of every table,
its optimizer, the same headroom as ours, and otherwise its defaults (all kinds of sharding, kernels and proposers).
"""

from __future__ import annotations

import importlib
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import cache
from typing import Any

from traincast.models.embeddings.table import Table, check_tables
from traincast.models.placement.memory import MemoryLimits
from traincast.models.placement.plan import COLUMN_STEP, Plan
from traincast.planner.sharding.result import Task
from traincast.planner.torchrec.plans import KIND_OF, plan_from_json, plan_to_json
from traincast.planner.torchrec.tables import DATA_TYPES, default_modules
from traincast.utils.errors import INSTALL_TORCHREC, TORCH_MEMORY, TraincastError, check_memory_limit

_OPTIMIZERS = {"SGD": "sgd", "Adagrad": "adagrad", "RowWiseAdagrad": "rowwise_adagrad", "Adam": "adam"}


@cache
def import_torchrec(module: str = "") -> Any:
    """A module of TorchRec, imported when first needed."""
    check_memory_limit(TORCH_MEMORY, "TorchRec")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(f"torchrec.{module}" if module else "torchrec")
    except ImportError as error:
        raise TraincastError(f"TorchRec cannot be imported ({error}): {INSTALL_TORCHREC}") from error


def make_sharding_plan(
    plan: Plan,
    tables: Sequence[Table],
    *,
    gpus_per_node: int,
    modules: Mapping[str, str] | None = None,
    device: str = "cuda",
) -> Any:
    """A `torchrec.distributed.types.ShardingPlan`. `modules` says which module owns each table (by name)."""
    types = import_torchrec("distributed.types")
    content = plan_to_json(
        plan, tables, gpus_per_node=gpus_per_node, modules=modules or default_modules(tables), device=device
    )
    return types.ShardingPlan(
        {
            path: types.EmbeddingModuleShardingPlan(
                {name: _make_parameter(types, parameter) for name, parameter in parameters.items()}
            )
            for path, parameters in content["plan"].items()
        }
    )


def convert_sharding_plan(planned: Any) -> dict[str, Any]:
    """The fields of a `ShardingPlan`, as `plan_from_json` reads them: TorchRec's own form, and the caches."""
    content: dict[str, Any] = planned._serialize()
    for path, parameters in planned.plan.items():
        for name, parameter in parameters.items():
            written = content["plan"][path][name]
            if parameter.cache_params is not None and parameter.cache_params.load_factor is not None:
                written["cache_params"] = {"load_factor": parameter.cache_params.load_factor}
            for field in ("enforce_hbm", "output_dtype", "key_value_params"):
                if getattr(parameter, field) is not None:
                    written[field] = str(getattr(parameter, field))
    return content


def make_embedding_modules(tables: Sequence[Table], *, device: str = "meta", learning_rate: float = 0.01) -> Any:
    """An `nn.ModuleDict` of `EmbeddingBagCollection`s with these tables, their optimizers set to run in backward."""
    import torch

    configs, bags = import_torchrec("modules.embedding_configs"), import_torchrec("modules.embedding_modules")
    grouped: dict[str, list[Table]] = {}
    for table in check_tables(tables):
        _check_dim(table)
        grouped.setdefault(default_modules([table])[table.name], []).append(table)
    made = {
        path: bags.EmbeddingBagCollection(
            device=torch.device(device),
            is_weighted=group[0].weighted,
            tables=[make_bag_config(configs, table) for table in group],
        )
        for path, group in grouped.items()
    }
    for path, group in grouped.items():
        for table in group:
            _fuse_optimizer(made[path].embedding_bags[table.name].weight, table, learning_rate)
    return torch.nn.ModuleDict(made)


def make_bag_config(configs: Any, table: Table) -> Any:
    """An `EmbeddingBagConfig` of the module `torchrec.modules.embedding_configs`, which is given."""
    names = {ours: theirs for theirs, ours in DATA_TYPES.items()}
    return configs.EmbeddingBagConfig(
        name=table.name,
        embedding_dim=table.dim,
        num_embeddings=table.rows,
        feature_names=[table.name],
        pooling=configs.PoolingType.SUM,
        data_type=configs.DataType(names[table.dtype]),
    )


def describe_module(model: Any, pooling_factors: Mapping[str, float] | None = None) -> dict[str, Any]:
    """The description (see `tables_from_json`) of every embedding collection in a torch module.

    `pooling_factors` says the mean lookups per sample of each table, by name; TorchRec's configs do not know them.
    """
    bags = import_torchrec("modules.embedding_modules")
    factors = pooling_factors or {}
    modules: dict[str, Any] = {}
    for path, module in model.named_modules():
        if isinstance(module, bags.EmbeddingBagCollection):
            weights = {name: bag.weight for name, bag in module.embedding_bags.items()}
            entries = [_describe_config(config, weights, factors) for config in module.embedding_bag_configs()]
            modules[path] = {"is_weighted": module.is_weighted(), "tables": entries}
        elif isinstance(module, bags.EmbeddingCollection):
            weights = {name: embedding.weight for name, embedding in module.embeddings.items()}
            entries = [_describe_config(config, weights, factors) for config in module.embedding_configs()]
            modules[path] = {"is_weighted": False, "tables": [{**entry, "pooling": "NONE"} for entry in entries]}
    if not modules:
        raise TraincastError("the model has no EmbeddingBagCollection or EmbeddingCollection; give one that has")
    return {"modules": modules}


def _make_parameter(types: Any, parameter: Mapping[str, Any]) -> Any:
    spec = cache_params = None
    if "shards" in parameter:
        spec = types.EnumerableShardingSpec(
            [
                types.ShardMetadata(
                    shard_offsets=list(shard["shard_offsets"]),
                    shard_sizes=list(shard["shard_sizes"]),
                    placement=shard["placement"],
                )
                for shard in parameter["shards"]
            ]
        )
    if "cache_params" in parameter:
        cache_params = types.CacheParams(load_factor=parameter["cache_params"]["load_factor"])
    return types.ParameterSharding(
        sharding_type=parameter["sharding_type"],
        compute_kernel=parameter["compute_kernel"],
        ranks=list(parameter["ranks"]),
        sharding_spec=spec,
        cache_params=cache_params,
    )


def _check_dim(table: Table) -> None:
    if table.dim % COLUMN_STEP:
        raise TraincastError(
            f"table '{table.name}': dim {table.dim}; TorchRec's kernels need a multiple of {COLUMN_STEP}"
        )


def _fuse_optimizer(weight: Any, table: Table, learning_rate: float) -> None:
    """Marks the optimizer of a weight, as a user does; TorchRec's planner counts its state from the mark."""
    import torch
    from torch.distributed.optim.apply_optimizer_in_backward import _apply_optimizer_in_backward

    if table.optimizer == "none":
        return
    kinds = {
        "sgd": torch.optim.SGD,
        "adagrad": torch.optim.Adagrad,
        "rowwise_adagrad": import_torchrec("optim").RowWiseAdagrad,
        "adam": torch.optim.Adam,
    }
    _apply_optimizer_in_backward(kinds[table.optimizer], [weight], {"lr": learning_rate})


def _describe_config(config: Any, weights: Mapping[str, Any], factors: Mapping[str, float]) -> dict[str, Any]:
    entry = {
        name: value.name if hasattr(value, "name") and hasattr(value, "value") else value
        for name, value in asdict(config).items()
        if name != "init_fn"
    }
    if config.name in factors:
        entry["pooling_factors"] = [float(factors[config.name])] * len(config.feature_names)
    classes = getattr(weights.get(config.name), "_optimizer_classes", None)
    if classes:
        kind = classes[0].__name__
        if kind not in _OPTIMIZERS:
            raise TraincastError(
                f"table '{config.name}': optimizer {kind} cannot be represented; {', '.join(_OPTIMIZERS)} can"
            )
        entry["traincast"] = {"optimizer": _OPTIMIZERS[kind]}
    return entry


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
