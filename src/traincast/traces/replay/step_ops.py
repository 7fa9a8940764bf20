"""One step of one traced rank as pieces: what its launches and synchronisations are as ops, and what waits for what."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from traincast.costs.kernels.contract import KernelCall
from traincast.costs.kernels.registry import Control, LoweringContext
from traincast.hardware.platform import find_device_by_name
from traincast.ir.ops import Signature, TensorSpec
from traincast.simulator.schedule import Code
from traincast.traces.classify import COMMUNICATION, find_kernel_family
from traincast.traces.events import Kind
from traincast.traces.link import Linked
from traincast.traces.profiler.rates import OpFinder
from traincast.traces.replay.timeline import TimelineInstructions
from traincast.traces.signatures import SignatureReader
from traincast.utils.errors import TraincastError

_WAIT_EVENT = re.compile(r"(?:cuda|hip|cu)StreamWaitEvent")
_TO_HOST = frozenset({"aten::item", "aten::_local_scalar_dense", "aten::is_nonzero", "aten::nonzero", "aten::equal"})
_ALL_STREAMS = -1  # no stream has this number


@dataclass(eq=False, slots=True)
class StepOp:
    """An op of the step: the call that began it, its kernels (events), the stream they ran on, and its signature.

    `make_placeholder` says that nothing is known but that a kernel ran. `waits` are earlier pieces of other streams
    that have to be done first.
    """

    call: int
    stream: int
    signature: Signature
    rows: list[int] = field(default_factory=list)
    stand_in: bool = False
    waits: list[StepOp] = field(default_factory=list)

    @property
    def collective(self) -> bool:
        """Whether it exchanges data with other ranks."""
        return self.signature.scalar("collective") is not None


def list_step_ops(
    linked: Linked,
    instructions: TimelineInstructions,
    reader: SignatureReader,
    context: LoweringContext,
    step: int,
    collectives: Mapping[int, Signature],
) -> list[StepOp]:
    """The pieces of step number `step` of the trace in host order; `collectives` are the ops of its collective kernels
    by event."""
    cutter = _OpSplitter(
        linked, OpFinder(linked, reader), context, collectives, _find_awaited_streams(linked, instructions)
    )
    calls = np.flatnonzero((linked.is_launch | linked.is_synchronise) & (linked.step == step) & (linked.thread >= 0))
    for call in calls[np.argsort(linked.events["start"][calls], kind="stable")].tolist():
        cutter.add_call(call)
    for block in cutter.estimated:
        _bound_by_time(linked, block)
    _find_waits(linked, cutter.pieces, step)
    return cutter.pieces


def _bound_by_time(linked: Linked, block: StepOp) -> None:
    """Makes an op that nobody modelled move no more bytes than the traced device can in the time it took: one that is
    given a whole cache of keys and values and writes one row of it looks like thousands of times as much."""
    try:
        device = find_device_by_name(linked.trace.device_name)
    except TraincastError:
        return
    most = int(1e-9 * float(linked.events["duration"][block.rows].sum()) * device.dram_bandwidth)
    if sum(spec.nbytes for spec in (*block.signature.inputs, *block.signature.outputs)) > most:
        half = _make_byte_tensor("cuda", max(most // 2, 1))
        block.signature = Signature(f"trace::{block.signature.name[:80]}", (half,), (half,))


def _find_awaited_streams(linked: Linked, instructions: TimelineInstructions) -> dict[int, int]:
    """For synchronising calls the stream that the replay found them waiting for, or -1 for all of them."""
    held = {}
    for code, target, row in zip(
        instructions.schedule.code, instructions.schedule.target, instructions.row, strict=True
    ):
        if code == Code.STREAM_SYNCHRONIZE:
            held[int(row)] = int(target)
        elif code == Code.DEVICE_SYNCHRONIZE:
            held[int(row)] = _ALL_STREAMS
    return held


class _OpSplitter:
    def __init__(
        self,
        linked: Linked,
        finder: OpFinder,
        context: LoweringContext,
        collectives: Mapping[int, Signature],
        held: dict[int, int],
    ) -> None:
        self.linked, self.finder, self.context, self.collectives, self.held = (
            linked, finder, context, collectives, held,
        )  # fmt: skip
        self.pieces: list[StepOp] = []
        self.by_anchor: dict[tuple[int, int], StepOp] = {}  # by launch of a graph, and op
        self.estimated: list[StepOp] = []
        self.waiting: set[int] = set()  # ops whose lowering makes the host wait by itself
        self.last_stream: dict[int, int] = {}  # thread -> stream of its last launch

    def add_call(self, call: int) -> None:
        """Adds what one runtime call did."""
        rows = self.linked.kernels_of.get(call, [])
        for row in rows:
            self._add_kernel(call, row)
            if find_kernel_family(self.linked.get_name(row)) != COMMUNICATION:
                self.last_stream[int(self.linked.thread[call])] = int(self.linked.stream[row])
        if self.linked.is_synchronise[call] and not rows:
            self._add_synchronisation(call)

    def _add_kernel(self, call: int, row: int) -> None:
        stream = int(self.linked.stream[row])
        if row in self.collectives:
            self.pieces.append(StepOp(call, stream, self.collectives[row], [row]))
            return
        author = int(self.linked.author[row])
        chain = self.finder.list_enclosing_ops(author)
        kind, known = self.linked.events["kind"][row], self.finder.read_copy(row) is not None
        if kind == Kind.MEMCPY and known and not any(self.linked.get_name(op) in _TO_HOST for op in chain):
            self.pieces.append(StepOp(call, stream, self._make_copy(call, row), [row]))
            return
        anchor = next((op for op in chain if self.linked.get_name(op) in _TO_HOST), self.finder.find_anchor(author))
        key = (self.linked.find_replay(row), anchor)
        if key in self.by_anchor:
            self.by_anchor[key].rows.append(row)
            return
        strided = bool(kind == Kind.KERNEL)
        signature, items = self.finder.lower_op(anchor, self.context, strided=strided) if anchor >= 0 else (None, ())
        if kind == Kind.MEMSET and known and not items:
            target = _make_byte_tensor("cuda", int(self.linked.events["bytes"][row]))
            self.pieces.append(StepOp(call, stream, Signature("aten::zero_", (target,), (target,)), [row]))
            return
        if signature is None or not items:
            name = self.linked.get_name(anchor if anchor >= 0 else row)
            self.pieces.append(StepOp(call, stream, make_placeholder(name), [row], stand_in=True))
            return
        block = StepOp(call, stream, signature, [row])
        self.by_anchor[key] = block
        self.pieces.append(block)
        if any(isinstance(item, KernelCall) and item.estimated for item in items):
            self.estimated.append(block)
        if any(isinstance(item, Control) for item in items):
            self.waiting.add(anchor)

    def _make_copy(self, call: int, row: int) -> Signature:
        """A copy of this many bytes; it is blocking if its op synchronises next."""
        name, nbytes = self.linked.get_name(row), int(self.linked.events["bytes"][row])
        host = "cpu" if "Pageable" in name else "cpu:pinned"
        source, target = {"HtoD": (host, "cuda"), "DtoH": ("cuda", host)}.get(name.split()[1], ("cuda", "cuda"))
        parent = int(self.linked.parent[call])
        blocking = bool(self.linked.is_synchronise[call]) or self._is_synchronised_by(
            parent, int(self.linked.end[call])
        )
        if blocking:
            self.waiting.add(parent)
        into, out_of = _make_byte_tensor(target, nbytes), _make_byte_tensor(source, nbytes)
        scalars = (("non_blocking", not blocking),)
        return Signature("aten::copy_", (into, out_of), (into,), scalars, (("self", 1), ("src", 1)))

    def _is_synchronised_by(self, op: int, after: int) -> bool:
        """Whether an op itself makes the host wait after this moment."""
        if op < 0:
            return False
        linked = self.linked
        inside = linked.is_synchronise & (linked.parent == op) & (linked.events["start"] >= after)
        return bool(inside.any())

    def _add_synchronisation(self, call: int) -> None:
        parent = int(self.linked.parent[call])
        if parent in self.waiting or any(op in self.waiting for op in self.finder.list_enclosing_ops(call)):
            return
        everything = "Device" in self.linked.get_name(call) or self.held.get(call) == _ALL_STREAMS
        stream = self.held.get(call, self.last_stream.get(int(self.linked.thread[call]), 0))
        name = "cuda::device_synchronize" if everything else "cuda::stream_synchronize"
        self.pieces.append(StepOp(call, stream, Signature(name, (), ())))


def make_placeholder(name: str) -> Signature:
    """An op of which nothing is known but its name: one kernel on one element."""
    one = TensorSpec((1,), (1,), "float32")
    return Signature(f"trace::{name[:80]}", (one,), (one,))


def _make_byte_tensor(device: str, nbytes: int) -> TensorSpec:
    return TensorSpec((nbytes,), (1,), "uint8", device)


def _find_waits(linked: Linked, blocks: list[StepOp], step: int) -> None:
    """What has to be done before each piece, besides what is before it on its stream.

    A collective waits for the stream that it is issued to. A kernel that was seen waiting waits for what it was seen
    waiting for. Every other `StreamWaitEvent` makes the next kernel of its thread wait for the last one launched
    elsewhere that had ended when it began: what it really meant is not recorded, but in this run it was no more.
    """
    of_row = {row: block for block in blocks for row in block.rows}
    starts = linked.events["start"]
    calls = np.flatnonzero(linked.find_runtime_rows(_WAIT_EVENT) & (linked.step == step) & (linked.thread >= 0))
    calls = calls[[not _is_under_collective(linked, call) for call in calls.tolist()]]
    pending: dict[int, int] = {}  # thread -> moment of its last wait call
    issued: dict[int, StepOp] = {}  # thread -> its last piece with kernels that is no collective
    moments: list[tuple[int, int, int, StepOp | None]] = [(int(starts[call]), 0, call, None) for call in calls.tolist()]
    moments += [(int(starts[block.call]), 1, block.call, block) for block in blocks]
    done: list[StepOp] = []
    for moment, _, call, block in sorted(moments, key=lambda item: item[:3]):
        thread = int(linked.thread[call])
        if block is None:
            pending[thread] = moment
            continue
        if not block.rows:
            continue
        seen = [of_row[int(w)] for w in linked.waited_for[block.rows] if w >= 0 and int(w) in of_row]
        if block.collective:
            seen += [issued[thread]] if thread in issued else []
        elif thread in pending:
            begin = int(starts[block.rows[0]])
            elsewhere = (p for p in reversed(done) if p.stream != block.stream)
            seen += [p for p in elsewhere if max(int(linked.end[row]) for row in p.rows) <= begin][:1]
            del pending[thread]
        block.waits = [p for p in dict.fromkeys(seen) if p is not block and p.stream != block.stream]
        done.append(block)
        if not block.collective:
            issued[thread] = block


def _is_under_collective(linked: Linked, call: int) -> bool:
    """Whether a call belongs to the launch of a collective."""
    return any(
        linked.get_name(row).startswith(("c10d::", "nccl:", "_c10d_functional::"))
        for row in linked.iterate_enclosing(call)
    )
