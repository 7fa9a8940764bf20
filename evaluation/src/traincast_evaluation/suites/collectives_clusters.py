"""Collectives on clusters that no curve or coefficient was fitted on: nodes and networks as their operators describe
them, predicted from links alone between nodes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from traincast.costs.collectives.model import SMALL_BYTES, CollectiveModel
from traincast.costs.kernels.collective import COLLECTIVE
from traincast.costs.kernels.contract import Calls
from traincast.hardware.platform import load_device, load_topology
from traincast.hardware.topology import Topology
from traincast.utils.arrays import FloatArray
from traincast.utils.metrics import ErrorRow
from traincast_evaluation.measured_tables import MeasuredTable, read_table
from traincast_evaluation.suites.cases import compare
from traincast_evaluation.suites.collective_rows import SUITE, list_compared
from traincast_evaluation.suites.machines import find_named_device, fit_node

FILE = "collectives/nccl_clusters.parquet"
_TCP = "(TCP"
_WITHOUT_PLUG_IN = "env set 2"  # Polaris with variables of GPUDirect, yet without the libfabric plug-in: TCP as well

CLUSTERS = {  # the node that each is; one whose network is not known is predicted as its GPU's usual one
    "ALCF Polaris": "polaris-a100",
    "ALCF Sophia": "dgx-a100",  # HDR InfiniBand, rails
    "CSCS Alps": "gh200-alps",
    "GCP A3 Mega": "gcp-a3-mega-h100",
    "CoreWeave": "dgx-h100",  # NDR InfiniBand
    "AMD AAC8": "mi300x-platform",
}


_UNMEASURED = ("GCP A3 Mega",)  # whose network (TCPXO) has no coefficients
_OWN = ("ALCF Polaris", "CSCS Alps", "GCP A3 Mega")  # one number of its network was read off its own rows (node file)
_RACKS = ("gb200-nvl72", "gb300-nvl72")
_UNKNOWN_SIGMA = 0.7
"""Log-sigma of collectives besides, where nobody says what joins them: rates of adapters sold with one
GPU differ by four times."""


def evaluate_clusters(data: Path, model: CollectiveModel) -> list[ErrorRow]:
    """By cluster, collective and size band; runs over TCP and of GPUs that a cluster's row is not about are left
    out."""
    text = ["cluster", "interconnect", "setting", "device", "collective"]
    numbers = ["num_nodes", "num_gpus", "gpus_per_node", "message_bytes", "latency_us"]
    table = read_table(data, FILE, text, numbers, positive=numbers)
    wired = np.array([_TCP not in words for words in table.text("interconnect")])
    wired &= (table.text("cluster") != "ALCF Polaris") | (table.text("setting") != _WITHOUT_PLUG_IN)
    rows = []
    several = wired & (table.number("num_gpus") > 1)
    kept = table.take(several)
    machines = sorted(set(zip(kept.text("cluster"), kept.text("device"), kept.number("gpus_per_node"), strict=True)))
    for name, device, per_node in machines:
        usual = _find_usual_node(device)
        node = usual if usual in _RACKS else CLUSTERS.get(name) or usual
        if not node:
            continue
        topology = replace(fit_node(load_topology(node), int(per_node)), shared=False)
        mine = (kept.text("cluster") == name) & (kept.text("device") == device)
        here = kept.take(mine & (kept.number("gpus_per_node") == per_node))
        known = "left out" if node == CLUSTERS.get(name) else "of unknown networks"
        known = "left out but for one number" if name in _OWN else known
        for kind in sorted(set(here.text("collective"))):
            part = here.take(here.text("collective") == kind)
            doubt = 0.0 if node == CLUSTERS.get(name) and name not in _UNMEASURED else _UNKNOWN_SIGMA
            rows += _summarise(f"clusters {known}: {name} {kind}", part, kind, topology, model, doubt)
    return rows


def _find_usual_node(device: str) -> str:
    """The node that a GPU is sold in ("": no sheet of it, or only cards on PCIe)."""
    key = find_named_device(device)
    return load_device(key).node if key else ""


def _summarise(
    label: str, table: MeasuredTable, kind: str, topology: Topology, model: CollectiveModel, doubt: float
) -> list[ErrorRow]:
    values = np.stack([table.number(name) for name in ("message_bytes", "num_gpus", "num_nodes")], axis=1)
    values[:, 2] = np.minimum(values[:, 2], np.ceil(values[:, 1] / topology.gpus_per_node))  # trays of one rack
    calls = Calls.from_columns(COLLECTIVE, [kind] * len(table), ["fp32"] * len(table), values)
    estimate, measured = model.predict(calls, topology), 1e-6 * table.number("latency_us")
    names = [f"{size:.0f} B {n:.0f} on {nodes:.0f} nodes" for size, n, nodes in values]
    spread = np.hypot(estimate.sigma, doubt)
    cases = list_compared([topology.key] * len(names), names, measured, estimate.seconds, spread)
    rows: list[ErrorRow] = []
    for band, chosen in (("up to 64 KiB", values[:, 0] <= SMALL_BYTES), ("above 64 KiB", values[:, 0] > SMALL_BYTES)):
        if chosen.any():
            least = _compute_least_mape(values[chosen], measured[chosen])
            note = f"MAPE: one answer to all settings at least {least:.1f}"
            rows.append(compare(SUITE, f"{label}, {band}", [cases[at] for at in np.flatnonzero(chosen)], note))
    return rows


def _compute_least_mape(places: FloatArray, measured: FloatArray) -> float:
    """The mean absolute error in percent of the best answer to each size and place, which cannot tell settings and
    repeats apart: their median, weighted with what a second of error costs."""
    _, group = np.unique(places, axis=0, return_inverse=True)
    errors = np.zeros(len(measured))
    for one in range(int(group.max()) + 1):
        mine = np.sort(measured[group.ravel() == one])
        weight = np.cumsum(1.0 / mine)
        best = mine[np.searchsorted(weight, 0.5 * weight[-1])]
        errors[group.ravel() == one] = np.abs(best / measured[group.ravel() == one] - 1.0)
    return float(100.0 * errors.mean())
