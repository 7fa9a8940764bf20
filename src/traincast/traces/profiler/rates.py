"""What ops of known arithmetic reached: operations and bytes per second by op and shape, alongside the device's
peaks."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import numpy as np

from traincast.costs.kernels.call import Calls, KernelCall
from traincast.costs.kernels.lower import list_registered_ops
from traincast.costs.kernels.work import count_work
from traincast.hardware.catalog import find_device_by_name
from traincast.hardware.device import Device
from traincast.ir.ops import Signature
from traincast.traces.events import Kind
from traincast.traces.link import Linked
from traincast.traces.profiler.kernels import find_kernels_in_steps
from traincast.traces.profiler.ops import COMPOSITE, OpFinder, infer_framework_version, make_version_context
from traincast.traces.signatures import SignatureReader
from traincast.utils.arrays import BoolArray, FloatArray, IntArray
from traincast.utils.errors import TraincastError

_ARITHMETIC = ("gemm", "attention", "conv")  # families whose operations count; all others move data
FAMILIES = (*_ARITHMETIC, "embedding", "norm", "softmax", "elementwise", "reduction", "copy")
"""The families whose ops are shown with their rates."""

_TENSOR_CORES = re.compile(r"tf32|s1688", re.IGNORECASE)
_MOST_SHAPES = 20_000  # ops and shapes with most time that are looked at: a step has hundreds
_DEEPEST = 64  # ops above a launch
# what these ops worked on follows from others of the trace too: each has to be looked at by itself
_BY_ITSELF = re.compile(r"convolution|conv[123]d|lookup|SplitLookup", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class RateRow:
    """An op with the shapes of its tensors: all of its kernels in the steps of a trace, in seconds.

    `flops` and `bytes` are those of one call: every operand counts once, so caches can make a rate exceed the
    memory's. `of_flops` and `of_bandwidth` are shares of the device's peaks (None where the device is not known, or,
    for lookups, nothing is computed).
    """

    op: str
    family: str
    shapes: str
    compute: str
    count: int
    total: float
    mean: float
    flops: float
    bytes: float
    of_flops: float | None
    of_bandwidth: float | None

    @property
    def tflops(self) -> float:
        """Operations a second, in 10^12."""
        return 1e-12 * self.flops / self.mean if self.mean else 0.0

    @property
    def tbytes(self) -> float:
        """Bytes a second, in 10^12."""
        return 1e-12 * self.bytes / self.mean if self.mean else 0.0


def make_rate_rows(linked: Linked, reader: SignatureReader) -> tuple[RateRow, ...]:
    """Ops of `FAMILIES` whose shapes were recorded, by op and shape, those with most time first."""
    rows, anchor = _find_anchored_kernels(linked)
    if not len(rows):
        return ()
    try:
        device: Device | None = find_device_by_name(linked.trace.device_name)
    except TraincastError:
        device = None
    finder = OpFinder(linked, reader)
    context = make_version_context(infer_framework_version(linked))
    found: dict[tuple[Signature, str], _RateSum] = {}
    for op, count, seconds, tf32 in _group_by_shape(linked, rows, anchor):
        signature, items = finder.lower_op(op, replace(context, tf32=tf32), strided=False)
        calls = [item for item in items if isinstance(item, KernelCall) and not item.estimated]
        main = [call for call in calls if call.family.name in _ARITHMETIC]
        main = main or [call for call in calls if call.family.name in FAMILIES]
        if signature is None or not main:
            continue
        flops, moved, compute = _compute_work(main)
        entry = found.setdefault((signature, compute), _RateSum(main[0].family.name, flops, moved))
        entry.count, entry.seconds = entry.count + count, entry.seconds + seconds
    ordered = sorted(found.items(), key=lambda item: -item[1].seconds)
    return tuple(_make_row(signature, compute, entry, device) for (signature, compute), entry in ordered)


@dataclass(slots=True)
class _RateSum:
    family: str
    flops: float
    bytes: float
    count: int = 0
    seconds: float = 0.0


def _find_anchored_kernels(linked: Linked) -> tuple[IntArray, IntArray]:
    """Kernels below an op that lowering knows, with the outermost such op; only ops that ran a kernel of `FAMILIES`."""
    rows = find_kernels_in_steps(linked)
    rows = rows[(linked.launch[rows] >= 0) & (linked.events["kind"][rows] == Kind.KERNEL)]
    known = list_registered_ops()
    wanted: BoolArray = np.array([_is_known(name, known) for name in linked.trace.names], dtype=np.bool_)
    wanted_op = wanted[linked.events["name"]] & (linked.events["kind"] == Kind.OP) & (linked.events["details"] > 0)
    anchor, above = np.full(len(rows), -1, dtype=np.int64), linked.parent[linked.launch[rows]]
    for _ in range(_DEEPEST):
        inside = above >= 0
        if not inside.any():
            break
        here = inside & wanted_op[np.maximum(above, 0)]
        anchor[here] = above[here]
        above = np.where(inside, linked.parent[np.maximum(above, 0)], -1)
    arithmetic = np.isin(linked.find_families(rows), FAMILIES)
    chosen = np.isin(anchor, np.unique(anchor[arithmetic & (anchor >= 0)]))
    return rows[chosen], anchor[chosen]


def _is_known(name: str, known: frozenset[str]) -> bool:
    return (name in known or "SplitLookupFunction" in name) and not COMPOSITE.match(name)


def _group_by_shape(linked: Linked, rows: IntArray, anchor: IntArray) -> list[tuple[int, int, float, bool]]:
    """(an op, how many like it, their kernels' seconds, whether in TF32) for every name and recorded arguments."""
    cores = np.array([bool(_TENSOR_CORES.search(name)) for name in linked.trace.names], dtype=np.bool_)
    ops, group = np.unique(anchor, return_inverse=True)
    group = group.reshape(-1)
    lengths: FloatArray = 1e-9 * linked.events["duration"][rows]
    seconds = np.bincount(group, lengths, minlength=len(ops))
    tf32 = np.bincount(group, cores[linked.events["name"][rows]], minlength=len(ops)) > 0
    alone = np.array([bool(_BY_ITSELF.search(name)) for name in linked.trace.names], dtype=np.bool_)
    names = linked.events["name"][ops]
    apart = np.where(alone[names], ops, -1)
    keys = np.stack([names, linked.events["details"][ops], tf32, apart], axis=1)
    _, first, kind = np.unique(keys, axis=0, return_index=True, return_inverse=True)
    total = np.bincount(kind.reshape(-1), seconds)
    count = np.bincount(kind.reshape(-1))
    most = np.argsort(-total, kind="stable")[:_MOST_SHAPES]
    return [(int(ops[first[i]]), int(count[i]), float(total[i]), bool(tf32[first[i]])) for i in most.tolist()]


def _compute_work(calls: list[KernelCall]) -> tuple[float, float, str]:
    """Operations, bytes and compute type of an op's calls."""
    flops = moved = 0.0
    for call in calls:
        done = count_work(Calls.of(call.family, [call]))
        if done is not None:
            counted = float(done[0][0]) if call.family.name in _ARITHMETIC else 0.0
            flops, moved = flops + counted, moved + float(done[1][0])
    return flops, moved, calls[0].compute


def _make_row(signature: Signature, compute: str, entry: _RateSum, device: Device | None) -> RateRow:
    mean = entry.seconds / entry.count
    known = device is not None and mean > 0
    return RateRow(
        op=signature.name,
        family=entry.family,
        shapes=" ".join("x".join(map(str, spec.shape)) or "()" for spec in signature.inputs if spec.shape),
        compute=compute,
        count=entry.count,
        total=entry.seconds,
        mean=mean,
        flops=entry.flops,
        bytes=entry.bytes,
        of_flops=entry.flops / mean / device.get_peak_flops(compute) if known and device and entry.flops else None,
        of_bandwidth=entry.bytes / mean / device.dram_bandwidth if known and device else None,
    )
