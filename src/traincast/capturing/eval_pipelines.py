"""TorchRec's pipelines that evaluate: no optimizer tells when a step of theirs is done."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import Any

from traincast.capturing.patches import Patches

_MODULES = tuple(
    f"torchrec.distributed.train_pipeline.{name}" for name in ("train_pipelines", "experimental_pipelines")
)


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
    for module in filter(None, map(sys.modules.get, _MODULES)):
        for name, kind in list(vars(module).items()):
            if name.startswith("EvalPipeline") and isinstance(kind, type) and "progress" in vars(kind):
                patches.set_attribute(kind, "progress", _follow(vars(kind)["progress"], note))


def _follow(progress: Callable[..., Any], note: Callable[[Any], None]) -> Callable[..., Any]:
    @wraps(progress)
    def followed(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = progress(self, *args, **kwargs)
        note(self)
        return result

    return followed
