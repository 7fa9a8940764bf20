"""Measured collectives of Blackwell machines, NVLink domains of 72 GPUs, MI350 nodes and PCIe servers."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import numpy as np

from traincast_evaluation.fitting.collectives_data import FOLDER, REDUCING, Points, make_points, repeat_text
from traincast_evaluation.measured_tables import read_table

BLACKWELL = f"{FOLDER}/nccl_blackwell.parquet"
DOMAINS = f"{FOLDER}/xla_collectives.parquet"
OTHERS = f"{FOLDER}/pipeweave_allreduce_sendrecv.parquet"

NODES = {
    "b300": "hgx-b300", "gb200": "gb200-nvl72", "gb300": "gb300-nvl72", "rtx-pro-6000": "pcie-rtx-pro-6000",
    "gb200-nvl72": "gb200-nvl72", "gb300-nvl72": "gb300-nvl72", "mi350": "mi355x-platform",
}  # fmt: skip
"""Key of our curves -> the node they were measured in."""
# name in a table -> key of our curves
_BLACKWELL_SETS = {"b300_sxm": "b300", "gb200": "gb200", "gb300": "gb300", "rtx_pro_6000_server": "rtx-pro-6000"}
_DOMAIN_SETS = {
    "sm_100_GB200": "gb200-nvl72", "sm_103": "gb300-nvl72", "gfx950": "mi350", "sm_90": "h100-xla",
    "sm_100_B200": "b200-xla",
}  # fmt: skip
_OTHER_NODES = {
    "A100": "dgx-a100", "H100": "dgx-h100", "H20": "h20", "H800": "h800", "RTX_6000_Ada": "pcie-l40s",
    "RTX_PRO_6000_S": "pcie-rtx-pro-6000",
}  # fmt: skip
_ELEMENT_BYTES = {"half": 2.0, "int8": 1.0}
_KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
_BLACKWELL_KINDS = {"alltoall": "all_to_all", **{kind: kind for kind in _KINDS}}
_DOMAIN_KINDS = {kind.replace("_", "-"): kind for kind in _KINDS}
_PERMUTE = "collective-permute"  # XLA's own exchange, 20 GB/s at 4 MB on NVLink: says nothing of NCCL's send and recv
_TRAY = 4  # GPUs of one tray: up to here nccl-tests measured the same machines, with finer steps
_MOST_ROUNDING = 0.1  # published to so few digits that a time may be this far off: left out


def read_blackwell_points(data: Path) -> Points:
    """nccl-tests inside one node (GB200, GB300: one tray), by device and the version that the table gives."""
    text = ["system", "nccl_version", "collective", "dtype"]
    among: dict[str, Collection[str]] = {
        "system": _BLACKWELL_SETS, "collective": _BLACKWELL_KINDS, "dtype": _ELEMENT_BYTES,
    }  # fmt: skip
    numbers = ["num_gpus", "message_elements", "latency_us"]
    table = read_table(data, BLACKWELL, text, numbers, positive=numbers, among=among)
    words = zip(*(table.text(column) for column in text), strict=True)
    rows = [(_BLACKWELL_SETS[system], version, _BLACKWELL_KINDS[kind], dtype) for system, version, kind, dtype in words]
    table.columns["message_bytes"] = np.array(
        [n * _ELEMENT_BYTES[row[3]] for n, row in zip(table.number("message_elements"), rows, strict=True)]
    )
    machine = np.array([row[0] for row in rows], dtype=object)
    names = np.array([f"{row[0]}@{row[1]}" for row in rows], dtype=object)
    kind = np.array([row[2] for row in rows], dtype=object)
    types = [("int" if row[3] == "int8" else "float") if row[2] in REDUCING else "any" for row in rows]
    return make_points(table, names, machine, kind, np.array(types, dtype=object), "latency_us")


def select_nccl_points(points: Points) -> Points:
    """Those of a known NCCL version: one container states its own version instead."""
    return points.take(np.array(["rc" not in str(name) for name in points.set]))


def read_domain_points(data: Path) -> Points:
    """XLA's collectives: GB200 and GB300 in groups of 4 to 72, eight MI350, H100 or B200. Floating point."""
    text, numbers = ["device_key", "collective"], ["num_gpus", "message_bytes", "latency_us"]
    among: dict[str, Collection[str]] = {"device_key": _DOMAIN_SETS, "collective": {*_DOMAIN_KINDS, _PERMUTE}}
    table = read_table(data, DOMAINS, text, [*numbers, "rel_rounding_error"], positive=numbers, among=among)
    table = table.take((table.text("collective") != _PERMUTE) & (table.number("rel_rounding_error") <= _MOST_ROUNDING))
    names = np.array([_DOMAIN_SETS[key] for key in table.text("device_key")], dtype=object)
    kind = np.array([_DOMAIN_KINDS[name] for name in table.text("collective")], dtype=object)
    dtype = np.array(["float" if name in REDUCING else "any" for name in kind], dtype=object)
    return make_points(table, names, names, kind, dtype, "latency_us")


def read_fitted_domain_points(data: Path) -> Points:
    """The part that curves are made from: NVLink domains beyond one tray, and the MI350 node."""
    points = read_domain_points(data)
    domain = np.array([str(name).endswith("nvl72") for name in points.set])
    return points.take((domain & (points.ranks > _TRAY)) | (points.set == "mi350"))


def read_other_server_points(data: Path) -> Points:
    """All-reduce and send/recv of other people's servers, the fastest launch; never fitted. `set` names our node."""
    text, numbers = ["device", "collective"], ["num_gpus", "message_bytes", "latency_us_min"]
    among: dict[str, Collection[str]] = {"device": _OTHER_NODES, "collective": ("all_reduce", "send_recv")}
    table = read_table(data, OTHERS, text, numbers, positive=numbers, among=among)
    names = np.array([_OTHER_NODES[name] for name in table.text("device")], dtype=object)
    machine = table.text("device")
    return make_points(table, names, machine, table.text("collective"), repeat_text(table, "any"), "latency_us_min")
