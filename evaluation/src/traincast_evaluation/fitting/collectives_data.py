"""Measured collectives in one shape: which curve a point belongs to, its size, its time, and whether it is held out."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from traincast.costs.collectives.links import get_bus_factor
from traincast.costs.kernels.collective import COLLECTIVE
from traincast.utils.arrays import BoolArray, FloatArray
from traincast.utils.errors import TraincastError, make_unknown_error, shorten_value
from traincast_evaluation.measured_tables import MeasuredTable, read_table, reject_cells, select_held_out

FOLDER = "collectives"
SINGLE = f"{FOLDER}/nccl_single_node.parquet"
CLUSTERS = f"{FOLDER}/nccl_h100_multinode.parquet"
STUDY = f"{FOLDER}/allreduce_v100_a100.parquet"
PYTORCH = f"{FOLDER}/dgx1_4xv100.csv"
SEND_RECV = f"{FOLDER}/vidur_send_recv.parquet"
ALL_REDUCE = f"{FOLDER}/vidur_allreduce.parquet"

# name in the tables -> key of our curves, and the node it sat in
MACHINES = {
    "NVIDIA A100-SXM4-80GB": ("a100", "dgx-a100"),
    "NVIDIA H100 80GB HBM3": ("h100", "dgx-h100"),
    "NVIDIA H200": ("h200", "hgx-h200"),
    "NVIDIA B200": ("b200", "hgx-b200"),
    "NVIDIA L40S": ("l40s", "pcie-l40s-no-peer"),
    "A100-SXM4 (memory size not stated)": ("a100-vtrain", "dgx-a100"),
    "V100-SXM2 (memory size not stated)": ("v100", "dgx1-v100"),
    "V100-SXM2 (DGX-1, 4 of 8 GPUs)": ("v100-pytorch", "dgx1-v100"),
}
REDUCING = ("all_reduce", "reduce_scatter")
_PYTORCH_KINDS = {"all_gather_base": "all_gather", "all_to_allv": "all_to_all_v"}
_COLLECTIVES = (*COLLECTIVE.kinds, *_PYTORCH_KINDS)


@dataclass(frozen=True, eq=False, slots=True)
class Points:
    """Measured points as columns. `set`, `kind`, `dtype`, `pair` (node pair, or empty) and `where` (file, row and
    column of the time, for messages) are text."""

    set: npt.NDArray[Any]
    kind: npt.NDArray[Any]
    dtype: npt.NDArray[Any]
    pair: npt.NDArray[Any]
    ranks: FloatArray
    nodes: FloatArray
    bytes: FloatArray
    seconds: FloatArray
    held_out: BoolArray
    where: npt.NDArray[Any]

    def __len__(self) -> int:
        return len(self.bytes)

    def take(self, rows: npt.NDArray[Any]) -> Points:
        """A selection of the points."""
        return Points(*(getattr(self, name)[rows] for name in Points.__slots__))

    @staticmethod
    def join(parts: Sequence[Points]) -> Points:
        """Several tables as one."""
        return Points(*(np.concatenate([getattr(part, name) for part in parts]) for name in Points.__slots__))


def read_single_node_points(data: Path) -> Points:
    """nccl-tests on one node, by device and NCCL version. Only reductions care for the type."""
    table = _read_collective_table(data, SINGLE, ["device", "nccl_version", "collective", "dtype"], "latency_us")
    device = _name_machines(table)
    names = np.array(
        [f"{key}@{version}" for key, version in zip(device, table.text("nccl_version"), strict=True)], dtype=object
    )
    kind = table.text("collective")
    whole = ["int" if dtype == "int8" else "float" for dtype in table.text("dtype")]
    dtype = np.array([w if k in REDUCING else "any" for w, k in zip(whole, kind, strict=True)], dtype=object)
    return make_points(table, names, device, kind, dtype, "latency_us")


def read_study_points(data: Path) -> Points:
    """nccl-tests all-reduce of the vTrain authors, 2 to 8 GPUs of one V100 and one A100 node, every MiB to 1 GiB."""
    table = _read_collective_table(data, STUDY, ["device", "collective"], "latency_us")
    device = _name_machines(table)
    return make_points(table, device, device, table.text("collective"), repeat_text(table, "float"), "latency_us")


def read_pytorch_v100_points(data: Path) -> Points:
    """Four V100s of a DGX-1 through PyTorch: times hold the host's launch (floors of 70 to 160 us).

    The list forms of all_gather and reduce_scatter hold copies as well; of all_gather only the flat form is kept.
    """
    table = _read_collective_table(data, PYTORCH, ["device", "collective"], "latency_us")
    table = table.take(table.text("collective") != "all_gather")
    device = _name_machines(table)
    kind = np.array([_PYTORCH_KINDS.get(name, name) for name in table.text("collective")], dtype=object)
    return make_points(table, device, device, kind, repeat_text(table, "any"), "latency_us")


def read_send_recv_points(data: Path) -> Points:
    """Kernel times of send/recv inside DGX A100 and DGX H100 nodes, of the launch that waited least."""
    table = _read_collective_table(data, SEND_RECV, ["node_type", "collective"], "latency_us_min", ["num_nodes"])
    known = {"a100_dgx": "a100", "h100_dgx": "h100"}
    inside = np.isin(table.text("node_type").astype(str), list(known)) & (table.number("num_nodes") == 1)
    table = table.take(inside)
    names = np.array([known[name] for name in table.text("node_type")], dtype=object)
    return make_points(table, names, names, table.text("collective"), repeat_text(table, "any"), "latency_us_min")


def read_pair_points(data: Path) -> Points:
    """Kernel times of all-reduce over four PCIe cards with bridges between pairs; never fitted."""
    table = _read_collective_table(data, ALL_REDUCE, ["node_type", "collective"], "latency_us_min")
    table = table.take(np.char.find(table.text("node_type").astype(str), "pairwise") >= 0)
    table = table.take(table.number("num_gpus") == 4)
    names = np.array([f"pcie-{name.split('_')[0]}-pairs" for name in table.text("node_type")], dtype=object)
    return make_points(table, names, names, table.text("collective"), repeat_text(table, "float"), "latency_us_min")


def read_cluster_points(data: Path) -> Points:
    """nccl-tests on two H100 clusters, large messages; `pair` names the two nodes of a pairwise run."""
    table = _read_collective_table(
        data, CLUSTERS, ["cluster", "collective", "test_type", "log_id"], "latency_us", ["num_nodes"]
    )
    names = np.array([name.removeprefix("example-") for name in table.text("cluster")], dtype=object)
    kind = table.text("collective")
    dtype = np.array(["float" if name in REDUCING else "any" for name in kind], dtype=object)
    return make_points(
        table, names, names, kind, dtype, "latency_us", pair=_name_node_pairs(table), nodes=table.number("num_nodes")
    )


def _name_node_pairs(table: MeasuredTable) -> npt.NDArray[Any]:
    """The two nodes of a pairwise run, which stand in the name of its log; "" for other runs."""
    logs = [log.split("_") for log in table.text("log_id")]
    pairwise = table.text("test_type") == "pairwise"
    odd = [row for row in np.flatnonzero(pairwise).tolist() if len(logs[row]) < 4]
    reject_cells(
        table, "log_id", [(row, f"{shorten_value(table.text('log_id')[row])} names no two nodes") for row in odd]
    )
    pairs = [f"{log[2]} {log[3]}" if is_pair else "" for log, is_pair in zip(logs, pairwise, strict=True)]
    return np.array(pairs, dtype=object)


def check_links(points: Points, node: str) -> None:
    """Rejects points more than three times faster than the links of their node allow."""
    from traincast.hardware.platform import load_topology

    topology = load_topology(node)
    factor = np.array([get_bus_factor(k, int(n)) for k, n in zip(points.kind, points.ranks, strict=True)])
    # switches that sum in the network can halve a reduction's traffic
    bad = np.flatnonzero(points.seconds * 3 * topology.link_bandwidth < points.bytes * factor / 2)
    if len(bad):
        row = bad[0]
        raise TraincastError(
            f"{points.where[row]}: {points.kind[row]} of {points.bytes[row]:.0f} bytes on {points.ranks[row]:.0f} GPUs "
            f"of '{points.set[row]}' in {1e6 * points.seconds[row]:.4g} us is 3 times faster than its links allow"
        )


def _read_collective_table(
    data: Path, file: str, text: list[str], time: str, more: Sequence[str] = ()
) -> MeasuredTable:
    numbers = ["num_gpus", "message_bytes", time, *more]
    return read_table(data, file, text, numbers, positive=numbers, among={"collective": _COLLECTIVES})


def _name_machines(table: MeasuredTable) -> npt.NDArray[Any]:
    odd = [
        (row, str(make_unknown_error("machine", str(name), MACHINES, "Add it to the table of machines.")))
        for row, name in enumerate(table.text("device"))
        if name not in MACHINES
    ]
    reject_cells(table, "device", odd)
    return np.array([MACHINES[name][0] for name in table.text("device")], dtype=object)


def repeat_text(table: MeasuredTable, value: str) -> npt.NDArray[Any]:
    """A text column with one value."""
    return np.full(len(table), value, dtype=object)


def make_points(
    table: MeasuredTable, names: npt.NDArray[Any], machine: npt.NDArray[Any], kind: npt.NDArray[Any],
    dtype: npt.NDArray[Any], time: str, *, pair: npt.NDArray[Any] | None = None, nodes: FloatArray | None = None,
) -> Points:  # fmt: skip
    """Points of a table with `num_gpus`, `message_bytes` and `time` (us). `machine` decides what is held out."""
    ranks, size = table.number("num_gpus"), table.number("message_bytes")
    nodes = np.ones(len(table)) if nodes is None else nodes
    # a size is held out of every version, type and repeat of the same machine, collective and GPU count
    apart = select_held_out(_encode_collectives(machine), _encode_collectives(kind), ranks, nodes, size)
    empty = repeat_text(table, "")
    where = np.array([table.where(row, time) for row in range(len(table))], dtype=object)
    return Points(
        names, kind, dtype, empty if pair is None else pair, ranks, nodes, size, 1e-6 * table.number(time), apart, where
    )


def _encode_collectives(names: npt.NDArray[Any]) -> FloatArray:
    return np.array([float(zlib.crc32(str(name).encode())) for name in names])
