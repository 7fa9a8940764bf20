"""TorchRec's pipelines that evaluate: no optimizer tells when a step of theirs is done."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from traincast.capturing.patches import Patches

_MODULES = tuple(
    f"torchrec.distributed.train_pipeline.{name}" for name in ("train_pipelines", "experimental_pipelines")
)

_SHARE = "create_on_rank_and_share_result"


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
        if _SHARE in vars(module):
            patches.set_attribute(module, _SHARE, _create_alone)
    for module in filter(None, map(sys.modules.get, _MODULES)):
        for name, kind in list(vars(module).items()):
            if name.startswith("EvalPipeline") and isinstance(kind, type) and "progress" in vars(kind):
                patches.set_attribute(kind, "progress", _follow(vars(kind)["progress"], note))


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


def _follow(progress: Callable[..., Any], note: Callable[[Any], None]) -> Callable[..., Any]:
    @wraps(progress)
    def followed(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = progress(self, *args, **kwargs)
        note(self)
        return result

    return followed
