"""A traced run as a workload that can be saved and predicted elsewhere: one step of every rank, op by op."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from traincast.costs.host.profile import get_current_name
from traincast.ir.builder import ProgramBuilder
from traincast.ir.collectives import BARRIER_BYTES, COLLECTIVES, UNEVEN_FORM
from traincast.ir.ops import Phase, Scalar, Signature, TensorSpec
from traincast.ir.program import Program
from traincast.ir.workload import COVERS, LOADER, TF32_ARITHMETIC, Workload
from traincast.traces.classify import find_kernel_family
from traincast.traces.collectives import Collective, Match
from traincast.traces.link import Linked
from traincast.traces.profiler.rates import infer_framework_version, make_version_context
from traincast.traces.replay.results import RankReport, TraceReport
from traincast.traces.replay.step_ops import StepOp, list_step_ops
from traincast.traces.replay.timeline import JOIN_NS
from traincast.traces.replay.together import compute_message_bytes
from traincast.traces.signatures import SignatureReader
from traincast.utils.errors import TraincastError, make_unknown_error

_MOST_NAMED = 8  # ops without shapes: the largest say what is missing
RIGID = "it was made from a trace, which shows one size only"
_LOADER = "enumerate(DataLoader)"
_TENSOR_CORES = re.compile(r"tf32|s1688(?!16)", re.IGNORECASE)
_LEAST_LOADING = 0.02  # of a step: a queue that is looked into takes less
_BACKWARD = re.compile(r"Backward\d*$|AccumulateGrad|CppNode|autograd::")


@dataclass(frozen=True, eq=False, slots=True)
class _RankStep:
    program: Program
    pieces: list[StepOp]


def trace_workload(report: TraceReport, *, name: str, step: int | None = None) -> Workload:
    """One step of a traced run (default: the one of median length on the first rank) as a workload.

    Ops whose shapes were not recorded stand in as empty kernels; `meta` says which, and what else is assumed.
    """
    first = report.ranks[0]
    number = first.median_step.number if step is None else step
    world = find_world_size(report)
    ops, notes = make_collective_ops(report, world, number)
    ranks = [_make_rank_step(rank, number, signatures) for rank, signatures in zip(report.ranks, ops, strict=True)]
    batch, tokens, said = infer_sizes((block.signature for rank in ranks for block in rank.pieces), first.linked)
    notes += [said] if said else []
    programs = tuple(replace(rank.program, batch_size=batch, seq_len=tokens, rigid=RIGID) for rank in ranks)
    loader = _find_loader(report, number)
    notes += [loader[1]] if loader else []
    traced = [rank.rank for rank in report.ranks]
    place = np.maximum(np.searchsorted(traced, np.arange(world), side="right") - 1, 0)
    return Workload(
        name=name,
        programs=programs,
        ranks=tuple(int(p) for p in place),
        mode=infer_mode(first.linked),
        framework_version=infer_framework_version(first.linked),
        tf32=_find_tf32(report),
        meta=_make_meta(report, number, ranks, notes) | ({LOADER: loader[0]} if loader else {}),
    )


def _make_rank_step(rank: RankReport, number: int, collectives: dict[int, Signature]) -> _RankStep:
    linked = rank.linked
    steps = [step.number for step in linked.steps]
    if number not in steps:
        raise make_unknown_error(
            "step", str(number), [str(n) for n in steps], f"Give one that rank {rank.rank} recorded."
        )
    index = steps.index(number)
    reader = SignatureReader(linked, rank.execution, rank.node)
    context = make_version_context(infer_framework_version(linked))
    blocks = list_step_ops(linked, rank.instructions, reader, context, index, collectives)
    if not any(block.rows for block in blocks):
        raise TraincastError(f"'{linked.trace.path}' launched no kernel in step {number}: there is nothing to predict")
    return _RankStep(_Assembly(linked, index, blocks).build_program(), blocks)


class _Assembly:
    """Scopes and ops in host order, with streams and events numbered from 0."""

    def __init__(self, linked: Linked, step: int, blocks: list[StepOp]) -> None:
        self.linked, self.step, self.pieces = linked, step, blocks
        self.builder = ProgramBuilder(batch_size=1)
        compute = Counter(block.stream for block in blocks for _ in block.rows if not block.collective)
        order = [stream for stream, _ in compute.most_common()] + [block.stream for block in blocks]
        self.stream = {stream: number for number, stream in enumerate(dict.fromkeys(order))}
        self.thread: dict[int, int] = {0: 0}
        waited = dict.fromkeys(source for block in blocks for source in block.waits)
        self.event = {source: number for number, source in enumerate(waited)}

    def build_program(self) -> Program:
        events = self.linked.events
        in_step = self.linked.scopes[self.linked.step[self.linked.scopes] == self.step].tolist()
        inside: dict[int, list[StepOp]] = {row: [] for row in in_step}
        for block in self.pieces:
            scope = int(self.linked.scope[block.call])
            inside.setdefault(scope if scope >= 0 else block.call, []).append(block)
        last: dict[int, tuple[int, int]] = {}  # thread -> end of its last scope, and its number
        for row in sorted(inside, key=lambda row: int(events["start"][row])):
            thread = self.thread.setdefault(int(self.linked.thread[row]), len(self.thread))
            start, end = int(events["start"][row]), int(self.linked.end[row])
            scope = self.builder.open_scope(
                self._choose_scope_name(row, inside[row]), self._find_phase(row, thread), thread=thread,
                after=_find_awaited_scope(last, thread, start),
            )  # fmt: skip
            for block in inside[row]:
                self._emit_op(block)
            last[thread] = (end, scope)
        return self.builder.build_program()

    def _choose_scope_name(self, row: int, blocks: list[StepOp]) -> str:
        """A launch or synchronisation outside of any op is a scope of its own."""
        if self.linked.scope[row] == row:
            return get_current_name(self.linked.get_name(row))
        return blocks[0].signature.name

    def _find_phase(self, row: int, thread: int) -> Phase:
        name = self.linked.get_name(row)
        if name.startswith("Optimizer.step"):
            return Phase.OPTIMIZER
        if name.startswith(_LOADER):
            return Phase.INPUT
        if name.startswith("Optimizer."):
            return Phase.OTHER
        return Phase.BACKWARD if thread or _BACKWARD.search(name) else Phase.FORWARD

    def _emit_op(self, block: StepOp) -> None:
        stream = self.stream[block.stream]
        for source in block.waits:
            self._add_control("cuda::stream_wait_event", stream, self.event[source])
        if block.signature.name == "cuda::stream_synchronize":
            self._add_control(block.signature.name, stream)
        else:
            for _ in range(len(block.rows) if block.stand_in else 1):
                self._add_op(block.signature, stream)
        if block in self.event:
            self._add_control("cuda::event_record", stream, self.event[block])

    def _add_control(self, name: str, stream: int, event: int | None = None) -> None:
        scalars: tuple[tuple[str, Scalar], ...] = () if event is None else (("event", event),)
        self._add_op(Signature(name, (), (), (*scalars, ("stream", stream))), stream)

    def _add_op(self, signature: Signature, stream: int) -> None:
        """Tensors of a trace have no identity: each is there for its op only."""
        builder, at = self.builder, self.builder.num_ops
        tensors = []
        for spec in (*signature.inputs, *signature.outputs):
            storage = builder.add_storage(spec.nbytes)
            builder.set_lifetime(storage, at, at)
            tensors.append(builder.add_tensor(storage))
        inputs = len(signature.inputs)
        builder.add_op(signature, tensors[:inputs], tensors[inputs:], stream=stream)


def _find_awaited_scope(last: dict[int, tuple[int, int]], thread: int, start: int) -> int:
    """The scope of another thread that a silent thread waited for, or -1."""
    before = last.get(thread, (0, -1))[0]
    others = [(end, scope) for other, (end, scope) in last.items() if other != thread and before < end <= start]
    return max(others)[1] if others and start - before > JOIN_NS else -1


def _find_step(rank: RankReport, number: int) -> int:
    return [step.number for step in rank.linked.steps].index(number)


def _find_longest_step(report: TraceReport, number: int) -> float:
    return max(rank.linked.steps[_find_step(rank, number)].seconds for rank in report.ranks)


def _find_tf32(report: TraceReport) -> tuple[str, ...]:
    """Which fp32 arithmetic ran in TF32, as its kernels' names say."""
    names = {name for rank in report.ranks for name in rank.linked.trace.names if _TENSOR_CORES.search(name)}
    families = {find_kernel_family(name) for name in names}
    return tuple(kind for kind, family in zip(TF32_ARITHMETIC, ("gemm", "conv"), strict=True) if family in families)


def _find_loader(report: TraceReport, number: int) -> tuple[str, str] | None:
    """How batches came, as `LOADER` of a workload says it, and in words; None where nobody waited for them.

    A loader in the training process takes its time before each step. One with workers that the step waited for makes a
    batch in no less than the step took.
    """
    longest, name = _compute_loading_seconds(report, number)
    step = _find_longest_step(report, number)
    if longest < _LEAST_LOADING * step:
        return None
    if "SingleProcess" in name:
        return f"{1e3 * longest:.4f} 0", f"the training process makes each batch in {1e3 * longest:.2f} ms"
    return f"{1e3 * step:.4f} 1", (
        f"the step waited {1e3 * longest:.2f} ms for workers of its data loader: a batch comes every {1e3 * step:.2f} "
        "ms at best"
    )


def _compute_loading_seconds(report: TraceReport, number: int) -> tuple[float, str]:
    """Seconds of the step that its data loader took, on the rank where it took longest, and what it is called."""
    longest, name = 0.0, ""
    for rank in report.ranks:
        linked, index = rank.linked, _find_step(rank, number)
        rows = [row for row in linked.scopes[linked.step[linked.scopes] == index].tolist()
                if linked.get_name(row).startswith(_LOADER)]  # fmt: skip
        seconds = 1e-9 * float(linked.events["duration"][rows].sum())
        if seconds > longest:
            longest, name = seconds, linked.get_name(rows[0])
    return longest, name


def _make_meta(report: TraceReport, step: int, ranks: Sequence[_RankStep], notes: Iterable[str]) -> dict[str, str]:
    """What people should know about it."""
    seconds: dict[str, float] = {}
    total = 0.0
    for traced, rank in zip(report.ranks, ranks, strict=True):
        for block in rank.pieces:
            took = 1e-9 * float(traced.linked.events["duration"][block.rows].sum())
            total += 0.0 if block.collective else took
            if block.stand_in:
                name = block.signature.name.removeprefix("trace::")
                seconds[name] = seconds.get(name, 0.0) + took
    largest = sorted(seconds.items(), key=lambda item: -item[1])
    names = ", ".join(f"{name} {s / max(total, 1e-12):.1%}" for name, s in largest[:_MOST_NAMED])
    names += f" and {len(largest) - _MOST_NAMED} more" if len(largest) > _MOST_NAMED else ""
    missing = f"no shapes recorded, counted as empty kernels (share of kernel time): {names}" if names else "nothing"
    covers = describe_coverage(total - sum(seconds.values()), total)
    return {
        **({COVERS: covers} if covers else {}),
        "source": ", ".join(rank.linked.trace.path.name for rank in report.ranks),
        "step": f"{step}, measured with the profiler on: {1e3 * _find_longest_step(report, step):.2f} ms",
        "missing": missing,
        "assumed": "row-major tensors where the trace has no strides; memory: largest op only",
        **({"notes": "; ".join(notes)} if notes else {}),
    }


_PRODUCTS = re.compile(r"aten::(?:addmm|mm)$")
_CONVOLUTIONS = re.compile(r"aten::(?:convolution|_convolution|cudnn_convolution|miopen_convolution|conv[123]d)$")
_ATTENTION = re.compile(
    r"scaled_dot_product|(?:flash|efficient|varlen|unified|paged)_attention|reshape_and_cache|rotary"
)
_LENGTH_FIRST = re.compile(r"aten::_(?:flash|efficient)_attention_forward$")  # samples, tokens, heads, width
_GRADIENT = re.compile(
    r"Backward\d*$|AccumulateGrad|CppNode|autograd::|Optimizer\.|backward|[_a-z]bwd|dgrad|wgrad|multi_tensor_apply"
)
_TOLD = 0.995  # share of kernel time with sizes from which nothing need be said


def infer_sizes(signatures: Iterable[Signature], linked: Linked) -> tuple[int, int, str]:
    """Samples of a step, tokens of a sample (0 where there are none), and what is to be said about them.

    Products have samples x tokens as rows. How they divide is told by attention (samples, heads, tokens, width), by
    lookups of a table of samples x tokens, or by the images of a convolution; where tokens are in one long row, as
    servers have them, it is not told, and the step counts as one sample.
    """
    rows, images, pairs = Counter[int](), Counter[int](), Counter[tuple[int, int]]()
    for signature in signatures:
        if not signature.inputs or not signature.inputs[-1 if signature.name == "aten::embedding" else 0].shape:
            continue
        shape = signature.inputs[0].shape
        if _PRODUCTS.match(signature.name):
            operand = signature.inputs[1] if signature.name == "aten::addmm" else signature.inputs[0]
            rows[operand.shape[0] if operand.shape else 0] += 1
        elif _CONVOLUTIONS.match(signature.name):
            images[shape[0]] += 1
        elif signature.name == "aten::embedding" and len(signature.inputs[-1].shape) == 2:
            pairs[signature.inputs[-1].shape[0], signature.inputs[-1].shape[1]] += 1
        elif _ATTENTION.search(signature.name) and len(shape) == 4:
            pairs[shape[0], shape[1] if _LENGTH_FIRST.match(signature.name) else shape[2]] += 1
    most = max(rows.most_common(1)[0][0], 1) if rows else 1
    for (samples, tokens), _ in pairs.most_common():
        if samples * tokens == most:
            return samples, tokens, ""
    if images:
        return max(images.most_common(1)[0][0], 1), 0, ""
    if any(_ATTENTION.search(name) for name in linked.trace.names):
        return 1, most, f"GEMMs have {most} rows: tokens, and the trace does not say of how many samples"
    return most, 0, ""


def infer_mode(linked: Linked) -> str:
    """ "training" where something of a gradient or an optimizer was recorded, else "inference"."""
    return "training" if any(_GRADIENT.search(name) for name in linked.trace.names) else "inference"


def describe_coverage(covered: float, total: float) -> str:
    """What of the kernel time (seconds) a workload has the sizes of, in a line of its own; "" where it has all."""
    share = covered / total if total else 1.0
    if share >= _TOLD:
        return ""
    return (
        f"{share:.0%} of the kernel time: the other {1 - share:.0%} ({1e3 * (total - covered):.3g} ms) has no shapes "
        "and counts as empty kernels, so a prediction is too short by about that; record with record_shapes=True"
    )


def find_world_size(report: TraceReport) -> int:
    """How many ranks the run had, as far as the traces say."""
    sizes = [rank.linked.trace.world_size or 1 for rank in report.ranks]
    sizes += [rank.rank + 1 for rank in report.ranks]
    sizes += [max((c.group_size for c in rank.collectives), default=1) for rank in report.ranks]
    return max(sizes)


def make_collective_ops(report: TraceReport, world: int, step: int) -> tuple[list[dict[int, Signature]], list[str]]:
    """For every rank the ops of the collective kernels of step number `step` by event, and what to know about them."""
    calls = [[c for c in rank.collectives if _find_communicator(rank, c) == step] for rank in report.ranks]
    together = report.together.replay if report.together else None
    matches = together.matches.collectives if together else ()
    notes = []
    complete = len(report.ranks) == world
    if not complete:
        notes.append(f"{len(report.ranks)} of {world} ranks were traced; the others are taken to run the same")
    everyone = tuple(range(world))
    matched = {(m, call.row): match for match in matches for m, call in zip(match.members, match.calls, strict=True)}
    groups = sorted({_find_group(c, everyone) for made in calls for c in made} - {("", everyone)})
    numbers = {group: number + 1 for number, group in enumerate(groups)}
    ops: list[dict[int, Signature]] = []
    for index, rank in enumerate(report.ranks):
        signatures = {}
        for call in calls[index]:
            _, members = group = _find_group(call, everyone)
            if not complete and members != everyone:
                raise TraincastError(
                    f"rank {rank.rank} talks to ranks {members} of {world}; give the traces of all ranks for a workload"
                )
            match = matched.get((index, call.row), Match(members=(index,), calls=(call,)))
            signature = _make_signature(call, match, members, numbers.get(group, 0), splits=complete)
            if signature is not None:
                signatures[call.row] = signature
        ops.append(signatures)
    left_out = sum(map(len, calls)) - sum(map(len, ops))
    if left_out:
        notes.append(f"{left_out} collectives of unknown kind or size stand in as empty kernels")
    return ops, notes


def _find_communicator(rank: RankReport, call: Collective) -> int:
    return rank.linked.steps[call.step].number if call.step >= 0 else -1


def _find_group(call: Collective, everyone: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    """A process group: the world, however it is called, or what the trace says."""
    members = call.group_ranks or everyone
    return ("" if members == everyone else call.group, members)


def _make_signature(
    call: Collective, match: Match, members: tuple[int, ...], communicator: int, *, splits: bool
) -> Signature | None:
    record, kind = COLLECTIVES.get(call.kind), call.kind
    nbytes = BARRIER_BYTES if kind == "barrier" else compute_message_bytes(match, len(members))
    if record is None or not record.matched or nbytes < 0:
        return None
    ends: tuple[tuple[str, Scalar], ...] = ()
    if record.rooted:
        ends = (("root", members[0]),)  # not recorded
    if kind in UNEVEN_FORM and splits and len(call.in_splits) == len(call.out_splits) == len(members):
        kind = UNEVEN_FORM[kind]
        sent, received = (
            _convert_to_bytes(call.in_splits, call.message_bytes),
            _convert_to_bytes(call.out_splits, call.output_bytes),
        )
        ends, nbytes = (("send_splits", sent), ("recv_splits", received)), call.message_bytes
    scalars: tuple[tuple[str, Scalar], ...] = (
        ("collective", kind), ("group", members), ("communicator", communicator), ("bytes", nbytes), *ends,
        ("async_op", True),
    )  # fmt: skip
    buffer = TensorSpec((max(nbytes // 4, 1),), (1,), "float32")
    return Signature(f"c10d::{record.ops[0]}", (buffer,), (buffer,), scalars, (("tensors", 1),))


def _convert_to_bytes(splits: tuple[int, ...], nbytes: int) -> tuple[int, ...]:
    whole = sum(splits)
    return tuple(nbytes * n // whole for n in splits) if whole else splits
