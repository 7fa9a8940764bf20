"""What a step is made of, rank by rank, its critical path over ranks, and what a person should know besides its
numbers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from typing import Any

import numpy as np

from traincast.costs.kernels.lower import MOVES_NOTHING
from traincast.hardware.device import Device
from traincast.ir.memory import Memory, compute_peak_memory
from traincast.ir.ops import Signature
from traincast.ir.program import Program
from traincast.ir.rows import count_bytes_left_out
from traincast.ir.workload import Workload
from traincast.simulator.collective_calls import format_rank_list
from traincast.simulator.instructions import StepInstructions
from traincast.simulator.many_ranks import GroupSimulation
from traincast.simulator.memory.device_memory import Communicators, DeviceMemory, make_device_memory
from traincast.simulator.memory.streams import delay_reuse
from traincast.simulator.memory.workspaces import add_op_workspaces
from traincast.simulator.prediction.step import StepSimulation
from traincast.simulator.timeline import PathPart, compute_union_seconds, find_critical_path
from traincast.utils.arrays import FloatArray
from traincast.utils.metrics import sum_by_key

_TOGETHER = 1e-3  # ranks that are done within this share of a step are done together


@dataclass(frozen=True, kw_only=True)
class RankResult:
    """One step of the ranks that do the same. Times are seconds.

    `exposed_comm` is the time in which the device only exchanges data or waits for others to; `waiting` the part of
    its collectives in which a rank was there and others were not; `compute` the time in which other kernels run.
    `memory` is the peak on its device.
    """

    ranks: tuple[int, ...]
    iteration: float
    device_active: float
    device_idle: float
    compute: float
    host: float
    exposed_comm: float
    waiting: float
    memory: Memory


@lru_cache(maxsize=8)  # each holds a whole step
def _compute_peak_memory(instructions: StepInstructions) -> list[Memory]:
    """Peak memory of every program."""
    return [compute_peak_memory(program) for program in instructions.programs]


def list_rank_memory(simulated: StepSimulation) -> list[Memory]:
    """Peak memory of every rank."""
    held = _compute_peak_memory(simulated.instructions)
    return [held[program] for program in simulated.instructions.ranks]


def list_rank_results(simulated: StepSimulation) -> tuple[RankResult, ...]:
    """One result a class of ranks."""
    tables = [_Totals(simulated, group, simulation) for group, simulation in enumerate(simulated.simulations)]
    held = _compute_peak_memory(simulated.instructions)
    fullest = [held[program] for program in simulated.classes.program]
    for c, memory in zip(simulated.classes.of, held, strict=True):
        # ranks that take the same time need not hold the same
        fullest[c] = max(fullest[c], memory, key=lambda one: one.peak_bytes)
    return tuple(
        tables[group].answer(row, ranks, memory)
        for (group, row), ranks, memory in zip(simulated.place, simulated.ranks, fullest, strict=True)
    )


def make_fullest_memory(
    results: Sequence[RankResult], device: Device, programs: Sequence[Program], framework: str,
    simulated: StepSimulation | None = None,
) -> DeviceMemory:  # fmt: skip
    """The memory of the rank that holds most, on its device; in host memory that of the one with most there. With what
    was simulated, blocks wait for the streams that work on them."""
    number = max(range(len(results)), key=lambda c: results[c].memory.peak_bytes)
    fullest = results[number].memory
    if simulated is not None:
        timeline = simulated.timeline(number)
        fullest = delay_reuse(fullest, timeline)
        lowered = simulated.instructions.lowered[simulated.classes.program[number]]
        fullest = add_op_workspaces(fullest, timeline.program, lowered, device)
    host = max((result.memory.events for result in results), key=lambda events: events.host_bytes).host
    if host is not fullest.events.host:
        fullest = Memory(replace(fullest.events, host=host))
    return make_device_memory(fullest, device, communicators=count_communicators(programs), framework=framework)


def count_communicators(programs: Sequence[Program]) -> Communicators:
    """Groups of ranks in which programs communicate."""
    calls = [one for program in programs for one in program.symbolic if one.name.startswith("c10d::")]
    sends = {str(one.scalar("group", None)) for one in calls if _SENDS.search(one.name)}
    others = {str(one.scalar("group", None)) for one in calls if not _SENDS.search(one.name)}
    return Communicators(len(others), len(sends))


_SENDS = re.compile("alltoall|all_to_all|send|recv")


class _Totals:
    """Totals of all ranks of a rank group."""

    def __init__(self, simulated: StepSimulation, number: int, simulation: GroupSimulation) -> None:
        # ranks that run ahead of others in one step and behind in the next have the period of all
        self.seconds = np.minimum(simulation.latest() - simulated.previous[number], simulated.seconds)
        self.host = simulation.group.host_seconds.sum(axis=1)
        exchanges = np.zeros(len(simulation.blocks.launch_order), dtype=np.bool_)
        blocks = simulation.blocks
        exchanges[[blocks.blocks[block].first for block in blocks.collective_blocks.values()]] = True
        met = exchanges.copy()
        exchanges[simulation.group.find_launches(simulation.blocks, simulation.group.transfers)] = True
        self.active = np.minimum(compute_union_seconds(simulation.starts.T, simulation.ends.T), self.seconds)
        self.compute = self.active
        self.waiting: FloatArray = np.zeros(simulation.group.size)
        if exchanges.any():
            computing = compute_union_seconds(simulation.starts[~exchanges].T, simulation.ends[~exchanges].T)
            self.compute = np.minimum(computing, self.active)
            m = simulated.collectives
            mine = m.group == number
            exchanging = np.bincount(
                m.row[mine], weights=m.seconds[m.collective[mine]], minlength=simulation.group.size
            )
            self.waiting = (simulation.ends - simulation.starts)[met].sum(axis=0) - exchanging

    def answer(self, row: int, ranks: tuple[int, ...], memory: Memory) -> RankResult:
        """One rank's, which stands for `ranks`."""
        seconds, active, compute = (float(column[row]) for column in (self.seconds, self.active, self.compute))
        return RankResult(
            ranks=ranks, iteration=seconds, device_active=active, device_idle=max(seconds - active, 0.0),
            compute=compute, host=float(self.host[row]), exposed_comm=active - compute,
            waiting=max(float(self.waiting[row]), 0.0), memory=memory,
        )  # fmt: skip


def compute_imbalance(results: Sequence[RankResult]) -> float:
    """How much longer the busiest rank computes than the mean, as a share of the mean."""
    compute = np.array([result.compute for result in results])
    mean = float(np.average(compute, weights=[len(result.ranks) for result in results]))
    return float(compute.max()) / mean - 1.0 if mean > 0 else 0.0


def find_slowest_class(simulated: StepSimulation, results: tuple[RankResult, ...]) -> int:
    """The class of ranks that the others wait for: of those done last, the one that waited least. Of the stages of a
    pipeline, which are done one after the other, the one that computes longest."""
    if any(exchange.replicated for calls in simulated.instructions.calls for exchange in calls.exchange[:1]):
        return max(range(len(results)), key=lambda c: results[c].compute)
    latest = simulated.class_latest()
    last = np.flatnonzero(latest >= latest.max() - _TOGETHER * simulated.seconds)
    return int(min(last.tolist(), key=lambda c: results[c].waiting))


HOST = "host"


def find_step_path(simulated: StepSimulation) -> list[PathPart]:
    """The critical path over all ranks, from the end of the step before to that of this one."""
    begin = max(float(previous.max()) for previous in simulated.previous)
    class_at = {place: c for c, place in enumerate(simulated.place)}
    parts = []
    for segment in find_critical_path(simulated.simulations, simulated.collectives):
        if segment.end <= begin:  # the host may have begun this step before the last one was done
            continue
        c = class_at[segment.group, segment.row]
        what, op, name = _label_path_part(simulated, simulated.classes.program[c], segment.where, segment.instruction)
        parts.append(PathPart(simulated.ranks[c][0], what, op, name, max(segment.start, begin), segment.end))
    return parts


def _label_path_part(simulated: StepSimulation, p: int, where: str, instruction: int) -> tuple[str, str, str]:
    program, schedule = simulated.instructions.programs[p], simulated.instructions.schedules[p]
    if where == "device":
        call = simulated.instructions.lowered[p].calls[schedule.call[instruction]]
        op = program.symbolic[program.columns.op_signature[schedule.op[instruction]]].name
        return call.family.name, op, f"{call.family.name}: {call.kind}"
    scope = program.names[program.columns.scope_name[schedule.scope[instruction]]]
    return HOST, scope, f"{HOST}: {scope}"


def sum_path_by_activity(path: Iterable[PathPart]) -> dict[str, float]:
    """Seconds of the path by what it is spent on, longest first."""
    return sum_by_key((part.what, part.seconds) for part in path)


def sum_path_by_place(path: Iterable[PathPart]) -> dict[tuple[int, str], float]:
    """Seconds of the path by rank and op, longest first: the first one holds the step back most."""
    return sum_by_key(((part.rank, part.op), part.seconds) for part in path)


class Note(str):
    """Something assumed or chosen that a reader should know; no reason to distrust the number, as a warning is."""

    __slots__ = ()


_POSITIONS = re.compile(r"(pos(ition)?s?(_emb\w*)?|wpe)$")  # modules that look positions up
_NARROW = {"fp16", "bf16", "fp8", "fp4"}
_UNITS = ("gemm", "conv", "attention")  # families whose time is that of a device's matrix units
_HOST_BYTES = 1 << 20  # that ops on the CPU write before it is worth a word: below, they prepare indices and flags


def list_warnings(
    memory: DeviceMemory,
    results: tuple[RankResult, ...],
    instructions: StepInstructions,
    *,
    tf32: bool,
    check_memory: bool,
) -> tuple[str, ...]:
    """What does not fit, what was left out, and where the step computes in TF32 though nobody asked for `tf32`."""
    programs = instructions.programs
    left_out = max(map(count_bytes_left_out, programs))
    notes = _list_memory_warnings(memory, results, left_out) if check_memory else []
    on_host = [remark for program in programs if (remark := _warn_of_host_work(program))]
    in_tf32 = any(call.family.name == "conv" and call.compute == "tf32" for call in instructions.lowered[0].calls)
    if in_tf32 and not tf32:
        notes.append(
            Note("fp32 convolutions run in TF32, as PyTorch lets them unless torch.backends.cudnn.allow_tf32 is False")
        )
    return (*notes, *_warn_of_missing_units(instructions, memory.device), *on_host[:1])


def describe_updates(updates: int, seconds: float) -> tuple[str, ...]:
    """The average update of a captured step that has several."""
    if updates == 1:
        return ()
    return (Note(f"a step is {updates} updates of its loop that differ: {1e3 * seconds / updates:.3g} ms on average"),)


def warn_of_positions(step: Workload, rows: int | None) -> tuple[str, ...]:
    """That a sample has more tokens than the model has learned positions: `rows` of a described model, None to look
    for a table of positions among the embeddings of a captured step."""
    tokens, found = step.seq_len, [] if rows is None else [rows]
    if rows is None:
        program = step.programs[0]
        tables = {n for n, s in enumerate(program.signatures) if s.name == "aten::embedding" and s.inputs[0].shape}
        places = np.flatnonzero(np.isin(program.columns.op_signature, list(tables)))
        ops = [program.get_op(place) for place in places.tolist()]
        found = [op.signature.inputs[0].shape[0] for op in ops if _POSITIONS.search(op.module)]
    if not found or tokens <= min(found):
        return ()
    return (
        f"{tokens} tokens, but the model has {min(found)} learned positions: it runs only once that table is made "
        "longer, as assumed here",
    )


def _warn_of_missing_units(instructions: StepInstructions, device: Device) -> list[str]:
    """Types that GEMMs, convolutions and attention compute in though the device has no units for them."""
    peaks = device.peak_flops
    used = {call.compute.removesuffix("_block") for call in instructions.lowered[0].calls if call.family.name in _UNITS}
    missing = sorted(used & _NARROW - set(peaks))
    if not missing:
        return []
    return [
        f"{device.name} has no units for {', '.join(missing)}: its products are priced at the fp32 rate, and "
        "may be slower or not run at all"
    ]


def _warn_of_host_work(program: Program) -> str:
    """That part of the step computes on the CPU, of which no model exists here; "" where next to nothing does."""
    written, names = 0, set()
    counts = np.bincount(program.columns.op_signature, minlength=len(program.symbolic)).tolist()
    for signature, count in zip(program.signatures, counts, strict=True):
        if count and _computes_on_host(signature):
            written += count * sum(spec.nbytes for spec in signature.outputs)
            names.add(signature.name)
    if written < _HOST_BYTES:
        return ""
    return (
        f"{', '.join(sorted(names)[:3])}{' and others' if len(names) > 3 else ''} run on the CPU and write "
        f"{written / 1e6:.1f} MB there per step; the time they compute is not in this result"
    )


def _computes_on_host(signature: Signature) -> bool:
    specs = (*signature.inputs, *signature.outputs)
    return bool(signature.outputs) and signature.name not in MOVES_NOTHING and all(s.device == "cpu" for s in specs)


def _list_memory_warnings(memory: DeviceMemory, results: tuple[RankResult, ...], left_out: int) -> list[str]:
    """Says which rank does not fit, and by how much the fullest one; `left_out` are bytes of unheld table rows."""
    limit, notes = memory.limit_bytes, list[str]()
    if not memory.fits:
        fullest = max(result.memory.peak_bytes for result in results)
        over = [result.ranks for result in results if result.memory.peak_bytes > min(limit, fullest - 1)]
        several = sum(len(result.ranks) for result in results) > 1
        notes.append(memory.describe_excess("the step", format_rank_list(sorted(chain(*over))) if several else ""))
    if left_out:
        needed = memory.peak_bytes + left_out
        much = f", {(needed - limit) / 1e9:.1f} GB more than {memory.device.key} has" if needed > limit else ""
        notes.append(
            f"{left_out / 1e9:.1f} GB of its embedding tables are not counted as memory (docs/models.md, Rows); with "
            f"them the step needs at least {needed / 1e9:.1f} GB{much}"
        )
    return notes


_MEASURED, _PARTLY = 0.05, 0.5  # shares of kernel time: below the first next to nothing is extrapolated


@dataclass(frozen=True, slots=True)
class Trust:
    """`outside` is the share of kernel time whose sizes, types or GPU no kernel model was fitted on, `estimated` that
    of ops without a model; `why` names the op that matters most outside."""

    outside: float
    estimated: float
    why: str = ""

    @property
    def extrapolated(self) -> float:
        """Both together, at most 1."""
        return min(self.outside + self.estimated, 1.0)

    @property
    def word(self) -> str:
        """measured, partly extrapolated, or mostly extrapolated."""
        beyond = self.extrapolated
        return "measured" if beyond < _MEASURED else f"{'partly' if beyond < _PARTLY else 'mostly'} extrapolated"

    @property
    def sentence(self) -> str:
        """The word with its share and its reason: `Mostly extrapolated: 97% of kernel time ... (aten::mm: ...)`."""
        if self.extrapolated < _MEASURED:
            return f"Measured: {1 - self.extrapolated:.0%} of kernel time is of sizes and GPUs that were measured."
        parts = [f"{self.outside:.0%} of kernel time lies outside what was fitted"] if self.outside >= 0.005 else []
        parts += [f"{self.estimated:.0%} has no kernel model"] if self.estimated >= 0.005 else []
        reason = f" ({self.why})" if self.why else ""
        return f"{self.word.capitalize()}: {', '.join(parts)}{reason}."

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return {"word": self.word, "extrapolated": self.extrapolated, "why": self.why}
