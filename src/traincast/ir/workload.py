"""A workload: the programs of a training step and which ranks run them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

import numpy as np

from traincast.ir.formula import OpCost
from traincast.ir.memory import compute_peak_memory
from traincast.ir.program import Program
from traincast.utils.display.text import format_quantity
from traincast.utils.errors import TraincastError
from traincast.utils.results import Records, Result

MAX_BATCH = 1 << 26  # samples; chosen so that sizes of real steps stay within 64 bits
MAX_SEQ_LEN = 1 << 20  # tokens; likewise, for their squares
DEFAULT_FRAMEWORK = "2.13"
"""The PyTorch that steps follow unless they say another: the one that captures are tested with."""
TF32_ARITHMETIC = ("products", "convolutions")
DEFAULT_TF32 = ("convolutions",)
"""PyTorch's settings as they come: `torch.backends.cudnn.allow_tf32` is on, that of GEMMs off."""
COVERS = "covers"
"""The entry of `Workload.meta` of a step from a trace that does not have the sizes of all of its kernels."""
LOADER = "loader"
"""The entry of `Workload.meta` of a step from a trace that waited for its data: milliseconds that a batch takes, and
how many workers make them (0: the training process itself)."""
SAMPLES_PER_BATCH, UPDATES = "samples_per_batch", "updates"
"""Entries of `Workload.meta` of a captured loop: samples of a step for each of its batch size (a fraction), and how
many updates a step has."""
CAPTURED_AT = "captured_at"
"""The entry of `Workload.meta` of a captured step: the batch size it was captured at."""
CAPTURED_BY = "captured_by"
"""The entry of `Workload.meta` of a step from a file: what `capture` was asked for, as JSON."""
HOST_OPS_STAY = "host_ops_stay"
"""The entry of `Workload.meta` of a captured step whose host runs more ops the larger the batch is: those of the batch
size it was captured at stand for all."""
_TRUSTED = 4  # times that batch size, from which on a reader is told and the interval grows
TABLES = "embedding_tables"
"""The entry of `Workload.meta` of a captured TorchRec script: its embedding tables, as JSON."""
PLACEMENTS = "placements"
"""In that JSON, of a described recommender: how each table is to be sharded and kept, where the description says it."""
LINES = "lines"
"""The entry of `Workload.meta` of a captured step: by module (layers together) the line of its largest op, as JSON."""
SEARCHED = "cudnn_benchmark"
"""The entry of `Workload.meta` of a step that lets cuDNN search for its fastest kernels."""
KEPT_BACK = "kept_back"
"""The entry of `Workload.meta` that lists what a captured script would have done to files and networks."""
_TOO_FAR = (
    "batch {} is {} times the one captured ({}): a size that stays or is cut in chunks from some batch on is not seen; "
    "capture at this batch size to be sure"
)
_OFFER = "; `recapture` runs its code again at the size asked for"
STUDY_FRAMEWORK = "1.8"
"""The PyTorch of the published single-GPU studies, whose steps the built-in DLRMs and CNNs are."""


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class Workload(Result):
    """Programs and the rank → program map (`ranks[r]` is the program of rank r).

    `synchronised` says that every step starts and ends with an idle device (the loop synchronises);
    otherwise consecutive steps run into each other. `framework_version` is the PyTorch whose
    op-to-kernel choices the step follows (e.g. "2.13", "1.8"). `tf32` names the fp32 arithmetic that may run in TF32
    where the device has it: "GEMMs", "convolutions"; unless told otherwise PyTorch lets convolutions. `costs` are
    those that the authors of ops give, `assumptions` what was stated about values that a capture does not have.
    `meta` is free text for people.
    """

    name: str
    programs: tuple[Program, ...]
    ranks: tuple[int, ...] = (0,)
    mode: str = "training"
    synchronised: bool = False
    framework_version: str = DEFAULT_FRAMEWORK
    tf32: tuple[str, ...] = DEFAULT_TF32
    costs: tuple[OpCost, ...] = ()
    assumptions: tuple[str, ...] = ()
    meta: Mapping[str, str] = field(default_factory=dict)

    @property
    def lines(self) -> dict[str, str]:
        """By module, layers together: the `FILE:LINE` at which its largest tensor was made when the step was captured;
        empty where it was not, or where what a file says of it cannot be read."""
        try:
            found = json.loads(self.meta.get(LINES, "{}"))
        except ValueError:
            return {}
        return {str(name): str(line) for name, line in found.items()} if isinstance(found, dict) else {}

    @property
    def batch_size(self) -> int:
        """Samples per rank and step."""
        return self.programs[0].batch_size

    @property
    def samples(self) -> int:
        """Samples per rank and update: those of all batches whose gradients are accumulated."""
        per_batch = Fraction(self.meta.get(SAMPLES_PER_BATCH, "1")) * int(self.meta.get("accumulation", "1"))
        return round(self.batch_size * per_batch)

    @property
    def updates(self) -> int:
        """Updates of a step: more than one where a captured loop repeats several that differ."""
        return int(self.meta.get(UPDATES, "1"))

    @property
    def seq_len(self) -> int:
        """Tokens per sample; 0 for a model without sequences."""
        return self.programs[0].seq_len

    def resized(self, *, batch_size: int | None = None, seq_len: int | None = None) -> Workload:
        """The same workload at another batch size (per rank) or sequence length, without torch."""
        batch = self.batch_size if batch_size is None else batch_size
        seq = self.seq_len if seq_len is None else seq_len
        if (batch, seq) == (self.batch_size, self.seq_len):
            return self
        _check_range("batch size", batch, MAX_BATCH)
        if seq_len is not None:
            if not self.seq_len:
                raise TraincastError(f"workload '{self.name}' has no sequence length; leave out `seq_len`")
            _check_range("sequence length", seq, MAX_SEQ_LEN)
        for program in self.programs:
            if program.rigid:
                raise TraincastError(
                    f"workload '{self.name}' cannot change its batch or sequence size: {program.rigid}"
                    + _OFFER * (CAPTURED_BY in self.meta)
                )
            if batch != self.batch_size and not program.sizes.depends_on_batch():
                raise TraincastError(f"workload '{self.name}' was captured at one batch size only ({self.batch_size})")
            if seq != self.seq_len and not program.sizes.depends_on_seq_len():
                raise TraincastError(
                    f"workload '{self.name}' was captured at one sequence length only ({self.seq_len})"
                )
        told = self.assumptions
        captured = int(self.meta.get(CAPTURED_AT, batch))
        if batch > _TRUSTED * captured:
            told = (*told, _TOO_FAR.format(batch, round(batch / captured), captured))
        return replace(self, programs=tuple(p.resized(batch, seq) for p in self.programs), assumptions=told)

    def measure_distance(self, batch_size: int) -> float:
        """How many times beyond the trusted range a batch size is: 0 inside, up to a few times the one captured."""
        times = batch_size / int(self.meta.get(CAPTURED_AT, batch_size))
        if HOST_OPS_STAY in self.meta:
            return max(times, 1 / times) if times != 1 else 0.0
        return times / _TRUSTED if times > _TRUSTED else 0.0

    def serves_size(self, batch_size: int, seq_len: int | None) -> bool:
        """Whether it can be used at these sizes, and not so far from where it was captured that a reader is told."""
        same = (batch_size, seq_len or self.seq_len) == (self.batch_size, self.seq_len)
        return same or not (self.measure_distance(batch_size) or any(program.rigid for program in self.programs))

    def to_dict(self) -> dict[str, Any]:
        """What the workload is, not the program itself: `save_workload` writes that."""
        program = self.programs[0]
        return {
            "workload": self.name,
            "batch_size": self.batch_size,
            "seq_len": self.seq_len or None,
            "gpus": len(self.ranks),
            "programs": len(self.programs),
            "ops": program.num_ops,
            "peak_memory_bytes": compute_peak_memory(program).peak_bytes,
            "rebatchable": not program.rigid,
            "why_not": program.rigid or None,
            "assumptions": list(self.assumptions),
            "kept_back": self.meta.get(KEPT_BACK),
            "given_costs": {cost.op: cost.as_text() for cost in self.costs},
        }

    def contents(self) -> str:
        """Ranks, ops and peak memory in one line, and at which sizes the workload can be used."""
        program, programs = self.programs[0], len(self.programs)
        many = f"{len(self.ranks)} ranks with {programs} program{'s'[: programs > 1]}, the first with "
        sizes = f"this size only ({program.rigid})" if program.rigid else self._usable()
        assumed = "".join(f"\nassumed: {text}" for text in self.assumptions)
        if KEPT_BACK in self.meta:
            assumed += f"\nnot done, as a capture changes nothing: {self.meta[KEPT_BACK]}"
        return (
            f"{many if len(self.ranks) > 1 else ''}{program.num_ops} ops, peak memory "
            f"{format_quantity(compute_peak_memory(program).peak_bytes, 'B')} at batch {self.batch_size}; usable at "
            f"{sizes}{assumed}"
        )

    def _usable(self) -> str:
        """At which sizes the workload can be used."""
        step = self.programs[0].sizes.batch_step(self.seq_len)
        batches = "any batch size" if step == 1 else f"any batch size that is a multiple of {step}"
        lengths = self.seq_len and not self.programs[0].sizes.depends_on_seq_len()
        return f"{batches}, {self.seq_len} tokens only" if lengths else batches

    def headline(self) -> str:
        """Name and mode, then what it holds."""
        return f"{self.name} ({self.mode})\n{self.contents()}"

    def records(self) -> Records:
        """Table "ops": how often every op of the first program occurs."""
        program = self.programs[0]
        names = Counter(program.symbolic[signature].name for signature in program.columns.op_signature.tolist())
        return {"ops": [{"op": name, "count": number} for name, number in names.most_common()]}


def _check_range(what: str, value: int, largest: int) -> None:
    if not 1 <= value <= largest:
        raise TraincastError(f"{what} {value} is out of range; give an integer from 1 to {largest}")


def follows_tensors(program: Program) -> bool:
    """Whether some op uses what another one made or used; a trace shows the shapes of tensors and not which they
    are."""
    if program.num_ops < 2:
        return True
    c = program.columns
    first = np.full(len(c.storage_bytes), program.num_ops, dtype=np.int64)
    last = np.full(len(c.storage_bytes), -1, dtype=np.int64)
    for pointer, tensor in ((c.input_ptr, c.input_tensor), (c.output_ptr, c.output_tensor)):
        op = np.repeat(np.arange(program.num_ops), np.diff(pointer))
        np.minimum.at(first, c.tensor_storage[tensor], op)
        np.maximum.at(last, c.tensor_storage[tensor], op)
    return bool(np.any(last > first))


def check_follows_tensors(step: Workload) -> None:
    """Rejects a step in which results cannot be followed from op to op."""
    if not any(map(follows_tensors, step.programs)):
        raise TraincastError(
            f"'{step.name}' shows the shapes of its tensors but not which op uses whose result, as a trace does; "
            "capture the model (`traincast capture`) and edit that"
        )
