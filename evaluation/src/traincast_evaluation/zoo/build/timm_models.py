"""Steps of timm's models, as its benchmark ran them, captured once and kept in the user's data folder.

The release is pinned to the one that is nearest to the measurements: later ones compute attention otherwise. Neither
its data loaders nor torchvision are needed to build a model; both are left out of the import.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from importlib import import_module
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from traincast.ir.workload import Workload
from traincast.utils.errors import TraincastError
from traincast_evaluation.zoo.build.kept_captures import load_kept_capture

# names of models as they were measured, and as the release has them; NFNets with SiLU for GELU, which costs the same
_RENAMED = (("swin_v2_cr", "swinv2_cr"), (r"(nfnet_f\d)s$", r"\1"))
_KEPT = 4  # workloads in memory: rows of one program follow each other


@dataclass(frozen=True, slots=True)
class TimmStep:
    """One step of timm's benchmark: images of `image` pixels a side, in channels last or contiguous; its forward pass
    alone without `training`."""

    model: str
    batch: int
    image: int
    channels_last: bool
    training: bool = True

    def load(self, framework_version: str) -> Workload:
        """The captured step, from the folder of captures or captured now."""
        return replace(_load_capture(self), framework_version=framework_version)


@lru_cache(maxsize=_KEPT)
def _load_capture(step: TimmStep) -> Workload:
    layout = "channels-last" if step.channels_last else "contiguous"
    name = f"{step.model}-{step.batch}-{step.image}-{layout}" + ("" if step.training else "-forward")
    return load_kept_capture("timm", name, lambda: _capture_step(step))


def _capture_step(step: TimmStep) -> Workload:
    from traincast.capturing import capture_step

    timm = import_timm()
    return capture_step(
        lambda batch: _make_step(timm, step, batch), batch_size=step.batch, name=step.model, rebatch=False,
        mode="training" if step.training else "inference", synchronised=True,
    )  # fmt: skip


@cache
def import_timm() -> ModuleType:
    """timm without its data loaders, which need torchvision and images."""
    if find_spec("torch") is None or find_spec("timm") is None:
        raise TraincastError(
            "evaluate timm captures its programs; torch and timm 0.6.13 are installed by scripts/setup dev"
        )
    from torch import nn

    for name in ("torchvision", "torchvision.ops", "torchvision.ops.misc"):
        sys.modules.setdefault(name, ModuleType(name))
    sys.modules["torchvision.ops.misc"].__dict__.setdefault(
        "FrozenBatchNorm2d", type("FrozenBatchNorm2d", (nn.Module,), {})
    )
    found = find_spec("timm")
    assert found is not None and found.origin is not None
    folder = Path(found.origin).parent / "data"
    constants = spec_from_file_location("timm.data", folder / "constants.py")
    assert constants is not None and constants.loader is not None
    data = module_from_spec(constants)
    constants.loader.exec_module(data)
    sys.modules["timm.data"] = data
    return import_module("timm")


def _make_step(timm: Any, step: TimmStep, batch: int) -> Callable[[], None]:
    """Autocast to fp16 without a scaler; SGD with Nesterov momentum, parameter by parameter as before PyTorch 2."""
    import torch

    layout = torch.channels_last if step.channels_last else torch.contiguous_format
    model = _make_model(timm, step).cuda().train(step.training)
    model = model.to(memory_format=layout) if step.channels_last else model
    images = torch.randn(batch, 3, step.image, step.image, device="cuda").contiguous(memory_format=layout)

    def infer() -> None:
        with torch.no_grad(), torch.autocast("cuda", dtype=torch.float16):
            model(images)

    loss = torch.nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9, nesterov=True, foreach=False)

    def run() -> None:
        optimizer.zero_grad(set_to_none=False)
        with torch.autocast("cuda", dtype=torch.float16):
            output = model(images)
            output = output[0] if isinstance(output, tuple) else output
            labels = torch.empty(batch, dtype=torch.int64, device="cuda").random_(model.num_classes)
            loss(output, labels).backward()
        optimizer.step()

    return run if step.training else infer


def _make_model(timm: Any, step: TimmStep) -> Any:
    """The model for images of this size; those that divide images into patches are told it."""
    name = step.model
    for old, new in _RENAMED:
        name = re.sub(old, new, name)
    if not timm.is_model(name):
        raise TraincastError(f"timm {timm.__version__} has no model '{step.model}'")
    model = timm.create_model(name)
    if step.image == model.default_cfg.get("input_size", (3, 224, 224))[-1]:
        return model
    try:
        return timm.create_model(name, img_size=step.image)
    except TypeError:  # takes images of any size
        return model
