"""Predicted durations for the kernels of a timeline: its ops lowered, priced and matched to what was measured;
unmodelled ones carried over (`carrying.py`)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

import numpy as np

from traincast.costs.in_step import SHIPPED
from traincast.costs.kernels.contract import Calls, KernelCall
from traincast.costs.kernels.cost import OUTSIDE_SIGMA, convert_seconds_in_step, price_calls
from traincast.costs.kernels.registry import LoweringContext
from traincast.costs.kernels.streaming import COPY, ELEMENTWISE, MEMCPY, REDUCTION
from traincast.costs.kernels.streaming.launches import CHEAP_KINDS, make_layout_copy
from traincast.costs.kernels.streaming.physics import INTEGER_LANES
from traincast.hardware.device import VOLTA, Device
from traincast.hardware.platform import find_device_by_name
from traincast.ir.ops import Signature
from traincast.simulator.overlap import slow_down_beside
from traincast.traces.events import Kind
from traincast.traces.link import Linked
from traincast.traces.profiler.rates import OpFinder, infer_framework_version, make_version_context
from traincast.traces.replay.carrying import BOUND_BY_ARITHMETIC, PER_THREAD, carry_kernels, read_grids
from traincast.traces.signatures import SignatureReader
from traincast.traces.slowdowns import compute_overlaps
from traincast.utils.arrays import FloatArray, IntArray
from traincast.utils.errors import TraincastError

_TENSOR_CORES = re.compile(r"tf32|s1688(?!16)", re.IGNORECASE)
_SECTORS = 2.2  # times that such a copy reads: of A100 traces of two sources; those of H100 say 2.0 to 2.3
_STRIDED = re.compile(r"(?<![a-z_])(?:unrolled_)?elementwise_kernel<")  # unrolled: operands of unlike types
_JOINED = re.compile(
    r"CatArrayBatchedCopy(?:_contig)?<.*?, unsigned int, ([1-4]),"
)  # one by one, of so many dimensions
_UNRECORDED = 4.0  # times the elements of the recorded shapes
_UNSPLIT = 256.0  # elements of a result up to which PyTorch splits it over no threads unless they are contiguous
_SUMMED = re.compile(r"ReduceOp<(short|int),")
_SUM_BYTES = {"short": 2.0, "int": 4.0}


class Known(IntEnum):
    """How a kernel's predicted duration was found, or why its measured one stands in."""

    MODEL = 0  # from its op's shapes, kernel by kernel
    OP = 1  # likewise, but lowering and trace differ in the number of kernels: the op's total is right, its split not
    ESTIMATED = 2  # nobody has modelled the op: measured duration, carried to another device
    COMMUNICATION = 3  # collectives keep their measured duration
    NO_SHAPES = 4  # the trace does not say what the op worked on: likewise
    NO_OP = 5  # launched outside of any op: likewise
    HOST_COPY = 6  # between host and device while the host is the trace's own: measured duration


KEPT = (Known.ESTIMATED, Known.COMMUNICATION, Known.NO_SHAPES, Known.NO_OP, Known.HOST_COPY)
_NOT_CARRIED = (Known.COMMUNICATION, Known.HOST_COPY)  # what other hardware than the GPU sets
_UNKNOWN_SOURCE = 0.7  # log-sigma of kernels kept as measured on a device that the trace does not name
_OTHER_MACHINE = 0.3  # log-sigma of collectives and copies kept as measured beside another device
_HOST_COPY = re.compile(r"HtoD|DtoH|CopyHostToDevice|CopyDeviceToHost")
_STREAMS = ("elementwise", "norm", "copy", "softmax", "reduction", "pool")
_TELLING_SECONDS, _TELLING = 1e-5, 30  # of a kernel that is more than its start, and how many of them say something
_OP_SIGMA = 0.15  # on top where an op's total is split over other kernels than lowering knows


@dataclass(frozen=True, eq=False, kw_only=True)
class TracedKernels:
    """The kernels of a timeline with their measured and predicted durations in seconds, and the log-sigma of these.
    `KEPT` ones are equal, or on another device than the trace's carried over (collectives are not): see `unmodelled`.

    `row` is the event, `op` the name of the op that was lowered ("" for none), `family` that of the measured kernel.
    `carried` says that kept ones were carried from one device to another.
    """

    row: IntArray
    op: tuple[str, ...]
    family: tuple[str, ...]
    measured: FloatArray
    predicted: FloatArray
    sigma: FloatArray
    known: IntArray
    framework_version: str
    carried: bool = False

    @property
    def modelled(self) -> float:
        """Share of the measured time, collectives and kept copies left out, that was predicted from shapes."""
        computes = ~np.isin(self.known, _NOT_CARRIED)
        whole = float(self.measured[computes].sum())
        return float(self.measured[~np.isin(self.known, KEPT)].sum()) / whole if whole else 0.0

    def compare_bounds(self) -> tuple[float, float] | None:
        """How many times as long as predicted kernels that multiply and kernels that stream memory took; nothing where
        too few of either tell. The first alone is far off where the GPU's clock was low."""
        known = ~np.isin(self.known, KEPT) & (self.measured >= _TELLING_SECONDS)
        families = np.array(self.family, dtype=object)
        products, streams = (known & np.isin(families, list(names)) for names in (BOUND_BY_ARITHMETIC, _STREAMS))
        if min(int(products.sum()), int(streams.sum())) < _TELLING:
            return None
        first, second = (float(self.measured[rows].sum() / self.predicted[rows].sum()) for rows in (products, streams))
        return first, second

    def compute_spread(self) -> float:
        """Log-sigma of all kernel time: kernels of a family and kind of knowledge are off together, others apart."""
        groups: dict[tuple[str, bool], float] = {}
        kept = np.isin(self.known, KEPT)
        for family, held, seconds in zip(
            self.family, kept.tolist(), (self.predicted * self.sigma).tolist(), strict=True
        ):
            groups[family, held] = groups.get((family, held), 0.0) + seconds
        whole = float(self.predicted.sum())
        return float(np.sqrt(sum(value**2 for value in groups.values()))) / whole if whole else 0.0


def predict_kernels(
    linked: Linked, reader: SignatureReader, device: Device, *, own_host: bool = False
) -> TracedKernels:
    """Predicts every kernel whose op recorded its shapes; all others keep what was measured. With `own_host` so do
    copies from and to the host: its memory and its link are those of the trace."""
    version = infer_framework_version(linked)
    rows = linked.device[linked.launch[linked.device] >= 0]
    source, grids = _find_source(linked.trace.device_name), read_grids(linked, rows)
    threads = grids.threads * np.maximum(grids.blocks - 1.0, 0.0) * (source is not None and source.vendor == "nvidia")
    matcher = _Matcher(linked, OpFinder(linked, reader), make_version_context(version), rows, threads)
    matcher.match_all()
    measured = 1e-9 * linked.events["duration"][rows]
    families = linked.find_families(rows)
    predicted, sigma = matcher.predict_seconds(measured, device)
    if own_host:
        copied = np.array([bool(_HOST_COPY.search(linked.get_name(row))) for row in rows.tolist()], dtype=np.bool_)
        copied &= matcher.known == Known.MODEL
        matcher.known[copied], predicted[copied], sigma[copied] = Known.HOST_COPY, measured[copied], 0.0
    kept = np.isin(matcher.known, [int(known) for known in KEPT if known not in _NOT_CARRIED])
    beside = compute_overlaps(linked, rows)[0] / np.maximum(linked.events["duration"][rows], 1.0)
    slowed = ~np.isin(matcher.known, KEPT)
    predicted[slowed] += slow_down_beside(predicted, beside)[slowed]
    if source is not None and source.key != device.key:
        names = [linked.trace.names[number] for number in linked.find_telling_names(rows[kept]).tolist()]
        found = carry_kernels(
            measured[kept],
            families[kept].tolist(),
            names,
            grids.take(kept),
            source,
            device,
        )
        predicted[kept], sigma[kept] = found.seconds, found.sigma
        sigma[np.isin(matcher.known, _NOT_CARRIED)] = _OTHER_MACHINE
    elif source is None:
        sigma[kept] = _UNKNOWN_SOURCE
    return TracedKernels(
        row=rows,
        op=tuple(linked.get_name(op) if op >= 0 else "" for op in matcher.op.tolist()),
        family=tuple(families.tolist()),
        measured=measured,
        predicted=predicted,
        sigma=sigma,
        known=matcher.known,
        framework_version=version,
        carried=source is not None and source.key != device.key,
    )


class _Matcher:
    """Ties kernels to the op that explains them and to the calls that its lowering gives."""

    def __init__(
        self, linked: Linked, finder: OpFinder, context: LoweringContext, rows: IntArray, threads: FloatArray
    ) -> None:
        self.linked, self.finder, self.context, self.rows = linked, finder, context, rows
        self.threads = threads  # of all blocks but the last; 0 where that is not known
        self.op = np.full(len(rows), -1, dtype=np.int64)
        self.known = np.full(len(rows), int(Known.NO_OP), dtype=np.int64)
        self.single: dict[int, KernelCall] = {}  # kernel -> its call
        self.groups: list[tuple[list[int], list[KernelCall]]] = []  # kernels of an op -> all calls of the op

    def match_all(self) -> None:
        by_op: dict[tuple[int, int], list[int]] = {}
        for index, (row, exchanges) in enumerate(
            zip(self.rows.tolist(), self.linked.find_communication(self.rows), strict=True)
        ):
            if exchanges:
                self.known[index] = Known.COMMUNICATION
                continue
            anchor = self.finder.find_anchor(int(self.linked.author[row]))
            self.op[index] = anchor
            copy = self.finder.read_copy(row)
            if copy is not None:
                self.single[index], self.known[index] = copy, Known.MODEL
            elif anchor >= 0:
                by_op.setdefault((self.linked.find_replay(row), anchor), []).append(index)
        for (_, anchor), indices in by_op.items():
            self._match_op(anchor, indices)

    def _match_op(self, anchor: int, indices: list[int]) -> None:
        strided = all(self.linked.events["kind"][self.rows[index]] == Kind.KERNEL for index in indices)
        # which type a product computed in is the library's choice and stands in its kernels' names
        names = [self.linked.get_name(int(self.rows[index])) for index in indices]
        tf32 = any(map(_TENSOR_CORES.search, names))
        signature, items = self.finder.lower_op(anchor, replace(self.context, tf32=tf32), strided=strided)
        calls = [item for item in items if isinstance(item, KernelCall)]
        calls = _add_copies(calls, signature, names)
        if any(call.family is MEMCPY for call in calls) and strided:
            kernels = [call for call in calls if call.family is not MEMCPY]
            calls = kernels if len(kernels) >= len(indices) else calls
        if not calls or any(call.estimated for call in calls):
            self.known[indices] = Known.ESTIMATED if calls else Known.NO_SHAPES
            return
        if len(calls) == len(indices):
            summed = next((found[1] for name in names if (found := _SUMMED.search(name))), "")
            calls = [_narrow_sum(call, summed) for call in calls]
            threads = self.threads[indices].tolist()
            self.single |= dict(zip(indices, map(_follow_kernel, calls, names, threads), strict=True))
            known = Known.MODEL
        else:
            self.groups.append((indices, calls))
            known = Known.OP
        self.known[indices] = known

    def _divide(self, index: int, call: KernelCall, device: Device) -> KernelCall:
        """A concatenation of tensors of several dimensions, element by element: the place in each but the last is a
        division."""
        joined = _JOINED.search(self.linked.get_name(int(self.rows[index]))) if call.kind == "cat" else None
        each = device.cores_per_sm / INTEGER_LANES if device.is_capability_at_least(VOLTA) else 1.0
        return _scale(call, elements=(int(joined[1]) - 1) * each) if joined else call

    def predict_seconds(self, measured: FloatArray, device: Device) -> tuple[FloatArray, FloatArray]:
        """Predicted durations and their log-sigmas; where only an op's total is predicted, it is split as the measured
        one was."""
        self.single = {index: self._divide(index, call, device) for index, call in self.single.items()}
        every = list(self.single.values()) + [call for _, calls in self.groups for call in calls]
        price = _predict_calls(every, device)
        predicted, sigma = measured.copy(), np.zeros(len(measured))
        for index, call in self.single.items():
            predicted[index], sigma[index] = price[call]
        for indices, calls in self.groups:
            total = sum(price[call][0] for call in calls)
            shares = measured[indices]
            whole = float(shares.sum())
            predicted[indices] = total * (shares / whole if whole > 0 else 1.0 / len(indices))
            sigma[indices] = np.hypot(max(price[call][1] for call in calls), _OP_SIGMA)
        return predicted, sigma


def _add_copies(calls: list[KernelCall], signature: Signature | None, names: Sequence[str]) -> list[KernelCall]:
    """The calls of an op with one for each copy among its kernels that lowering does not know of: of an operand that is
    not laid out as the kernel behind it takes it. Only where that makes them as many as the kernels."""
    copies = [place for place, name in enumerate(names) if "direct_copy_kernel" in name]
    if signature is None or not calls or len(calls) + len(copies) != len(names):
        return calls
    copy = make_layout_copy(max(signature.inputs, key=lambda spec: spec.numel))
    left = iter(calls)
    return [copy if place in copies else next(left) for place in range(len(names))]


def _narrow_sum(call: KernelCall, summed: str) -> KernelCall:
    """A sum of flags or integers, or the copy of them before it, in the type that the kernel's name says."""
    if summed not in _SUM_BYTES or call.compute != "int64" or call.family not in (REDUCTION, ELEMENTWISE):
        return call
    return _scale(call, **{"bytes_read" if call.family is REDUCTION else "bytes_written": _SUM_BYTES[summed] / 8.0})


def _follow_kernel(call: KernelCall, name: str, threads: float) -> KernelCall:
    """The call as the kernel that ran says: operands that are not laid out or typed alike run a kernel of their own,
    element by element, whose copies fetch what they read more than once. Where its threads are many times those of the
    recorded shapes, an operand's shape was not recorded (that of a nested tensor) and is as large as they say."""
    if call.family is REDUCTION:
        return _follow_reduction(call, threads)
    if call.family not in (ELEMENTWISE, COPY):
        return call
    work = PER_THREAD.search(name)
    known = call.values[call.family.fields.index("elements")]
    larger = threads * int(work[1]) / known if work and known else 1.0
    if larger > _UNRECORDED:
        call = _scale(call, elements=larger, bytes_read=larger, bytes_written=larger)
    if not _STRIDED.search(name):
        return call
    if call.family is ELEMENTWISE:
        return replace(call, kind="strided") if call.kind in CHEAP_KINDS else call
    return _scale(call, bytes_read=_SECTORS) if "unrolled" not in name else call


def _follow_reduction(call: KernelCall, threads: float) -> KernelCall:
    """A reduction over another dimension than the last whose threads say that it was contiguous (channels last): then a
    result has as many as a row has elements, up to a warp, where else it had one."""
    size, outputs, *_ = call.values
    lanes = min(size / max(outputs, 1.0), 32.0)
    contiguous = (
        call.kind == "outer" and lanes >= 4.0 and size <= _UNSPLIT * outputs and threads >= 0.5 * lanes * outputs
    )
    return replace(call, kind="inner") if contiguous else call


def _scale(call: KernelCall, **factors: float) -> KernelCall:
    """The call with some of its values multiplied."""
    fields = zip(call.family.fields, call.values, strict=True)
    return replace(call, values=tuple(value * factors.get(field, 1.0) for field, value in fields))


def _find_source(name: str) -> Device | None:
    """The device that a trace names, where it is known."""
    try:
        return find_device_by_name(name)
    except TraincastError:
        return None


def _predict_calls(calls: list[KernelCall], device: Device) -> dict[KernelCall, tuple[float, float]]:
    """Device seconds of every distinct call in a step, and their log-sigma."""
    by_family: dict[str, list[KernelCall]] = {}
    for call in dict.fromkeys(calls):
        by_family.setdefault(call.family.name, []).append(call)
    prices: dict[KernelCall, tuple[float, float]] = {}
    for members in by_family.values():
        columns = Calls.of(members[0].family, members)
        estimate, _ = price_calls(columns, device)
        seconds = estimate.seconds * device.corrections.get(members[0].family.name, 1.0)
        seconds = convert_seconds_in_step(columns, members, seconds, device, SHIPPED)
        spread = np.hypot(estimate.sigma, np.where(estimate.in_domain, 0.0, OUTSIDE_SIGMA))
        prices |= dict(zip(members, zip(seconds.tolist(), spread.tolist(), strict=True), strict=True))
    return prices
