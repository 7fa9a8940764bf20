"""Collective curves and link coefficients from public measurements; sees four fifths of the sizes. Deterministic."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from traincast.costs.collectives.links import LinkModel
from traincast.costs.collectives.model import PROFILE, CollectiveModel, CurveSet
from traincast.hardware.platform import load_topology
from traincast_evaluation.fitting import collectives_data as tables
from traincast_evaluation.fitting import collectives_newer as newer
from traincast_evaluation.fitting.collectives_curves import fit_curve_sets, remove_host_floor, set_curve_floor
from traincast_evaluation.fitting.collectives_data import Points
from traincast_evaluation.fitting.collectives_links import compute_ranks_spread, fit_links
from traincast_evaluation.fitting.collectives_pairs import drop_slow_pairs, find_slow_pairs

DEVICE_SETS = ("a100", "h100", "h200", "b200")


def fit_collectives(data: Path, out: Path, progress: Callable[[str, float], None]) -> dict[str, Any]:
    """Fits the model on the measurements under `data`, writes `collectives.json` into `out`, returns its provenance."""
    progress("read", 0.0)
    points = read_points(data)
    progress("fit", 0.3)
    model = fit_model(points.take(~points.held_out))
    model.provenance["rows_held_out"] = int(points.held_out.sum())
    progress("write", 0.9)
    out.mkdir(parents=True, exist_ok=True)
    model.save(out / PROFILE.name)
    progress("done", 1.0)
    return model.provenance


def read_points(data: Path) -> Points:
    """Every measured point a fit may use, checked."""
    single = tables.read_single_node_points(data)
    clusters = tables.read_cluster_points(data)
    across = clusters.take(clusters.nodes > 1)  # their single nodes are left for evaluation, as other machines
    parts = [
        single,
        tables.read_study_points(data),
        tables.read_pytorch_v100_points(data),
        tables.read_send_recv_points(data),
        across,
    ]
    parts += [newer.select_nccl_points(newer.read_blackwell_points(data)), newer.read_fitted_domain_points(data)]
    points = Points.join(parts)
    machines = np.array([name.split("@")[0] for name in points.set])
    nodes = dict(tables.MACHINES.values()) | newer.NODES
    for machine in np.unique(machines):
        tables.check_links(points.take(machines == machine), nodes.get(str(machine), "dgx-h100"))
    return points


def fit_model(points: Points) -> CollectiveModel:
    """The model that these points give."""
    slow = find_slow_pairs(points)
    healthy = drop_slow_pairs(points, slow)
    sets = fit_curve_sets(healthy)
    links = fit_links(healthy, sets)
    _share_send_recv(sets)
    _remove_host_time_of_v100(sets, links)
    return CollectiveModel(
        sets=sets,
        links=links,
        ranks_sigma=compute_ranks_spread(healthy),
        provenance={
            "sources": [
                "ai-dynamo/aiconfigurator @ 095f58a5 (Apache-2.0): nccl_single_node",
                "xxrjun/nccl-tests-cluster @ 455de4f8 (Apache-2.0): nccl_h100_multinode",
                "VIA-Research/vTrain @ f8dda847 (MIT-style, KAIST): allreduce_v100_a100",
                "owensgroup/ml_perf_model @ 5b2522a0 (BSD-3-Clause): dgx1_4xv100",
                "microsoft/vidur @ 7d475133 (MIT): vidur_send_recv",
                "ai-dynamo/aiconfigurator @ 095f58a5 (Apache-2.0): nccl_blackwell",
                "openxla/xla @ e5d008bb (Apache-2.0): xla_collectives (NVL72 beyond four GPUs, MI350)",
            ],
            "timing": {
                "device": "all sets but v100-pytorch; send_recv is kernel time of the launch that waited least",
                "host_inclusive": ["v100-pytorch"],
            },
            "rows_fitted": len(healthy),
            "rows_of_slow_pairs": len(points) - len(healthy),
            "split": "a size of a machine, collective and GPU count is held out by a seeded hash, one in five",
            "slow_pairs": slow,
        },
    )


def _share_send_recv(sets: dict[str, CurveSet]) -> None:
    """Point-to-point curves were measured without an NCCL version: every version of the device has them."""
    for device in DEVICE_SETS:
        shared = sets.pop(device, {})
        for name in sets:
            if name.startswith(f"{device}@"):
                sets[name].update(shared)


def _remove_host_time_of_v100(sets: dict[str, CurveSet], links: LinkModel) -> None:
    """V100 device curves: all-reduce as measured, the others from PyTorch's with the host's floor taken out."""
    topology = load_topology("dgx1-v100")
    device = sets.get("v100", {})
    for (kind, _), places in device.items():
        for place, curve in places.items():
            places[place] = set_curve_floor(curve, links.floor(kind, place[0], topology))
    for (kind, dtype), places in sets.get("v100-pytorch", {}).items():
        if kind != "all_reduce":
            floors = {place: links.floor(kind, place[0], topology) for place in places}
            device[kind, dtype] = {place: remove_host_floor(curve, floors[place]) for place, curve in places.items()}
