"""A GPU in its surroundings: named, or described in a file of the user's."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from traincast.hardware.catalog import device_keys, load_device, node_keys, node_table, platform_keys
from traincast.hardware.device import Device
from traincast.hardware.files import USER_FILES, known_fields, number, read_table
from traincast.hardware.sheet import device_from
from traincast.hardware.topology import Topology, corrected, topology_from
from traincast.utils.errors import TraincastError, unknown

CORRECTIONS = (0.05, 20.0)
"""The least and the most that measurements correct a model by; beyond, they are of something else."""


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

    def device_among(self, gpus: int) -> Device:
        """Its device when `gpus` of them work at once: neighbours may share a link to the host."""
        sharers = self.topology.host_sharers(gpus) if self.topology is not None else 1
        return replace(self.device, host_sharers=sharers) if sharers > 1 else self.device

    def at_clock(self, clock_mhz: float) -> Platform:
        """This platform with the SM clock of its devices locked."""
        return replace(self, device=self.device.at_clock(clock_mhz))


def load_platform(name: str) -> Platform:
    """A built-in platform by its key, or one described in a TOML or YAML file of the user's."""
    if name.endswith(USER_FILES):
        path = _user_file(name, "platform", "device or node")
        table = read_table(path)
        if "refines" in table:
            return _refined(path.stem, table)
        if "device" not in table:
            return Platform(key=path.stem, device=device_from(path.stem, table))
        return _node(path.stem, table, path.parent)
    if name in node_keys():
        return _node(name, node_table(name))
    if name in device_keys():
        return Platform(key=name, device=load_device(name))
    if name == "here":
        raise TraincastError(
            "`on='here'` is this machine's CPU, which `predict` takes; here choose one of 'traincast platforms'"
        )
    raise unknown("platform", name, platform_keys(), "See 'traincast platforms', or describe yours in a .toml file.")


def _refined(key: str, table: dict[str, Any]) -> Platform:
    """A built-in platform with corrections of the time of its kernels, its host and its collectives."""
    known_fields(key, table, ("refines", "source", "corrections"))
    factors = table.get("corrections")
    if not isinstance(factors, dict) or not factors:
        raise TraincastError(f"platform '{key}' refines another but has no [corrections]; write it again")
    known = {family: number(key, factors, family) for family in factors}
    least, most = CORRECTIONS
    wild = [family for family, factor in known.items() if not least <= factor <= most]
    if wild:
        raise TraincastError(f"platform '{key}' corrects '{wild[0]}' by {known[wild[0]]:g}; give {least:g} to {most:g}")
    base = load_platform(str(table["refines"]))
    held = dict(base.device.corrections)
    whole = {**held, **{family: held.get(family, 1.0) * factor for family, factor in known.items()}}
    refined = replace(base, key=key, device=replace(base.device, corrections=whole))
    return refined if base.topology is None else replace(refined, topology=corrected(base.topology, refined.device))


def load_topology(name: str) -> Topology:
    """The topology of a built-in node by its key, or of a node described in a TOML or YAML file of the user's."""
    if name.endswith(USER_FILES):
        path = _user_file(name, "topology", "node")
        table = read_table(path)
        topology = topology_from(path.stem, table, _device_of(table, path.parent))
        _check_curves(topology)
        return topology
    if name in device_keys():
        raise TraincastError(
            f"'{name}' is one GPU and says nothing of links; name a node ({', '.join(node_keys())}) or describe yours"
        )
    if name not in node_keys():
        raise unknown("topology", name, node_keys(), "See 'traincast platforms', or describe yours in a .yaml file.")
    table = node_table(name)
    return topology_from(name, table, _device_of(table))


def _user_file(name: str, kind: str, content: str) -> Path:
    path = Path(name)
    if not path.is_file():
        raise TraincastError(f"{kind} file '{name}' does not exist; give a {content} description in TOML or YAML")
    return path


def _node(key: str, table: dict[str, Any], folder: Path | None = None) -> Platform:
    device = _device_of(table, folder)
    assert device is not None
    topology = topology_from(key, table, device)
    if folder is not None:
        _check_curves(topology)
    return Platform(key=key, device=device, gpus_per_node=topology.gpus_per_node, topology=topology)


def _device_of(table: dict[str, Any], folder: Path | None = None) -> Device | None:
    """The device that a node's table names: built in, or the user's own in a file beside the node's."""
    if "device" not in table:
        return None
    name = str(table["device"])
    if folder is None or not name.endswith(USER_FILES):
        return load_device(name)
    path = _user_file(str(folder / name), "device", "device")
    return device_from(path.stem, read_table(path))


def _check_curves(topology: Topology) -> None:
    """Refuses measured curves beside links that are not those of the node they were measured on.

    Curves stand for the links inside a node, so the file's own figures would do nothing. A name is that of a node's
    curves, perhaps of one version (`h100@2.23`) or of several sets (`h100+cluster01`).
    """
    names = {part.split("@")[0] for part in topology.curves.split("+")}
    for key in node_keys():
        measured = load_topology(key)
        field = topology.joined_like(measured) if names & set(measured.curves.split("+")) - {""} else ""
        if field:
            raise TraincastError(
                f"platform '{topology.key}': its '{field}' is not that of {key}, where curves '{measured.curves}' were "
                f"measured; leave out 'curves' to predict from the links, or give the '{field}' of {key}"
            )
