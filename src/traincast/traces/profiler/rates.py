"""Which op of a timeline explains a launch, and the operations and bytes per second it reached, alongside the
device's."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

import numpy as np

from traincast.costs.kernels.contract import Calls, KernelCall
from traincast.costs.kernels.cost import count_work
from traincast.costs.kernels.lower import list_registered_ops, lower
from traincast.costs.kernels.registry import Item, LoweringContext
from traincast.costs.kernels.streaming import COPY, MEMCPY
from traincast.hardware.device import Device
from traincast.hardware.platform import find_device_by_name
from traincast.ir.ops import Signature
from traincast.traces.events import Kind
from traincast.traces.link import Linked
from traincast.traces.profiler.kernels import find_kernels_in_steps
from traincast.traces.signatures import SignatureReader
from traincast.utils.arrays import BoolArray, FloatArray, IntArray
from traincast.utils.errors import TraincastError

# ops that only call others: what they call is costed
COMPOSITE = re.compile(
    r"aten::(?:linear|to|contiguous|reshape|flatten|matmul|conv[123]d|zeros|ones|full|zeros_like|ones_like|item|pin_memory"
    r"|_batch_norm_impl_index|max_pool2d|stack|embedding_bag|\w*\.\w*)$"
)
_NODE = re.compile(r"(?:Addmm|Mm|Bmm|Mul|View|T|Sum|Mean|CudnnConvolution|Convolution)Backward(\d?)$")


# what only PyTorch 2 has: ops and kernels of it, and devices that nothing older runs on
_SINCE_2 = re.compile(
    r"scaled_dot_product|CompiledFunction|Torch-Compiled|_batch_norm_legit|^triton_|^ncclDevKernel|std::array<char"
)
_NEW_DEVICES = re.compile(r"\b(?:G?H[128]00|GH200|H20|G?B[23]00|MI3\d\d\w*)\b")
_VECTOR_NORM = "vectorized_layer_norm"  # since 1.13


def infer_framework_version(linked: Linked) -> str:
    """The PyTorch version a timeline looks like: autograd nodes are numbered since 1.11; ops have ids (not in every
    profile), and names that only PyTorch 2 has, since 2.0."""
    names = linked.trace.names
    nodes = [node[1] for node in map(_NODE.match, names) if node]
    if nodes and not all(nodes):
        return "1.8"
    if (linked.events["record_function"] > 0).any() or any(map(_SINCE_2.search, names)):
        return "2.1"
    if _NEW_DEVICES.search(linked.trace.device_name):
        return "2.1"
    return "1.13" if any(_VECTOR_NORM in name for name in names) else "1.12"


def make_version_context(version: str) -> LoweringContext:
    """How that version lowers."""
    major, _, minor = version.partition(".")
    return LoweringContext(framework_version=(int(major), int(minor)))


@dataclass(eq=False, slots=True)
class OpFinder:
    """Ties launches to the ops that explain them."""

    linked: Linked
    reader: SignatureReader
    _anchors: dict[int, int] = field(default_factory=dict)

    def find_anchor(self, launch: int) -> int:
        """The outermost op above a launch that lowering knows, else the innermost with shapes, else the innermost;
        -1 for none."""
        row = int(self.linked.parent[launch])
        if row in self._anchors:
            return self._anchors[row]
        chain = self.list_enclosing_ops(launch)
        ops = [op for op in chain if not COMPOSITE.match(self.linked.get_name(op))]
        known = [op for op in ops if self._is_lowered(op)]
        anchor = next((op for op in ops if self._has_shapes(op)), chain[0] if chain else -1)
        anchor = self._skip_nested(known) if known else anchor
        self._anchors[row] = anchor
        return anchor

    def _skip_nested(self, ops: list[int]) -> int:
        """The outermost of these ops, or the one of the same name inside of it that has larger tensors: shapes of
        nested tensors are not recorded, and their ops call themselves with plain ones."""
        name = self.linked.events["name"]
        return max((op for op in reversed(ops) if name[op] == name[ops[-1]]), key=self._count_elements)

    def _count_elements(self, op: int) -> int:
        """Elements of the largest tensor that an op was given."""
        recorded = self.reader.get_recorded(op)
        return max((spec.numel for spec in recorded.tensors), default=0) if recorded is not None else 0

    def list_enclosing_ops(self, launch: int) -> list[int]:
        """The ops that enclose a launch, innermost first."""
        return [row for row in self.linked.iterate_enclosing(launch) if self.linked.events["kind"][row] == Kind.OP]

    def _is_lowered(self, op: int) -> bool:
        name = self.linked.get_name(op)
        if name not in list_registered_ops() and "SplitLookupFunction" not in name:
            return False
        return self.reader.get_signature(op) is not None

    def _has_shapes(self, op: int) -> bool:
        name = self.linked.get_name(op)
        return name.startswith(("aten::", "fbgemm::")) and self.reader.get_signature(op) is not None

    def read_copy(self, row: int) -> KernelCall | None:
        """Copies and memsets say themselves what they move and where."""
        kind, nbytes = self.linked.events["kind"][row], int(self.linked.events["bytes"][row])
        name = self.linked.get_name(row)
        if kind == Kind.KERNEL or nbytes < 0:
            return None
        if kind == Kind.MEMSET:
            return MEMCPY.call("memset", "int8", bytes=nbytes)
        pinned = "pageable" if "Pageable" in name else "pinned"
        for direction, family_kind in (("HtoD", f"h2d_{pinned}"), ("DtoH", f"d2h_{pinned}"), ("DtoD", "d2d")):
            if direction in name:
                return MEMCPY.call(family_kind, "int8", bytes=nbytes)
        return None

    def lower_op(
        self, op: int, context: LoweringContext, *, strided: bool
    ) -> tuple[Signature | None, tuple[Item, ...]]:
        """The signature of an op and what it lowers to; nothing where what was recorded does not make a whole op."""
        signature = self.reader.get_signature(op, strided=strided)
        if signature is None:
            return None, ()
        try:
            return signature, lower(signature, context)
        except (AssertionError, IndexError, ValueError, TraincastError, ZeroDivisionError):
            return None, ()


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
    anchor, above = np.full(len(rows), -1, dtype=np.int64), linked.parent[linked.author[rows]]
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
    replay = np.where(linked.launch[rows] != linked.author[rows], linked.launch[rows], -1)
    (_, ops), group = np.unique(np.stack([replay, anchor]), axis=1, return_inverse=True)
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
        one = Calls.of(call.family, [call])
        done = count_work(one)
        if call.family is COPY:  # which computes nothing
            moved += float(one["bytes_read"][0] + one["bytes_written"][0])
        elif done is not None:
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
