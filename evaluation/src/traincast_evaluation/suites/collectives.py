"""Collectives, predicted against measurements that took no part in fitting."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from traincast.costs.collectives.links import LinkModel
from traincast.costs.collectives.model import CollectiveModel, load_shipped_collectives
from traincast.hardware.platform import load_topology
from traincast.hardware.topology import Topology
from traincast.utils.arrays import FloatArray
from traincast.utils.errors import make_unknown_error
from traincast.utils.metrics import ErrorRow
from traincast_evaluation.fitting import collectives_data as tables
from traincast_evaluation.fitting import collectives_newer as newer
from traincast_evaluation.fitting.collectives import fit_model, read_points
from traincast_evaluation.fitting.collectives_data import Points
from traincast_evaluation.fitting.collectives_links import NODES, fit_node_coefficients
from traincast_evaluation.fitting.collectives_pairs import is_slow
from traincast_evaluation.suites.collective_rows import (
    iterate_point_groups,
    predict_points,
    predict_sets,
    scale_estimate,
    summarise_by_size,
    summarise_points,
)
from traincast_evaluation.suites.collectives_clusters import FILE as CLUSTERS_FILE
from traincast_evaluation.suites.collectives_clusters import evaluate_clusters
from traincast_evaluation.suites.collectives_newer import evaluate_newer_machines

_NODE_OF = {
    **NODES, **newer.NODES,
    "a100-vtrain": "dgx-a100", "v100": "dgx1-v100", "v100-pytorch": "dgx1-v100", "l40s": "pcie-l40s-no-peer",
}  # fmt: skip
_CLUSTER_ADAPTER_GBS = {"cluster00": 13.5, "cluster01": 50.0}  # GB/s between a pair of GPUs, as published with the data
_PAPER = {
    ("v100", "all_to_all"): "GMAE 6.28 (GV100)", ("v100", "all_reduce"): "GMAE 6.35 (GV100)",
    ("a100", "all_to_all"): "GMAE 5.25", ("a100", "all_reduce"): "GMAE 4.98",
}  # fmt: skip


def evaluate_collectives(
    data: Path, progress: Callable[[float], None] = lambda _: None, *, model: CollectiveModel | None = None
) -> list[ErrorRow]:
    """Every table: held-out sizes and, alongside them, fitted ones; held-out GPU counts, several nodes, machines never
    seen, and links alone.

    `model` is one fitted on the training share of `data` (default: the one that comes with the package).
    """
    model = model or load_shipped_collectives()
    points = read_points(data)
    progress(0.3)
    return [
        *evaluate_held_out_sizes(points, model),
        *evaluate_fitted_sizes(points, model),
        *evaluate_held_out_ranks(points),
        *evaluate_several_nodes(points, model),
        *evaluate_other_machine(data, model),
        *evaluate_links_alone(data, points, model),
        *evaluate_newer_machines(data, points, model),
        *(evaluate_clusters(data, model) if (data / CLUSTERS_FILE).is_file() else ()),
    ]


def evaluate_held_out_sizes(points: Points, model: CollectiveModel) -> list[ErrorRow]:
    """One node, message sizes nobody fitted: by machine, collective and size band."""
    apart = points.take(points.held_out & (points.nodes == 1))
    rows = []
    for machine, kind, group in iterate_point_groups(apart):
        estimate = predict_sets(model, group, _NODE_OF[machine])
        label = f"{machine} (with host floor)" if machine == "v100-pytorch" else machine
        rows += summarise_by_size(f"sizes: {label} {kind}", group, estimate, _PAPER.get((machine, kind), ""))
    return rows


def evaluate_fitted_sizes(points: Points, model: CollectiveModel) -> list[ErrorRow]:
    """The sizes that the curves were made from, by machine: what no curve can be better than, and no cases."""
    seen = points.take(~points.held_out & (points.nodes == 1))
    machines = np.array([str(name).split("@")[0] for name in seen.set])
    rows = []
    for machine in np.unique(machines):
        group = seen.take(machines == machine)
        estimate = predict_sets(model, group, _NODE_OF[str(machine)])
        rows.append(summarise_points(f"fitted sizes: {machine}", group, estimate).to_error_row())
    return rows


def evaluate_held_out_ranks(points: Points) -> list[ErrorRow]:
    """8 GPUs predicted from 2 and 4: by machine, collective and size band."""
    fewer = fit_model(points.take(np.isin(points.ranks, (2, 4)) | (points.nodes > 1)))
    wanted = np.array([str(name).split("@")[0] in _NODE_OF and str(name) in fewer.sets for name in points.set])
    eight = points.take(wanted & (points.ranks == 8) & (points.nodes == 1))
    rows = []
    for machine, kind, group in iterate_point_groups(eight):
        rows += summarise_by_size(
            f"8 GPUs from 2 and 4: {machine} {kind}", group, predict_sets(fewer, group, _NODE_OF[machine])
        )
    return rows


def evaluate_several_nodes(points: Points, model: CollectiveModel) -> list[ErrorRow]:
    """Two H100 clusters, held-out sizes: curves of the cluster, links alone, and the pairs found to be slow."""
    apart = points.take(points.held_out & (points.nodes > 1))
    slow = is_slow(apart, model.provenance["slow_pairs"])
    rows: list[ErrorRow] = []
    for cluster, kind, group in iterate_point_groups(apart.take(~slow)):
        topology = load_cluster_topology(cluster)
        rows.append(summarise_points(f"nodes: {cluster} {kind}", group, predict_points(model, group, topology)))
        alone = predict_points(model, group, replace(topology, curves="h100"))
        rows.append(summarise_points(f"nodes, adapters' rate only: {cluster} {kind}", group, alone))
    for cluster, kind, group in iterate_point_groups(apart.take(slow)):
        factor = _compute_slowdowns(group, model)
        healthy = predict_points(model, group, load_cluster_topology(cluster))
        rows.append(summarise_points(f"slow pairs, as if healthy: {cluster} {kind}", group, healthy))
        rows.append(
            summarise_points(
                f"slow pairs, with their slowdown: {cluster} {kind}", group, scale_estimate(healthy, factor)
            )
        )
    return rows


def evaluate_other_machine(data: Path, model: CollectiveModel) -> list[ErrorRow]:
    """H100 nodes of another cluster, never fitted: 32 MB to 16 GB, the larger ones beyond the curves."""
    points = tables.read_cluster_points(data)
    points = points.take((points.nodes == 1) & (points.kind != "send_recv"))
    topology = load_topology("dgx-h100")
    return [
        summarise_points(f"another H100 machine: {kind}", group, predict_points(model, group, topology))
        for _, kind, group in iterate_point_groups(points)
    ]


def evaluate_links_alone(data: Path, points: Points, model: CollectiveModel) -> list[ErrorRow]:
    """Unknown machines from their links: each device with the others' coefficients, and PCIe servers nobody fitted."""
    rows = []
    machines = np.array([str(name).split("@")[0] for name in points.set])
    switched = np.isin(machines, list(NODES)) & (points.dtype != "int") & (points.kind != "send_recv")
    for device in NODES:
        node = fit_node_coefficients(points.take(switched & ~points.held_out & (machines != device)))
        links = LinkModel(node=node, network=model.links.network, sigma=0.0, network_sigma=0.0)
        unmeasured = CollectiveModel(sets={}, links=links, ranks_sigma=0.0)
        topology = replace(load_topology(NODES[device]), curves="")
        group = points.take(switched & (machines == device))
        rows += summarise_by_size(f"links only: {device}", group, predict_points(unmeasured, group, topology))
    mesh = replace(load_topology("dgx1-v100"), curves="")
    group = points.take(machines == "v100")
    rows += summarise_by_size("links only: v100 cube mesh, 2 to 8 GPUs", group, predict_points(model, group, mesh))
    pairs = tables.read_pair_points(data)
    for server, _, group in iterate_point_groups(pairs):
        rows += summarise_by_size(
            f"links only: {server}, 4 GPUs", group, predict_points(model, group, load_topology(server))
        )
    return rows


def load_cluster_topology(name: str) -> Topology:
    """The measured H100 clusters: DGX-like nodes, one adapter per GPU."""
    if name not in _CLUSTER_ADAPTER_GBS:
        raise make_unknown_error("cluster", name, _CLUSTER_ADAPTER_GBS, f"Known are {', '.join(_CLUSTER_ADAPTER_GBS)}.")
    rate = 1e9 * _CLUSTER_ADAPTER_GBS[name]
    return replace(load_topology("dgx-h100"), key=name, adapter_bandwidth=rate, curves=f"h100+{name}")


def _compute_slowdowns(points: Points, model: CollectiveModel) -> FloatArray:
    entries: dict[str, list[dict[str, Any]]] = model.provenance["slow_pairs"]
    known = {(name, e["kind"], e["ranks"], e["pair"]): e["slowdown"] for name, es in entries.items() for e in es}
    rows = zip(points.set, points.kind, points.ranks, points.pair, strict=True)
    return np.array([known[name, kind, int(ranks), pair] for name, kind, ranks, pair in rows])
