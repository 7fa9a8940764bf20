"""Reading device and node descriptions. Adding a GPU is adding a file."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from traincast.errors import TraincastError, unknown
from traincast.platform.device import Device
from traincast.platform.files import USER_FILES, read_table
from traincast.platform.sheet import device_from

if TYPE_CHECKING:
    from traincast.platform.topology import Topology

_DATA = files("traincast.platform") / "data"


@dataclass(frozen=True, kw_only=True)
class Platform:
    """A device in its surroundings: how many of them a node holds, and the links between them.

    `topology` is None for a device that nothing was said about: it can only be predicted alone.
    """

    key: str
    device: Device
    gpus_per_node: int = 1
    topology: Topology | None = None

    def at_clock(self, clock_mhz: float) -> Platform:
        """This platform with the SM clock of its devices locked."""
        return replace(self, device=self.device.at_clock(clock_mhz))


def load_platform(name: str) -> Platform:
    """A built-in platform by its key, or one described in a TOML or YAML file of the user's."""
    if name.endswith(USER_FILES):
        path = Path(name)
        if not path.is_file():
            raise TraincastError(
                f"platform file '{name}' does not exist; give a device or node description in TOML or YAML"
            )
        return _platform_from(path.stem, read_table(path))
    if name in node_keys():
        return _platform_from(name, read_table(_DATA / "nodes" / f"{name}.toml"))
    if name in device_keys():
        return Platform(key=name, device=load_device(name))
    if name == "here":
        raise TraincastError("--on here: measuring this machine is not built yet; choose one of 'traincast platforms'")
    raise unknown("platform", name, platform_keys(), "See 'traincast platforms', or describe yours in a .toml file.")


@cache
def load_device(key: str) -> Device:
    """A built-in device by its key, e.g. `v100`."""
    if key not in device_keys():
        raise unknown("device", key, device_keys(), "See 'traincast platforms'.")
    return device_from(key, read_table(_DATA / "devices" / f"{key}.toml"))


def device_by_name(name: str) -> Device:
    """The built-in device that `torch.cuda.get_device_name()` calls `name`."""
    by_name = _keys_by_name()
    if name not in by_name:
        raise unknown("device", name, by_name, "Add its data sheet to the package: platform/data/devices/*.toml.")
    return load_device(by_name[name])


@cache
def device_keys() -> tuple[str, ...]:
    """Keys of the built-in devices."""
    return _keys(_DATA / "devices")


@cache
def node_keys() -> tuple[str, ...]:
    """Keys of the built-in nodes."""
    return _keys(_DATA / "nodes")


def platform_keys() -> tuple[str, ...]:
    """Everything `--on` accepts by name."""
    return (*device_keys(), *node_keys())


@cache
def _keys_by_name() -> dict[str, str]:
    return {load_device(key).name: key for key in device_keys()}


def _keys(folder: Traversable) -> tuple[str, ...]:
    return tuple(sorted(entry.name[:-5] for entry in folder.iterdir() if entry.name.endswith(".toml")))


def _platform_from(key: str, table: dict[str, Any]) -> Platform:
    if "device" not in table:
        return Platform(key=key, device=device_from(key, table))
    from traincast.platform.topology import topology_from

    device = load_device(str(table["device"]))
    topology = topology_from(key, table)
    return Platform(key=key, device=device, gpus_per_node=topology.gpus_per_node, topology=topology)
