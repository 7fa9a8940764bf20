"""TorchRec's own objects from ours, and ours from them. Everything here needs the extra `torchrec`."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cache
from typing import Any

from traincast.models.embeddings.table import Table, check_tables
from traincast.models.placement.plan import COLUMN_STEP, Plan
from traincast.planner.torchrec.plans import plan_to_json
from traincast.planner.torchrec.tables import DATA_TYPES, default_modules
from traincast.utils.errors import TraincastError

_OPTIMIZERS = {"SGD": "sgd", "Adagrad": "adagrad", "RowWiseAdagrad": "rowwise_adagrad", "Adam": "adam"}


@cache
def import_torchrec(module: str = "") -> Any:
    """A module of TorchRec, imported when first needed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(f"torchrec.{module}" if module else "torchrec")
    except ImportError as error:
        raise TraincastError(
            f"TorchRec cannot be imported ({error}); install 'traincast[torchrec]', then torchrec==1.8.0 with --no-deps"
        ) from error


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
