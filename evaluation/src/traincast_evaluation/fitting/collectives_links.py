"""Link coefficients: few numbers shared by all machines, found by non-negative least squares on relative errors."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np

from traincast.costs.collectives.links import (
    LinkModel,
    NetworkCoefficients,
    NodeCoefficients,
    count_ring_steps,
    estimate_network_seconds,
    get_bus_factor,
    get_node_bandwidth,
    name_measured_kind,
    runs_on_ring,
)
from traincast.costs.collectives.model import CollectiveModel, CurveSet
from traincast.costs.kernels.collective import COLLECTIVE
from traincast.hardware.platform import load_topology
from traincast.hardware.topology import Topology
from traincast.utils.arrays import FloatArray
from traincast.utils.errors import TraincastError
from traincast_evaluation.fitting.collectives_curves import fit_curve_sets
from traincast_evaluation.fitting.collectives_data import Points
from traincast_evaluation.solve import solve_nonnegative

NODES = {"a100": "dgx-a100", "h100": "dgx-h100", "h200": "hgx-h200", "b200": "hgx-b200"}
KINDS = tuple(kind for kind in COLLECTIVE.kinds if name_measured_kind(kind) == kind)
NETWORK_SET, NETWORK_NODE = "cluster01", "dgx-h100"
_SPANS = (0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 1.0)  # `NetworkCoefficients.span`, tried one by one


def fit_links(points: Points, sets: dict[str, CurveSet]) -> LinkModel:
    """Coefficients inside a node (all devices pooled) and across nodes (the H100 cluster with one adapter a GPU)."""
    node = fit_node_coefficients(points)
    inside = LinkModel(node=node, network={}, sigma=_leave_one_device_out(points), network_sigma=0.0)
    network, errors = {}, []
    for kind in KINDS:
        network[kind], error = _fit_network(points, kind, CollectiveModel(sets=sets, links=inside, ranks_sigma=0.0))
        errors.append(error)
    # one cluster cannot tell how clusters differ: its own spread and that of unknown links, together
    spread = float(np.sqrt(np.mean(np.concatenate(errors) ** 2))) if errors else 0.0
    return LinkModel(node=node, network=network, sigma=inside.sigma, network_sigma=float(np.hypot(spread, 0.2)))


def fit_node_coefficients(points: Points) -> dict[str, NodeCoefficients]:
    """Coefficients inside a node from the switched machines among these points."""
    return {kind: _fit_node(_select_kind(points, kind), kind) for kind in KINDS}


def compute_ranks_spread(points: Points) -> float:
    """Spread of log time when 8 GPUs are predicted from 2 and 4."""
    fewer = fit_curve_sets(points.take((points.ranks < 8) & (points.nodes == 1)))
    links = LinkModel(node=fit_node_coefficients(points), network={}, sigma=0.0, network_sigma=0.0)
    model = CollectiveModel(sets=fewer, links=links, ranks_sigma=0.0)
    eight = points.take((points.ranks == 8) & (points.nodes == 1))
    errors = []
    for name in sorted(set(eight.set)):
        device = str(name).split("@")[0]
        if device not in NODES:
            continue
        topology = load_topology(NODES[device])
        for kind in KINDS:
            for dtype in sorted(set(eight.dtype)):
                group = eight.take((eight.set == name) & (eight.kind == kind) & (eight.dtype == dtype))
                places = {n: c for (n, _), c in fewer.get(str(name), {}).get((kind, str(dtype)), {}).items()}
                if len(group) and places:
                    seconds = model.other_ranks(kind, group.bytes, 8, places, topology)[0]
                    errors.append(np.clip(np.log(seconds / group.seconds), -0.7, 0.7))
    return float(np.sqrt(np.mean(np.concatenate(errors) ** 2))) if errors else 0.15


def _select_kind(points: Points, kind: str) -> Points:
    machines = np.array([str(name).split("@")[0] in NODES for name in points.set])
    return points.take(machines & (points.kind == kind) & (points.dtype != "int") & (points.nodes == 1))


def _build_link_features(points: Points, kind: str) -> FloatArray:
    rows = []
    for name, ranks, size in zip(points.set, points.ranks, points.bytes, strict=True):
        topology = load_topology_of(str(name))
        x = size * get_bus_factor(kind, int(ranks)) / get_node_bandwidth(kind, int(ranks), topology)
        rows.append((1.0, count_ring_steps(kind, int(ranks)) * topology.link_latency, np.sqrt(x), x))
    return np.array(rows)


def load_topology_of(name: str) -> Topology:
    """The node a curve set was measured in."""
    return _load_node_of_device(name.split("@")[0])


@cache
def _load_node_of_device(device: str) -> Topology:
    return load_topology(NODES[device])


def _fit_node(points: Points, kind: str) -> NodeCoefficients:
    if not len(points):
        raise TraincastError(
            f"the tables have no {kind} on one node of {', '.join(NODES)} that may be fitted; give the whole tables"
        )
    launch, hops, ramp, slowdown = _solve_link_times(_build_link_features(points, kind), points.seconds)
    return NodeCoefficients(launch=launch, hops=hops, ramp=ramp, slowdown=slowdown)


def _leave_one_device_out(points: Points) -> float:
    """Spread of log time on a device whose measurements took no part."""
    errors = []
    for kind in KINDS:
        group = _select_kind(points, kind)
        machines = np.array([str(name).split("@")[0] for name in group.set])
        for machine in np.unique(machines):
            rest, left_out = group.take(machines != machine), group.take(machines == machine)
            if len(rest):
                solution = _solve_link_times(_build_link_features(rest, kind), rest.seconds)
                errors.append(np.log(_build_link_features(left_out, kind) @ solution / left_out.seconds))
    return float(np.sqrt(np.mean(np.clip(np.concatenate(errors), -1, 1) ** 2))) if errors else 0.3


def _fit_network(points: Points, kind: str, model: CollectiveModel) -> tuple[NetworkCoefficients, FloatArray]:
    rows = (points.set == NETWORK_SET) & (points.kind == kind) & (points.nodes > 1)
    group = points.take(rows)
    topology = load_topology(NETWORK_NODE)
    if not len(group):
        return NetworkCoefficients(hops=1.0, slowdown=1.0, span=0.9), np.zeros(0)
    best: tuple[float, NetworkCoefficients, FloatArray] | None = None
    for span in _SPANS if runs_on_ring(kind) else (1.0,):
        features = _build_network_features(group, kind, topology, model, span)
        base = features[:, 0]
        hops, slowdown = _solve_link_times(features[:, 1:], group.seconds - base, group.seconds)
        error = np.log((base + features[:, 1:] @ [hops, slowdown]) / group.seconds)
        score = float(np.mean(np.abs(error)))
        if best is None or score < best[0] - 1e-9:
            best = (score, NetworkCoefficients(hops=hops, slowdown=slowdown, span=span), error)
    assert best is not None
    return best[1], best[2]


def _build_network_features(
    group: Points, kind: str, topology: Topology, model: CollectiveModel, span: float
) -> FloatArray:
    """Per point: the node's floor, hops between ranks in units of network latency, and seconds on the busiest link."""
    curves, topology = model.curve_set(topology.curves), replace(topology, shared=False)
    out = np.zeros((len(group), 3))
    for place in sorted(set(zip(group.ranks, group.nodes, strict=True))):
        ranks, nodes = int(place[0]), int(place[1])
        rows = (group.ranks == ranks) & (group.nodes == nodes)
        floor, rate = model.node_limits(
            kind, "fp16", max(2, topology.count_ranks_per_node(ranks, nodes)), topology, curves
        )
        out[rows, 0] = floor
        out[rows, 1] = (ranks - 1) * topology.network_latency
        out[rows, 2] = estimate_network_seconds(kind, group.bytes[rows], ranks, nodes, topology, span=span, rate=rate)
    return out


def _solve_link_times(features: FloatArray, seconds: FloatArray, scale: FloatArray | None = None) -> FloatArray:
    """Non-negative least squares of relative errors."""
    weight = 1.0 / (seconds if scale is None else scale)
    column = np.abs(features).max(axis=0) + 1e-30  # coefficients of similar size keep the solver well conditioned
    return np.asarray(solve_nonnegative(features * weight[:, None] / column, seconds * weight) / column)
