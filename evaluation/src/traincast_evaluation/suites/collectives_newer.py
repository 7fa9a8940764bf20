"""Collectives of newer machines: group sizes left out, machines nobody fitted, and what links alone say of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from traincast.costs.collectives.model import CollectiveModel
from traincast.hardware.platform import load_topology
from traincast.hardware.topology import Topology
from traincast.utils.metrics import ErrorRow
from traincast_evaluation.fitting import collectives_data as tables
from traincast_evaluation.fitting import collectives_newer as newer
from traincast_evaluation.fitting.collectives_curves import fit_curve_sets
from traincast_evaluation.fitting.collectives_data import Points
from traincast_evaluation.suites.collective_rows import (
    iterate_point_groups,
    predict_points,
    summarise_by_size,
    summarise_points,
)

_LEFT_OUT = (16, 32, 64)  # group sizes of an NVLink domain, each predicted from the others
# GB/s of NVLink in one direction of cards that have no sheet here, NVIDIA's data sheets
_OTHER_LINKS = {"h20": 450.0, "h800": 200.0}


def evaluate_newer_machines(data: Path, points: Points, model: CollectiveModel) -> list[ErrorRow]:
    """Every table on the machines that came later."""
    return [
        *evaluate_nvlink_domains(points, model),
        *evaluate_other_release(data, model),
        *evaluate_other_library(data, model),
        *evaluate_other_servers(data, model),
        *evaluate_links_of_newer(data, points, model),
    ]


def evaluate_nvlink_domains(points: Points, model: CollectiveModel) -> list[ErrorRow]:
    """Groups of 16, 32 or 64 GPUs of an NVLink domain, from curves of the other group sizes."""
    rows: list[ErrorRow] = []
    for machine, kind, group in iterate_point_groups(
        points.take(np.array(["nvl72" in str(name) for name in points.set]))
    ):
        for left_out in _LEFT_OUT:
            others = group.take((group.ranks != left_out) & ~group.held_out)
            fewer = replace(model, sets=fit_curve_sets(others))
            topology = replace(load_topology(machine), curves=machine)
            rest = group.take(group.ranks == left_out)
            rows.append(
                summarise_points(
                    f"{left_out} GPUs from other groups: {machine} {kind}", rest, predict_points(fewer, rest, topology)
                )
            )
    return rows


def evaluate_other_release(data: Path, model: CollectiveModel) -> list[ErrorRow]:
    """The same B300 node from another container, never fitted: what the software release is worth."""
    points = newer.read_blackwell_points(data)
    points = points.take(np.array(["rc" in str(name) for name in points.set]))
    topology = load_topology("hgx-b300")
    return [
        summarise_points(f"another release on B300: {kind}", group, predict_points(model, group, topology))
        for _, kind, group in iterate_point_groups(points)
    ]


def evaluate_other_library(data: Path, model: CollectiveModel) -> list[ErrorRow]:
    """H100 and B200 nodes as XLA calls NCCL, never fitted, above 64 KiB (below, its launch decides)."""
    points = newer.read_domain_points(data)
    rows = []
    for node, name in (("dgx-h100", "h100-xla"), ("hgx-b200", "b200-xla")):
        group = points.take(points.set == name)
        rows += summarise_by_size(f"through XLA: {node}", group, predict_points(model, group, load_topology(node)))
    return rows


def evaluate_other_servers(data: Path, model: CollectiveModel) -> list[ErrorRow]:
    """Servers of other people, never fitted; H20, H800 and RTX 6000 Ada from their links alone."""
    rows = []
    for node, kind, group in iterate_point_groups(newer.read_other_server_points(data)):
        rows += summarise_by_size(
            f"another machine: {node} {kind}", group, predict_points(model, group, _load_server_topology(node))
        )
    return rows


def _load_server_topology(name: str) -> Topology:
    if name not in _OTHER_LINKS:
        return load_topology(name)
    return replace(load_topology("dgx-h100"), key=name, link_bandwidth=1e9 * _OTHER_LINKS[name], curves="")


def evaluate_links_of_newer(data: Path, points: Points, model: CollectiveModel) -> list[ErrorRow]:
    """Machines that took no part in the links' coefficients, from their links alone; L40S without peer access."""
    rows = []
    single = tables.read_single_node_points(data)
    poor = single.take(np.array([str(name).startswith("l40s") for name in single.set]))
    for ranks in (2, 4, 8):
        group = poor.take(poor.ranks == ranks)
        topology = replace(load_topology("pcie-l40s-no-peer"), curves="")
        rows += summarise_by_size(
            f"links only: l40s without peer access, {ranks} GPUs", group, predict_points(model, group, topology)
        )
    machines = np.array([str(name).split("@")[0] for name in points.set])
    for machine, node in newer.NODES.items():
        group = points.take((machines == machine) & (points.dtype != "int"))
        topology = replace(load_topology(node), curves="")
        rows += summarise_by_size(f"links only: {machine}", group, predict_points(model, group, topology))
    return rows
