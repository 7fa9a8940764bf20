"""A machine that was measured, as a platform: its CPU is the device, and its profile prices what runs on it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from traincast.costs.cpu.profile import Profile, is_profile, load_profile
from traincast.hardware.device import cpu_device
from traincast.hardware.platform import Platform
from traincast.utils.errors import TraincastError
from traincast.utils.files.reading import format_path

HERE = "here"
"""The name of the machine at hand."""


@dataclass(frozen=True, kw_only=True)
class Machine(Platform):
    """The platform of a profile: one core for each rank, joined by gloo."""

    profile: Profile


def make_machine_platform(profile: Profile, key: str = "here") -> Machine:
    """The platform of a profile that `traincast fit` wrote."""
    identity = profile.identity
    device = cpu_device(
        key, str(identity.get("name", key)), memory_bytes=float(identity.get("memory_bytes") or 0.0),
        l2_bytes=profile.caches.l2,
    )  # fmt: skip
    return Machine(key=key, device=device, profile=profile)


def get_profile_home() -> Path:
    """Where stores and profiles of this machine are kept: $TRAINCAST_HOME, else the user's data folder."""
    named = os.environ.get("TRAINCAST_HOME")
    if named:
        return Path(named)
    data = os.environ.get("XDG_DATA_HOME")
    return (Path(data) if data else Path.home() / ".local" / "share") / "traincast"


def get_profile_file() -> Path:
    """The profile that `here` means."""
    return get_profile_home() / "here.toml"


def is_here(on: str) -> bool:
    """Whether a platform's name means a machine that was measured: `here`, or the file of a fitted profile."""
    return on == HERE or (on.endswith(".toml") and is_profile(on))


def find_profile(on: str | Profile) -> Profile:
    """The profile of `here`, or of a file."""
    if isinstance(on, Profile):
        return on
    path = get_profile_file() if on == HERE else Path(on)
    if not path.is_file():
        raise TraincastError(
            f"no profile '{format_path(path)}'; measure this machine with 'traincast bench', then fit its `store` with "
            "'traincast fit'"
        )
    return load_profile(path)


def load_machine(on: str | Profile = HERE) -> Machine:
    """The platform of `here`, of a profile's file, or of a profile: what `predict_step` takes."""
    key = HERE if isinstance(on, Profile) or on == HERE else Path(on).stem
    return make_machine_platform(find_profile(on), key)
