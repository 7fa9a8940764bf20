"""A GPU in its surroundings: built in (one file each under `data/`), or described in a file of the user's; and what
joins several."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from traincast.hardware.device import Device
from traincast.hardware.sheet import USER_FILES, check_known_fields, make_device, read_positive_number, read_table
from traincast.hardware.topology import PCIE_GBS, Topology, apply_device_corrections, make_topology
from traincast.utils.errors import TraincastError, make_unknown_error

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
        raise make_unknown_error("device", name, by_name, "A file with its data sheet tells it: see 'platforms'.")
    return load_device(by_name[name])


_NAMELESS = "AMD Radeon Graphics"  # what AMD's driver calls a board that it has no name for
_OTHER_MEMORY = 0.15  # more than drivers keep for themselves


def find_driver_name(properties: Mapping[str, Any]) -> str:
    """The name in the properties that PyTorch lists of a device; for a nameless board of AMD's that of the first sheet
    with as many units and as much memory."""
    name, units, memory = (properties.get(field, "") for field in ("name", "numSms", "totalGlobalMem"))
    if name != _NAMELESS or not isinstance(memory, int):
        return str(name)
    sheets = (device for device in map(load_device, list_device_keys()) if device.vendor == "amd")
    alike = (d for d in sheets if d.num_sms == units and abs(memory / d.memory_bytes - 1.0) < _OTHER_MEMORY)
    return next((device.name for device in alike), _NAMELESS)


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


CORRECTIONS = (0.05, 20.0)
"""The least and the most that measurements correct a model by; beyond, they are of something else."""


_MOST_REFINED = 8  # files, each a correction of the next


@dataclass(frozen=True, kw_only=True)
class Platform:
    """A device in its surroundings: how many of them a node holds, and the links between them.

    `topology` is None for a device that nothing was said about: it can only be predicted alone. `assumed` is what
    was made up about the links, in words ("": nothing).
    """

    key: str
    device: Device
    gpus_per_node: int = 1
    topology: Topology | None = None
    assumed: str = ""

    def get_device_when_sharing(self, gpus: int) -> Device:
        """Its device when `gpus` of them work at once: neighbours may share a link to the host."""
        sharers = self.topology.count_host_sharers(gpus) if self.topology is not None else 1
        return replace(self.device, host_sharers=sharers) if sharers > 1 else self.device

    def with_device(self, device: Device) -> Platform:
        """This node with other GPUs; its host stays."""
        return replace(self, device=replace(device, host=self.device.host))

    def with_power_limit(self, watts: float) -> Platform:
        """This platform with the boards of its devices limited to this power."""
        return replace(self, device=self.device.with_power_limit(watts))

    def with_clock(self, clock_mhz: float) -> Platform:
        """This platform with the SM clock of its devices locked."""
        return replace(self, device=self.device.with_clock(clock_mhz))


def load_platform(name: str, *, depth: int = 0) -> Platform:
    """A built-in platform by its key, or one described in a TOML or YAML file of the user's.

    `depth` is how many files refine the one that is read, each by corrections of its own.
    """
    if name.endswith(USER_FILES):
        path = _check_user_file(name, "platform", "device or node")
        table = read_table(path)
        if "refines" in table:
            return _apply_corrections(path.stem, table, depth)
        if "device" not in table:
            return Platform(key=path.stem, device=make_device(path.stem, table))
        return _make_node_platform(path.stem, table, path.parent)
    if name in list_node_keys():
        return _make_node_platform(name, read_node_table(name))
    if name in list_device_keys():
        return Platform(key=name, device=load_device(name))
    if name == "here":
        raise TraincastError(
            "`on='here'` is this machine's CPU, which `predict` takes; here choose one of 'traincast platforms'"
        )
    remedy = "See 'traincast platforms', or describe yours in a .toml file."
    if re.fullmatch(r"\d+ ?x.+|.+x ?\d+", name.lower()):
        remedy = f"`gpus` says how many. {remedy}"
    raise make_unknown_error("platform", name, list_platform_keys(), remedy)


def _apply_corrections(key: str, table: dict[str, Any], depth: int) -> Platform:
    """A built-in platform with corrections of the time of its kernels, its host and its collectives."""
    check_known_fields(key, table, ("refines", "source", "corrections"))
    factors = table.get("corrections")
    if not isinstance(factors, dict) or not factors:
        raise TraincastError(f"platform '{key}' refines another but has no [corrections]; write it again")
    known = {family: read_positive_number(key, factors, family) for family in factors}
    least, most = CORRECTIONS
    wild = [family for family, factor in known.items() if not least <= factor <= most]
    if wild:
        raise TraincastError(f"platform '{key}' corrects '{wild[0]}' by {known[wild[0]]:g}; give {least:g} to {most:g}")
    if depth >= _MOST_REFINED:
        raise TraincastError(
            f"platform '{key}' refines a file that refines a file, more than {_MOST_REFINED} deep; name a built-in "
            "platform in 'refines'"
        )
    base = load_platform(str(table["refines"]), depth=depth + 1)
    held = dict(base.device.corrections)
    whole = {**held, **{family: held.get(family, 1.0) * factor for family, factor in known.items()}}
    refined = replace(base, key=key, device=replace(base.device, corrections=whole))
    return (
        refined
        if base.topology is None
        else replace(refined, topology=apply_device_corrections(base.topology, refined.device))
    )


def load_topology(name: str) -> Topology:
    """The topology of a built-in node by its key, or of a node described in a TOML or YAML file of the user's."""
    if name.endswith(USER_FILES):
        path = _check_user_file(name, "topology", "node")
        table = read_table(path)
        topology = make_topology(path.stem, table, _find_device(table, path.parent))
        _check_curves(topology)
        return topology
    if name in list_device_keys():
        raise TraincastError(
            f"'{name}' is one GPU and says nothing of links; name a node ({', '.join(list_node_keys())}) or describe "
            "yours"
        )
    if name not in list_node_keys():
        raise make_unknown_error(
            "topology", name, list_node_keys(), "See 'traincast platforms', or describe yours in a .yaml file."
        )
    table = read_node_table(name)
    return make_topology(name, table, _find_device(table))


def _check_user_file(name: str, kind: str, content: str) -> Path:
    path = Path(name)
    if not path.exists():  # what else it may be is said where it is read
        raise TraincastError(f"{kind} file '{name}' does not exist; give a {content} description in TOML or YAML")
    return path


def _make_node_platform(key: str, table: dict[str, Any], folder: Path | None = None) -> Platform:
    device = _find_device(table, folder)
    assert device is not None
    device = replace(device, host=str(table.get("host", device.host)))
    topology = make_topology(key, table, device)
    if folder is not None:
        _check_curves(topology)
    return Platform(key=key, device=device, gpus_per_node=topology.gpus_per_node, topology=topology)


def _find_device(table: dict[str, Any], folder: Path | None = None) -> Device | None:
    """The device that a node's table names: built in, or the user's own in a file alongside the node's."""
    if "device" not in table:
        return None
    name = table["device"]
    if not isinstance(name, str):
        raise TraincastError(
            "'device' of a node is the name of a GPU; fields of a GPU of your own (name, memory_gb, ...) stand at the "
            "top of a file of their own"
        )
    if folder is None or not name.endswith(USER_FILES):
        return load_device(name)
    path = _check_user_file(str(folder / name), "device", "device")
    return make_device(path.stem, read_table(path))


def _check_curves(topology: Topology) -> None:
    """Rejects measured curves alongside links that are not those of the node they were measured on.

    Curves stand for the links inside a node, so the file's own figures would do nothing. A name is that of a node's
    curves, perhaps of one version (`h100@2.23`) or of several sets (`h100+cluster01`).
    """
    names = {part.split("@")[0] for part in topology.curves.split("+")}
    for key in list_node_keys():
        measured = load_topology(key)
        field = topology.find_differing_field(measured) if names & set(measured.curves.split("+")) - {""} else ""
        if field:
            raise TraincastError(
                f"platform '{topology.key}': its '{field}' is not that of {key}, where curves '{measured.curves}' were "
                f"measured; leave out 'curves' to predict from the links, or give the '{field}' of {key}"
            )


# a usual server where the sheet says nothing: eight GPUs, 100 Gb/s Ethernet for every four of them
_SERVER_GPUS = 8
_FABRIC = 400e9  # both directions; a slower NVLink is a bridge between two cards, which a server may or may not have
_ADAPTER_GBS = 12.5
_GPUS_PER_ADAPTER = 4


def add_default_links(platform: Platform) -> Platform:
    """The platform with a topology; where it had none, `assumed` says which was taken.

    A device file may name the node it is usual in. Otherwise it is eight to a server: joined by NVLink if that is
    fast enough to be a fabric, else by PCIe, and to other servers by 100 Gb/s for four GPUs.
    """
    if platform.topology is not None:
        return platform
    device = platform.device
    if device.node:
        if device.node not in list_node_keys():
            raise TraincastError(
                f"platform '{platform.key}' names node '{device.node}'; known are {', '.join(list_node_keys())}"
            )
        topology = load_topology(device.node)
        assumed = f"{platform.key} is one GPU; several are taken to be joined as in {device.node} (name a node instead)"
    else:
        topology = _make_default_server(device)
        kind = "its own links" if topology.island > 1 else f"PCIe {device.pcie_gen}"
        assumed = (
            f"{platform.key} is one GPU; several are taken to be {_SERVER_GPUS} to a server, joined by {kind} at "
            f"{topology.link_bandwidth / 1e9:g} GB/s (describe yours in a .yaml file)"
        )
    joined = apply_device_corrections(topology, device)
    return replace(platform, gpus_per_node=topology.gpus_per_node, topology=joined, assumed=assumed)


def _make_default_server(device: Device) -> Topology:
    host = 1e9 * PCIE_GBS.get(device.pcie_gen, PCIE_GBS[4])
    fabric = device.nvlink_bandwidth >= _FABRIC
    return Topology(
        key=f"{device.key}-server",
        gpus_per_node=_SERVER_GPUS,
        island=_SERVER_GPUS if fabric else 1,
        link_bandwidth=device.nvlink_bandwidth / 2 if fabric else host,
        host_bandwidth=host,
        adapters=_SERVER_GPUS // _GPUS_PER_ADAPTER,
        adapter_bandwidth=1e9 * _ADAPTER_GBS,
    )
