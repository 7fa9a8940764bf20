"""What a person should know of a predicted step besides its numbers, and how far it rests on measurements."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from traincast.costs.kernels.control import MOVES_NOTHING
from traincast.hardware.device import Device
from traincast.ir.ops import Signature
from traincast.ir.program import Program
from traincast.ir.rows import count_bytes_left_out
from traincast.ir.workload import Workload
from traincast.simulator.collective_calls import format_rank_list
from traincast.simulator.instructions import StepInstructions
from traincast.simulator.memory.device_memory import DeviceMemory
from traincast.simulator.prediction.rank_results import RankResult


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
