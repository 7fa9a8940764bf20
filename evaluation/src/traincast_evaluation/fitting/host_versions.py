"""What the study's overhead tables leave out, read off two traces of the same generation of PyTorch.

The newer table has T1 and T2 only, T1 as one figure. How T1 differs by who issues an op, and how T3, T5 and the ops
that launch nothing stand to T2, comes from the traces: there, as in the newer table, recording an op costs less than in
the older one, which weighs most on ops that launch nothing.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from traincast.traces.kineto import read_kineto
from traincast.traces.link import link_trace
from traincast.traces.overheads.extraction import measure_overheads
from traincast_evaluation.fitting.host_profile import build_host_profile

TRACES = (
    tuple(f"param_dlrm_8xv100/kineto_rank{rank}.json.gz" for rank in range(8)),
    ("hta_recsys_a100_rank3of8/kineto_rank3.json.gz",),
)
SOURCES = (
    "facebookresearch/param @ 1e115ffc (MIT): ratios only",
    "facebookresearch/HolisticTraceAnalysis @ f4d0062c (MIT): ratios only",
)
TYPES = {"T3": "t3_us", "T5": "t5_us", "alone": "alone_us"}


@dataclass(frozen=True, slots=True)
class Ratios:
    """`t1`: by issuer, the gap before an op over that before one of Python's. `newer`: by type, what an op takes now
    over what it took in the older table."""

    t1: dict[str, float]
    newer: dict[str, float]


def read_ratios(data: Path, t2_us: Mapping[str, float], older_us: Mapping[str, Mapping[str, float]]) -> Ratios:
    """The geometric means over the traces.

    A trace is brought to the study's host by the median ratio of T2 over the ops that both know (`t2_us`: the newer
    table); the ratio of a type is the median over the ops that the trace and the older table both know.
    """
    t1: dict[str, list[float]] = {}
    newer: dict[str, list[float]] = {}
    for files in TRACES:
        linked = (link_trace(read_kineto(data / "traces" / file)) for file in files)
        profile = build_host_profile([measure_overheads(each) for each in linked], {})
        host = statistics.median(t2_us[op] / us for op, us in profile["t2_us"].items() if op in t2_us)
        for name, us in profile["t1_us"].items():
            t1.setdefault(name, []).append(us / profile["t1_us"]["python"])
        for kind, key in TYPES.items():
            both = [op for op, us in profile[key].items() if us > 0 and older_us[kind].get(op, 0.0) > 0]
            ratio = statistics.median(host * profile[key][op] / older_us[kind][op] for op in both)
            newer.setdefault(kind, []).append(ratio)
    return Ratios(*({name: _compute_geometric_mean(values) for name, values in table.items()} for table in (t1, newer)))


def _compute_geometric_mean(values: list[float]) -> float:
    return math.exp(statistics.fmean(math.log(value) for value in values))
