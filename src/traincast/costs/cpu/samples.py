"""One microbenchmark as a row: what was run, how its operands lay, how long it took alongside its reference."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

import numpy as np

from traincast.costs.cpu.features import Caches, Features, Operand, count_touched_bytes, describe_op
from traincast.ir.ops import Scalar, Signature, TensorSpec
from traincast.utils.errors import TraincastError

CALM = 1.12
"""A reference this many times as long as on the calm machine: neighbours slow what moves data far more than it."""
_CALM_SHARE, _LEAST_CALM = 0.3, 0.5  # of samples: how many of the lowest references are calm; fewest that must remain
_LEAST_SECONDS = 1e-9  # of a call: clocks may have taken more than it
_FEWEST = 40  # samples that tell how fast the calm machine is
FIFTHS = 5
"""Parts of the samples: one takes no part in the fit that is reported, or each in turn where there are few."""


COPY_DIRECTIONS, COPY_MEMORIES = ("to device", "to host"), ("pinned", "pageable")
"""Copies between the host and a GPU, and where the host's part resides."""
_COPY = "traincast::copy"


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Seconds of one call by two clocks, and the reference alongside it. `between` are the bytes of other data touched
    since the call before on the same operands (0: none), and with `code_far` since the op ran at all. `signature` is
    None for the host's time of a small step, whose `events` count what its host did: what is left of the step alongside
    `kernels` (in units of the reference), at times less than nothing. It is of no op where it is a collective's or a
    copy's. An op that was timed inside a step has `found`: the bytes touched since each of its inputs and outputs was,
    and since its code was. As many as `ranks` processes ran it at the same time. Of a whole step of ranks, `plan` says
    where they exchange (`waits.plan_text`), and "busy" is what the rank's own thread computed."""

    signature: Signature | None
    between: int
    code_far: bool = False
    access: str
    wall: float
    busy: float
    reference_wall: float
    reference_busy: float
    spread: float
    events: tuple[float, ...] = ()
    found: tuple[float, ...] = ()
    ranks: int = 1
    kernels: float = 0.0
    plan: str = ""

    def ratio(self, clock: str) -> float:
        """Seconds in units of the reference."""
        return self.busy / self.reference_busy if clock == "busy" else self.wall / self.reference_wall

    def features(self, caches: Caches) -> Features:
        """What its time depends on."""
        assert self.signature is not None
        if self.found:
            sizes = count_touched_bytes(self.signature, self.access)
            inside = [Operand(int(size), int(away)) for size, away in zip(sizes, self.found, strict=False)]
            return describe_op(self.signature, inside, caches, self.access, code=self.found[-1], inside=True)
        operands = list_call_operands(self.signature, self.access, self.between, code_far=self.code_far)
        code = sum(operand.nbytes for operand in operands) + (self.between if self.code_far else 0)
        return describe_op(self.signature, operands, caches, self.access, code=code)

    @property
    def fifth(self) -> int:
        """Which fifth of the samples it belongs to (0 to 4), by what was run: all samples of one op are in one."""
        text = format_signature(self.signature) if self.signature else repr(self.events)
        return int.from_bytes(blake2b(text.encode(), digest_size=4).digest(), "big") % FIFTHS

    @property
    def held_out(self) -> bool:
        """Whether it is kept from the fit that is reported."""
        return self.fifth == 0


def select_calm_samples(samples: Sequence[Sample]) -> list[Sample]:
    """Those taken while the reference was as fast as on the calm machine; all, where there are
    few or the machine was hardly ever so."""
    if len(samples) < _FEWEST:
        return list(samples)
    references = np.array([sample.reference_busy for sample in samples])
    calm = references <= CALM * np.quantile(references, _CALM_SHARE)
    if calm.mean() < _LEAST_CALM:
        return list(samples)
    return [sample for sample, kept in zip(samples, calm, strict=True) if kept]


def group_visits(samples: Sequence[Sample]) -> list[list[Sample]]:
    """Samples of the same op in the same state, measured at several times, side by side; the order is that of the first
    of each."""
    found: dict[tuple[object, ...], list[Sample]] = {}
    for sample in samples:
        text = format_signature(sample.signature) if sample.signature else ""
        same = (text, sample.between, sample.code_far, sample.access, sample.found, sample.ranks)
        found.setdefault(same, []).append(sample)
    return list(found.values())


def average_visits(several: Sequence[Sample]) -> Sample:
    """One sample out of several of the same: geometric means, so that its ratio to the reference is that of theirs."""
    if len(several) == 1:
        return several[0]
    wall, busy, reference_wall, reference_busy = (
        float(np.exp(np.mean(np.log([max(getattr(one, name), _LEAST_SECONDS) for one in several]))))
        for name in ("wall", "busy", "reference_wall", "reference_busy")
    )
    return replace(
        several[0], wall=wall, busy=busy, reference_wall=reference_wall, reference_busy=reference_busy,
        spread=float(np.mean([one.spread for one in several])),
    )  # fmt: skip


def list_call_operands(
    signature: Signature, access: str, between: int, *, code_far: bool = False
) -> tuple[Operand, ...]:
    """Where the operands of a microbenchmark are: behind the rest of the last call on them and, if there are bytes
    between, behind those and (its code not being far) another call of the same size. What is written in place was just
    read."""
    sizes = count_touched_bytes(signature, access)
    total, inputs = sum(sizes), len(signature.inputs)
    away = between + (0.0 if code_far else total) if between else 0.0
    in_place = signature.name.endswith("_")
    return tuple(
        Operand(int(nbytes), 0 if in_place and position >= inputs else int(away + total - nbytes))
        for position, nbytes in enumerate(sizes)
    )


def format_signature(signature: Signature) -> str:
    """A signature as JSON; the same for the same op."""
    tensors = [[format_spec(spec) for spec in part] for part in (signature.inputs, signature.outputs)]
    return json.dumps([signature.name, signature.overload, *tensors, signature.scalars, signature.groups])


def format_spec(spec: TensorSpec) -> list[Any]:
    """A tensor as a row of JSON."""
    return [spec.shape, spec.stride, spec.dtype]


def parse_signature(text: str) -> Signature:
    """The signature that `signature_text` wrote."""
    try:
        name, overload, inputs, outputs, scalars, groups = json.loads(text)
        return Signature(
            str(name),
            tuple(TensorSpec(tuple(shape), tuple(stride), dtype) for shape, stride, dtype in inputs),
            tuple(TensorSpec(tuple(shape), tuple(stride), dtype) for shape, stride, dtype in outputs),
            tuple((str(key), _freeze_value(value)) for key, value in scalars),
            tuple((str(key), int(number)) for key, number in groups),
            str(overload),
        )
    except (ValueError, TypeError) as error:
        raise TraincastError(f"a sample of the store is damaged: {error}; measure it again") from None


def _freeze_value(value: Any) -> Scalar:
    return tuple(_freeze_value(item) for item in value) if isinstance(value, list) else value


def format_sample(sample: Sample) -> dict[str, Any]:
    """The sample as a row of a table."""
    return {
        "op": "" if sample.signature is None else format_signature(sample.signature),
        "between": sample.between,
        "code_far": sample.code_far,
        "access": sample.access,
        "wall": sample.wall,
        "busy": sample.busy,
        "reference_wall": sample.reference_wall,
        "reference_busy": sample.reference_busy,
        "spread": sample.spread,
        "events": json.dumps(sample.events),
        "found": json.dumps(sample.found),
        "ranks": sample.ranks,
        "kernels": sample.kernels,
        "plan": sample.plan,
    }


def parse_row(row: Mapping[str, Any]) -> Sample:
    """The sample that `sample_row` wrote."""
    try:
        return Sample(
            signature=parse_signature(row["op"]) if row["op"] else None,
            between=int(row["between"]),
            code_far=bool(row["code_far"]),
            access=str(row["access"]),
            **{name: float(row[name]) for name in ("wall", "busy", "reference_wall", "reference_busy", "spread")},
            events=tuple(float(value) for value in json.loads(row["events"])),
            found=tuple(float(value) for value in json.loads(row["found"])),
            ranks=int(row.get("ranks") or 1),  # stores of earlier versions have no such columns
            kernels=float(row.get("kernels") or 0.0),
            plan=str(row.get("plan") or ""),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise TraincastError(f"a sample of the store is damaged: {error!r}; measure it again") from None


def make_copy_signature(direction: str, memory: str, nbytes: int) -> Signature:
    """A copy of `nbytes` bytes between host and GPU as the signature of a sample."""
    scalars = (("direction", direction), ("memory", memory))
    return Signature(_COPY, (TensorSpec((nbytes,), (1,), "uint8"),), (), scalars, (("self", 1),))


def is_copy(signature: Signature | None) -> bool:
    """Whether a sample is of a copy."""
    return signature is not None and signature.name == _COPY


def read_copy(signature: Signature) -> tuple[str, str, int]:
    """(direction, memory, bytes) of a sample's signature."""
    direction, memory = signature.scalar("direction"), signature.scalar("memory")
    if direction not in COPY_DIRECTIONS or memory not in COPY_MEMORIES or not signature.inputs:
        raise TraincastError("a sample of a copy in the store is damaged; measure it again")
    return str(direction), str(memory), signature.inputs[0].nbytes
