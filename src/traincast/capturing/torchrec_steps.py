"""TorchRec in a loop: its tables, and pipelines that evaluate, of which no optimizer tells when a step is done."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from concurrent.futures import Future
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from traincast.capturing.assumptions import get_assumptions
from traincast.capturing.patches import Patches
from traincast.ir.workload import TABLES

_MODULES = tuple(
    f"torchrec.distributed.train_pipeline.{name}" for name in ("train_pipelines", "experimental_pipelines")
)

_SHARE, _POOL = "create_on_rank_and_share_result", "ThreadPoolExecutor"


def import_pipelines(script: Path) -> None:
    """Imports them ahead of a script that names TorchRec, so that their steps can be noted."""
    if b"torchrec" in script.read_bytes() and "torchrec" not in sys.modules:
        for name in _MODULES:
            try:
                import_module(name)
            except ImportError:  # the script will say so itself
                return


def note_pipeline_steps(patches: Patches, note: Callable[[Any], None]) -> None:
    """Calls `note` with a pipeline after each of its steps, until the patches are undone."""
    _load_without_thread(patches)
    for module in [held for name, held in sys.modules.items() if name.startswith("torchrec.")]:
        for name, stub in ((_SHARE, _create_alone), (_POOL, _CallersThread)):
            if name in vars(module):
                patches.set_attribute(module, name, stub)
    for module in filter(None, map(sys.modules.get, _MODULES)):
        for name, kind in list(vars(module).items()):
            if name.startswith("EvalPipeline") and isinstance(kind, type) and "progress" in vars(kind):
                _note_progress(patches, kind, note)


def _note_progress(patches: Patches, pipeline: type, note: Callable[[Any], None]) -> None:
    @patches.wrap(pipeline, "progress")
    def followed(progress: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        result = progress(self, *args, **kwargs)
        note(self)
        return result


class _CallersThread:
    """A pool that does its work where it is given, for recorders that see one thread: pipelines copy what they stash,
    and look rows up ahead, in a thread of their own, on streams that they name."""

    def __init__(self, max_workers: int | None = None) -> None:
        """Without threads."""

    def submit(self, work: Callable[..., Any], *args: Any, **kwargs: Any) -> Future[Any]:
        """Does it."""
        done: Future[Any] = Future()
        try:
            done.set_result(work(*args, **kwargs))
        except Exception as error:  # told where the result is asked for
            done.set_exception(error)
        return done

    def shutdown(self, wait: bool = True) -> None:
        """Nothing is left to do."""


def _create_alone(pg: Any, rank: int, creator: Any, extractor: Any, constructor: Any, *args: Any, **kwargs: Any) -> Any:
    """Tables in memory that the processes of a node share: without data each rank makes its own."""
    return creator(*args, **kwargs)


def _load_without_thread(patches: Patches) -> None:
    """The thread that copies the next batch while the last is used: it is copied where the last is asked for."""
    loader = getattr(sys.modules.get("torchrec.distributed.train_pipeline.utils"), "DataLoadingThread", None)
    if loader is None:
        return

    def load(self: Any) -> Any:
        batch = next(self._dataloader_iter, None)
        with torch.cuda.stream(self._memcpy_stream):
            return None if batch is None else batch.to(self._device, non_blocking=self._to_device_non_blocking)

    def get_next_batch(self: Any, none_throws: bool = False) -> Any:
        batch, self._buffered = self._buffered, load(self)
        if batch is None and none_throws:
            raise StopIteration
        return batch

    patches.set_attribute(loader, "start", lambda self: setattr(self, "_buffered", load(self)))
    patches.set_attribute(loader, "get_next_batch", get_next_batch)


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

        @patches.wrap(parallel, "__init__")
        def init(make: Any, self: Any, *args: Any, **kwargs: Any) -> None:
            make(self, *args, **kwargs)
            paths.update((id(module), path) for path, module in self.module.named_modules())

    for module, name in _SHARDED.items():
        kind = _find(module, name)
        if kind is not None:
            _note_lookups(patches, kind, paths)


def _find(module: str, name: str) -> Any:
    return getattr(sys.modules.get(f"torchrec.distributed.{module}"), name, None)


def _note_lookups(patches: Patches, kind: type, paths: dict[int, str]) -> None:
    @patches.wrap(kind, "input_dist")
    def noted(input_dist: Any, self: Any, ctx: Any, features: Any, *args: Any, **kwargs: Any) -> Any:
        result = input_dist(self, ctx, features, *args, **kwargs)
        if hasattr(features, "length_per_key_or_none"):
            held = getattr(self, "_embedding_module", self)
            _note_module(paths.get(id(held), type(held).__name__), held, features)
        return result


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
