"""Collectives on clusters that no curve or coefficient was fitted on: nodes and networks as their operators describe
them, predicted from links alone between nodes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from traincast.costs.collectives.calls import COLLECTIVE
from traincast.costs.collectives.curve import SMALL_BYTES
from traincast.costs.collectives.model import CollectiveModel
from traincast.costs.kernels.call import Calls
from traincast.hardware.platform import load_topology
from traincast.hardware.topology import Topology
from traincast.utils.metrics import ErrorRow, compute_error_row, is_within_interval
from traincast_evaluation.measured_tables import MeasuredTable, read_table

FILE = "collectives/nccl_clusters.parquet"
_TCP = "TCP"


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """GPUs per node, network adapters of a node and gigabytes per second of each; the node whose links it has."""

    like: str
    gpus: int
    adapters: int
    adapter_gbs: float


CLUSTERS = {  # as their operators describe them; a cluster whose network is not known is not predicted
    "ALCF Polaris": Cluster(like="dgx-a100", gpus=4, adapters=2, adapter_gbs=25.0),  # Slingshot 11
    "ALCF Sophia": Cluster(like="dgx-a100", gpus=8, adapters=8, adapter_gbs=25.0),  # HDR InfiniBand, rails
    "CSCS Alps": Cluster(like="dgx-h100", gpus=4, adapters=4, adapter_gbs=25.0),  # GH200, Slingshot 11
    "GCP A3 Mega": Cluster(like="dgx-h100", gpus=8, adapters=8, adapter_gbs=25.0),  # TCPXO
    "CoreWeave": Cluster(like="dgx-h100", gpus=8, adapters=8, adapter_gbs=50.0),  # NDR InfiniBand
    "AMD AAC8": Cluster(like="mi300x-platform", gpus=8, adapters=8, adapter_gbs=50.0),
}


def evaluate_clusters(data: Path, model: CollectiveModel) -> list[ErrorRow]:
    """By cluster, collective and size band; runs over TCP and of GPUs that a cluster's row is not about are left
    out."""
    text = ["cluster", "interconnect", "device", "collective"]
    numbers = ["num_nodes", "num_gpus", "gpus_per_node", "message_bytes", "latency_us"]
    table = read_table(data, FILE, text, numbers, positive=numbers)
    wired = np.array([_TCP not in words for words in table.text("interconnect")])
    rows = []
    for name, cluster in CLUSTERS.items():
        mine = wired & (table.text("cluster") == name) & (table.number("gpus_per_node") == cluster.gpus)
        here = table.take(mine & (table.number("num_gpus") > 1))
        for kind in sorted(set(here.text("collective"))):
            part = here.take(here.text("collective") == kind)
            rows += _summarise(f"clusters left out: {name} {kind}", part, kind, _describe(cluster), model)
    return rows


def _describe(cluster: Cluster) -> Topology:
    node = load_topology(cluster.like)
    return replace(
        node, gpus_per_node=cluster.gpus, island=cluster.gpus, adapters=cluster.adapters,
        adapter_bandwidth=1e9 * cluster.adapter_gbs, shared=False,
    )  # fmt: skip


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
