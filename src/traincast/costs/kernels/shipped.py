"""The fitted models that come with the package."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from pathlib import Path

from traincast.costs.kernels.families import BY_NAME
from traincast.costs.kernels.model import KernelModel, State, load_state

PROFILES = Path(str(files("traincast.costs.kernels") / "profiles"))


@cache
def shipped_model(family: str) -> KernelModel | None:
    """The fitted model of a family, read when first asked for; None where the roofline is all there is."""
    record = BY_NAME[family]
    return record.model_class().from_state(_profile(record.profile)) if record.model else None


@cache
def _profile(name: str) -> State:
    """A profile's numbers, once for the families that share it."""
    return load_state(PROFILES / name)
