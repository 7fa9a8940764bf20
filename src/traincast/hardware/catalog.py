"""The hardware that is built in: every GPU and every node is one file under `data/`."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any

from traincast.hardware.device import Device
from traincast.hardware.files import read_table
from traincast.hardware.sheet import device_from
from traincast.utils.errors import unknown

_DATA = files("traincast.hardware") / "data"


@cache
def device_keys() -> tuple[str, ...]:
    """Keys of the built-in devices."""
    return _keys(_DATA / "devices")


@cache
def node_keys() -> tuple[str, ...]:
    """Keys of the built-in nodes."""
    return _keys(_DATA / "nodes")


def platform_keys() -> tuple[str, ...]:
    """Every platform that has a name: devices, then nodes."""
    return (*device_keys(), *node_keys())


@cache
def load_device(key: str) -> Device:
    """A built-in device by its key, e.g. `v100`."""
    if key not in device_keys():
        raise unknown("device", key, device_keys(), "See 'traincast platforms'.")
    return device_from(key, _sheet(key))


def _sheet(key: str) -> dict[str, Any]:
    return read_table(_DATA / "devices" / f"{key}.toml")


def device_by_name(name: str) -> Device:
    """The built-in device that `torch.cuda.get_device_name()` calls `name`, or one that its sheet names with it."""
    by_name = _keys_by_name()
    if name not in by_name:
        raise unknown("device", name, by_name, "Add its data sheet to the package: platform/data/devices/*.toml.")
    return load_device(by_name[name])


def node_table(key: str) -> dict[str, Any]:
    """The fields of a built-in node's file."""
    return read_table(_DATA / "nodes" / f"{key}.toml")


@cache
def _keys_by_name() -> dict[str, str]:
    also = {name: key for key in device_keys() for name in _sheet(key).get("also_named", ())}
    return also | {load_device(key).name: key for key in device_keys()}


def _keys(folder: Traversable) -> tuple[str, ...]:
    return tuple(sorted(entry.name[:-5] for entry in folder.iterdir() if entry.name.endswith(".toml")))
