"""Collectives on clusters that no curve or coefficient was fitted on: nodes and networks as their operators describe
them, predicted from links alone between nodes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from traincast.costs.collectives.model import SMALL_BYTES, CollectiveModel
from traincast.costs.kernels.collective import COLLECTIVE
from traincast.costs.kernels.contract import Calls
from traincast.hardware.platform import load_topology
from traincast.hardware.topology import Topology
from traincast.utils.metrics import ErrorRow, compute_error_row, is_within_interval
from traincast_evaluation.measured_tables import MeasuredTable, read_table

FILE = "collectives/nccl_clusters.parquet"
_TCP = "(TCP"
_WITHOUT_PLUG_IN = "env set 2"  # Polaris with variables of GPUDirect, yet without the libfabric plug-in: TCP as well

CLUSTERS = {  # the node that each is; a cluster whose network is not known is not predicted
    "ALCF Polaris": "polaris-a100",
    "ALCF Sophia": "dgx-a100",  # HDR InfiniBand, rails
    "CSCS Alps": "gh200-alps",
    "GCP A3 Mega": "gcp-a3-mega-h100",
    "CoreWeave": "dgx-h100",  # NDR InfiniBand
    "AMD AAC8": "mi300x-platform",
}


def evaluate_clusters(data: Path, model: CollectiveModel) -> list[ErrorRow]:
    """By cluster, collective and size band; runs over TCP and of GPUs that a cluster's row is not about are left
    out."""
    text = ["cluster", "interconnect", "setting", "device", "collective"]
    numbers = ["num_nodes", "num_gpus", "gpus_per_node", "message_bytes", "latency_us"]
    table = read_table(data, FILE, text, numbers, positive=numbers)
    wired = np.array([_TCP not in words for words in table.text("interconnect")])
    wired &= (table.text("cluster") != "ALCF Polaris") | (table.text("setting") != _WITHOUT_PLUG_IN)
    rows = []
    for name, node in CLUSTERS.items():
        topology = replace(load_topology(node), shared=False)
        mine = wired & (table.text("cluster") == name) & (table.number("gpus_per_node") == topology.gpus_per_node)
        here = table.take(mine & (table.number("num_gpus") > 1))
        for kind in sorted(set(here.text("collective"))):
            part = here.take(here.text("collective") == kind)
            rows += _summarise(f"clusters left out: {name} {kind}", part, kind, topology, model)
    return rows


def _summarise(
    label: str, table: MeasuredTable, kind: str, topology: Topology, model: CollectiveModel
) -> list[ErrorRow]:
    values = np.stack([table.number(name) for name in ("message_bytes", "num_gpus", "num_nodes")], axis=1)
    calls = Calls.from_columns(COLLECTIVE, [kind] * len(table), ["fp32"] * len(table), values)
    estimate, measured = model.predict(calls, topology), 1e-6 * table.number("latency_us")
    inside = is_within_interval(estimate.seconds, measured, estimate.sigma)
    names = [f"{size:.0f} B {n:.0f} on {nodes:.0f} nodes" for size, n, nodes in values]
    rows = []
    for band, chosen in (("up to 64 KiB", values[:, 0] <= SMALL_BYTES), ("above 64 KiB", values[:, 0] > SMALL_BYTES)):
        at = np.flatnonzero(chosen)
        if len(at):
            picked = [names[i] for i in at]
            rows.append(
                compute_error_row(
                    "collectives", f"{label}, {band}", estimate.seconds[at], measured[at], picked, inside=inside[at]
                )
            )
    return rows
