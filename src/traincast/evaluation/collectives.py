"""Collectives, predicted against measurements that took no part in fitting."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from traincast.arrays import FloatArray
from traincast.collectives.calls import COLLECTIVE
from traincast.collectives.curve import SMALL_BYTES
from traincast.collectives.links import LinkModel
from traincast.collectives.model import CollectiveModel, shipped_collectives
from traincast.errors import unknown
from traincast.fitting import collectives_data as tables
from traincast.fitting.collectives import fit_model, read_points
from traincast.fitting.collectives_data import Points
from traincast.fitting.collectives_links import NODES, node_coefficients
from traincast.fitting.collectives_pairs import is_slow
from traincast.kernels.call import Calls
from traincast.measurements.metrics import ErrorRow, error_row
from traincast.platform.platform import load_topology
from traincast.platform.topology import Topology

SUITE = "collectives"
_NODE_OF = {**NODES, "a100-vtrain": "dgx-a100", "v100": "dgx1-v100", "v100-pytorch": "dgx1-v100"}
_CLUSTER_ADAPTER_GBS = {"cluster00": 13.5, "cluster01": 50.0}  # GB/s between a pair of GPUs, as published with the data
_PAPER = {
    ("v100", "all_to_all"): "GMAE 6.28 (GV100)", ("v100", "all_reduce"): "GMAE 6.35 (GV100)",
    ("a100", "all_to_all"): "GMAE 5.25", ("a100", "all_reduce"): "GMAE 4.98",
}  # fmt: skip


def evaluate_collectives(
    data: Path, progress: Callable[[float], None] = lambda _: None, *, model: CollectiveModel | None = None
) -> list[ErrorRow]:
    """Every table: held-out sizes, held-out GPU counts, several nodes, a machine never seen, and links alone.

    `model` is one fitted on the training share of `data` (default: the one that comes with the package).
    """
    model = model or shipped_collectives()
    points = read_points(data)
    progress(0.3)
    return [
        *held_out_sizes(points, model),
        *held_out_ranks(points),
        *several_nodes(points, model),
        *other_machine(data, model),
        *links_alone(data, points, model),
    ]


def held_out_sizes(points: Points, model: CollectiveModel) -> list[ErrorRow]:
    """One node, message sizes nobody fitted: by machine, collective and size band."""
    apart = points.take(points.held_out & (points.nodes == 1))
    rows = []
    for machine, kind, group in _groups(apart):
        seconds = _predict_sets(model, group, _NODE_OF[machine])
        label = f"{machine} (with host floor)" if machine == "v100-pytorch" else machine
        rows += _bands(f"sizes: {label} {kind}", group, seconds, _PAPER.get((machine, kind), ""))
    return rows


def held_out_ranks(points: Points) -> list[ErrorRow]:
    """8 GPUs predicted from 2 and 4: by machine, collective and size band."""
    fewer = fit_model(points.take(np.isin(points.ranks, (2, 4)) | (points.nodes > 1)))
    wanted = np.array([str(name).split("@")[0] in _NODE_OF for name in points.set])
    eight = points.take(wanted & (points.ranks == 8) & (points.nodes == 1))
    rows = []
    for machine, kind, group in _groups(eight):
        rows += _bands(f"8 GPUs from 2 and 4: {machine} {kind}", group, _predict_sets(fewer, group, _NODE_OF[machine]))
    return rows


def several_nodes(points: Points, model: CollectiveModel) -> list[ErrorRow]:
    """Two H100 clusters, held-out sizes: curves of the cluster, links alone, and the pairs found to be slow."""
    apart = points.take(points.held_out & (points.nodes > 1))
    slow = is_slow(apart, model.provenance["slow_pairs"])
    rows = []
    for cluster, kind, group in _groups(apart.take(~slow)):
        topology = cluster_topology(cluster)
        rows.append(_row(f"nodes: {cluster} {kind}", group, _predict(model, group, topology)))
        alone = _predict(model, group, replace(topology, curves="h100"))
        rows.append(_row(f"nodes, adapters' rate only: {cluster} {kind}", group, alone))
    for cluster, kind, group in _groups(apart.take(slow)):
        factor = _slowdowns(group, model)
        seconds = _predict(model, group, cluster_topology(cluster))
        rows.append(_row(f"slow pairs, as if healthy: {cluster} {kind}", group, seconds))
        rows.append(_row(f"slow pairs, with their slowdown: {cluster} {kind}", group, seconds * factor))
    return rows


def other_machine(data: Path, model: CollectiveModel) -> list[ErrorRow]:
    """H100 nodes of another cluster, never fitted: 32 MB to 16 GB, the larger ones beyond the curves."""
    points = tables.clusters(data)
    points = points.take((points.nodes == 1) & (points.kind != "send_recv"))
    topology = load_topology("dgx-h100")
    return [
        _row(f"another H100 machine: {kind}", group, _predict(model, group, topology))
        for _, kind, group in _groups(points)
    ]


def links_alone(data: Path, points: Points, model: CollectiveModel) -> list[ErrorRow]:
    """Unknown machines from their links: each device with the others' coefficients, and PCIe servers nobody fitted."""
    rows = []
    machines = np.array([str(name).split("@")[0] for name in points.set])
    switched = np.isin(machines, list(NODES)) & (points.dtype != "int") & (points.kind != "send_recv")
    for device in NODES:
        node = node_coefficients(points.take(switched & ~points.held_out & (machines != device)))
        links = LinkModel(node=node, network=model.links.network, sigma=0.0, network_sigma=0.0)
        unmeasured = CollectiveModel(sets={}, links=links, ranks_sigma=0.0)
        topology = replace(load_topology(NODES[device]), curves="")
        group = points.take(switched & (machines == device))
        rows += _bands(f"links only: {device}", group, _predict(unmeasured, group, topology))
    mesh = replace(load_topology("dgx1-v100"), curves="")
    group = points.take(machines == "v100")
    rows += _bands("links only: v100 cube mesh, 2 to 8 GPUs", group, _predict(model, group, mesh))
    single = tables.single_node(data)
    poor = single.take(np.array([str(name).startswith("l40s") for name in single.set]) & (single.ranks == 2))
    rows += _bands("links only: l40s (poor node), 2 GPUs", poor, _predict(model, poor, load_topology("pcie-l40s")))
    pairs = tables.pairs_all_reduce(data)
    for server, _, group in _groups(pairs):
        rows += _bands(f"links only: {server}, 4 GPUs", group, _predict(model, group, load_topology(server)))
    return rows


def cluster_topology(name: str) -> Topology:
    """The measured H100 clusters: DGX-like nodes, one adapter per GPU."""
    if name not in _CLUSTER_ADAPTER_GBS:
        raise unknown("cluster", name, _CLUSTER_ADAPTER_GBS, f"Known are {', '.join(_CLUSTER_ADAPTER_GBS)}.")
    rate = 1e9 * _CLUSTER_ADAPTER_GBS[name]
    return replace(load_topology("dgx-h100"), key=name, adapter_bandwidth=rate, curves=f"h100+{name}")


def _predict_sets(model: CollectiveModel, points: Points, node: str) -> FloatArray:
    """Predictions, each point with the curves of its own library version."""
    seconds = np.zeros(len(points))
    for name in np.unique(points.set.astype(str)):
        rows = points.set == name
        seconds[rows] = _predict(model, points.take(rows), replace(load_topology(node), curves=str(name)))
    return seconds


def _predict(model: CollectiveModel, points: Points, topology: Topology) -> FloatArray:
    compute = ["int8" if dtype == "int" else "fp16" for dtype in points.dtype]
    values = np.stack([points.bytes, points.ranks, points.nodes], axis=1)
    kinds = [str(kind) for kind in points.kind]
    return model.predict(Calls.from_columns(COLLECTIVE, kinds, compute, values), topology).seconds


def _slowdowns(points: Points, model: CollectiveModel) -> FloatArray:
    entries: dict[str, list[dict[str, Any]]] = model.provenance["slow_pairs"]
    known = {(name, e["kind"], e["ranks"], e["pair"]): e["slowdown"] for name, es in entries.items() for e in es}
    rows = zip(points.set, points.kind, points.ranks, points.pair, strict=True)
    return np.array([known[name, kind, int(ranks), pair] for name, kind, ranks, pair in rows])


def _groups(points: Points) -> Iterator[tuple[str, str, Points]]:
    machines: npt.NDArray[Any] = np.array([str(name).split("@")[0] for name in points.set])
    for machine in np.unique(machines):
        of_machine = points.take(machines == machine)
        for kind in np.unique(of_machine.kind.astype(str)):
            yield str(machine), str(kind), of_machine.take(of_machine.kind == kind)


def _bands(label: str, points: Points, seconds: FloatArray, reference: str = "") -> list[ErrorRow]:
    rows = []
    for band, inside in (("up to 64 KiB", points.bytes <= SMALL_BYTES), ("above 64 KiB", points.bytes > SMALL_BYTES)):
        if inside.any():
            rows.append(_row(f"{label}, {band}", points.take(inside), seconds[inside], reference))
    return rows


def _row(label: str, points: Points, seconds: FloatArray, reference: str = "") -> ErrorRow:
    columns = zip(points.set, points.bytes, points.ranks, points.nodes, points.pair, strict=True)
    names = [f"{name} {size:.0f} B {n:.0f}x{nodes:.0f} {pair}".rstrip() for name, size, n, nodes, pair in columns]
    return error_row(SUITE, label, seconds, points.seconds, names, reference)
