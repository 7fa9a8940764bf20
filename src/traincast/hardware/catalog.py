"""The hardware that is built in: every GPU and every node is one file under `data/`."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any

from traincast.hardware.device import Device
from traincast.hardware.files import read_table
from traincast.hardware.sheet import make_device
from traincast.utils.errors import make_unknown_error

_DATA = files("traincast.hardware") / "data"


@cache
def list_device_keys() -> tuple[str, ...]:
    """Keys of the built-in devices."""
    return _list_keys(_DATA / "devices")


@cache
def list_node_keys() -> tuple[str, ...]:
    """Keys of the built-in nodes."""
    return _list_keys(_DATA / "nodes")


def list_platform_keys() -> tuple[str, ...]:
    """Every platform that has a name: devices, then nodes."""
    return (*list_device_keys(), *list_node_keys())


@cache
def load_device(key: str) -> Device:
    """A built-in device by its key, e.g. `v100`."""
    if key not in list_device_keys():
        raise make_unknown_error("device", key, list_device_keys(), "See 'traincast platforms'.")
    return make_device(key, _read_sheet(key))


def _read_sheet(key: str) -> dict[str, Any]:
    return read_table(_DATA / "devices" / f"{key}.toml")


def find_device_by_name(name: str) -> Device:
    """The built-in device that `torch.cuda.get_device_name()` calls `name`, or one that its sheet names with it."""
    by_name = _index_keys_by_name()
    if name not in by_name:
        raise make_unknown_error(
            "device", name, by_name, "Add its data sheet to the package: platform/data/devices/*.toml."
        )
    return load_device(by_name[name])


def read_node_table(key: str) -> dict[str, Any]:
    """The fields of a built-in node's file."""
    return read_table(_DATA / "nodes" / f"{key}.toml")


def list_device_names() -> tuple[str, ...]:
    """Names of the built-in devices as drivers give them."""
    return tuple(_index_keys_by_name())


@cache
def _index_keys_by_name() -> dict[str, str]:
    also = {name: key for key in list_device_keys() for name in _read_sheet(key).get("also_named", ())}
    names = {load_device(key).name: key for key in list_device_keys()}
    return also | {name.removeprefix("NVIDIA "): key for name, key in names.items()} | names  # drivers before 2021


def _list_keys(folder: Traversable) -> tuple[str, ...]:
    return tuple(sorted(entry.name[:-5] for entry in folder.iterdir() if entry.name.endswith(".toml")))
