"""The tables of TorchRec's sharded modules in a script: their names and sizes, and how many rows a sample looks up."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

from traincast.capturing.assumptions import get_assumptions
from traincast.capturing.patches import Patches
from traincast.ir.workload import TABLES

_SHARDED = {
    "embeddingbag": "ShardedEmbeddingBagCollection",
    "embedding": "ShardedEmbeddingCollection",
    "mc_embeddingbag": "ShardedManagedCollisionEmbeddingBagCollection",  # around one of the first two
    "mc_embedding": "ShardedManagedCollisionEmbeddingCollection",
}


def note_tables(patches: Patches) -> None:
    """Notes the tables of every sharded module that is given lookups, until the patches are undone."""
    paths: dict[int, str] = {}
    parallel = _find("model_parallel", "DistributedModelParallel")
    if parallel is not None:
        patches.set_attribute(parallel, "__init__", _note_paths(parallel.__init__, paths))
    for module, name in _SHARDED.items():
        kind = _find(module, name)
        if kind is not None:
            patches.set_attribute(kind, "input_dist", _note_lookups(kind.input_dist, paths))


def _find(module: str, name: str) -> Any:
    return getattr(sys.modules.get(f"torchrec.distributed.{module}"), name, None)


def _note_paths(init: Callable[..., None], paths: dict[int, str]) -> Callable[..., None]:
    @wraps(init)
    def noted(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        paths.update((id(module), path) for path, module in self.module.named_modules())

    return noted


def _note_lookups(input_dist: Callable[..., Any], paths: dict[int, str]) -> Callable[..., Any]:
    @wraps(input_dist)
    def noted(self: Any, ctx: Any, features: Any, *args: Any, **kwargs: Any) -> Any:
        result = input_dist(self, ctx, features, *args, **kwargs)
        if hasattr(features, "length_per_key_or_none"):
            held = getattr(self, "_embedding_module", self)
            _note_module(paths.get(id(held), type(held).__name__), held, features)
        return result

    return noted


def _note_module(path: str, module: Any, features: Any) -> None:
    """Lookups of a sample where lengths are known: nobody is made to wait for them."""
    assumed = get_assumptions()
    known = features.length_per_key_or_none()
    batch = _count_samples(features)
    if batch and assumed.batch is None:
        assumed.batch = batch
    lookups = dict(zip(features.keys(), known, strict=True)) if known and batch else {}
    configs = getattr(module, "_embedding_bag_configs", None) or module._embedding_configs
    content = json.loads(assumed.meta.get(TABLES, '{"modules": {}}'))
    content["modules"][path] = {
        "is_weighted": bool(getattr(module, "_is_weighted", False)),
        "tables": [_describe_table(config, lookups, batch) for config in configs],
    }
    assumed.meta[TABLES] = json.dumps(content)


def _count_samples(features: Any) -> int:
    """Samples of a batch; where features have batches of their own, those that their rows are spread to."""
    if not features.variable_stride_per_key():
        return int(features.stride())
    spread = features.inverse_indices_or_none()
    return int(spread[1].shape[-1]) if spread is not None else max(features.stride_per_key(), default=0)


def _describe_table(config: Any, lookups: dict[str, int], batch: int) -> dict[str, Any]:
    names = list(config.feature_names)
    entry = {
        "name": config.name, "num_embeddings": config.num_embeddings, "embedding_dim": config.embedding_dim,
        "data_type": config.data_type.name, "feature_names": names,
    }  # fmt: skip
    if not hasattr(config, "pooling"):
        entry["pooling"] = "NONE"
    if all(name in lookups for name in names):
        entry["pooling_factors"] = [lookups[name] / batch for name in names]
    return entry
