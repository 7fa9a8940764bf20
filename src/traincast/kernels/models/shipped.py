"""The fitted models that come with the package."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.resources import files
from pathlib import Path

from traincast.kernels.models.base import KernelModel, load_state

PROFILES = Path(str(files("traincast.kernels") / "profiles"))

# family -> (module, class); a family without an entry is costed by the roofline
_MODELS: dict[str, tuple[str, str]] = {
    "gemm": ("gemm", "GemmModel"),
    "elementwise": ("streaming", "ElementwiseModel"),
    "copy": ("streaming", "CopyModel"),
    "reduction": ("streaming", "ReductionModel"),
    "pool": ("streaming", "PoolModel"),
    "index": ("streaming", "IndexModel"),
    "memcpy": ("streaming", "MemcpyModel"),
    "softmax": ("rows", "SoftmaxModel"),
    "norm": ("rows", "NormModel"),
    "conv": ("conv", "UnsearchedConvModel"),
    "attention": ("attention", "AttentionModel"),
    "embedding": ("embedding", "EmbeddingModel"),
}
# streaming families share one fitted memory system
_PROFILE = dict.fromkeys(("copy", "reduction", "pool", "index", "memcpy"), "elementwise")


@cache
def shipped_models() -> dict[str, KernelModel]:
    """Fitted models by family name."""
    models = {}
    for family, (module, name) in _MODELS.items():
        cls: type[KernelModel] = getattr(import_module(f"traincast.kernels.models.{module}"), name)
        models[family] = cls.from_state(load_state(PROFILES / _PROFILE.get(family, family)))
    return models
