"""Whole programs lowered: distinct kernel calls as columns, which signature launches which, which ops are known."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from traincast.costs.kernels.call import Calls, KernelCall
from traincast.costs.kernels.lower import lower
from traincast.costs.kernels.registry import Control, LoweringContext
from traincast.ir.ops import Signature
from traincast.ir.program import Program
from traincast.ir.symbolic import list_size_indices, replace_indices_by_sizes
from traincast.utils.arrays import BoolArray, IntArray

_LONG_KEY = 1024  # bytes


@dataclass(frozen=True, eq=False, slots=True)
class LoweredProgram:
    """Distinct calls of a program, and the items of each signature in launch order.

    Item values in `items[signature]` are call indices, or `-1 - i` for `controls[i]`. Programs lowered together share
    `calls`, `controls`, `estimated` and `signatures`: `plain[signature]` indexes the latter, all their signatures with
    plain sizes.
    """

    calls: tuple[KernelCall, ...]
    controls: tuple[Control, ...]
    items: tuple[tuple[int, ...], ...]
    estimated: BoolArray
    signatures: tuple[Signature, ...]
    plain: tuple[int, ...]

    def by_family(self) -> list[tuple[IntArray, Calls]]:
        """The calls grouped by family: (their indices, their columns)."""
        members: dict[str, list[int]] = {}
        for index, call in enumerate(self.calls):
            members.setdefault(call.family.name, []).append(index)
        return [
            (
                np.array(rows, dtype=np.int64),
                Calls.of(self.calls[rows[0]].family, [self.calls[i] for i in rows]),
            )
            for rows in members.values()
        ]


def lower_program(program: Program, context: LoweringContext) -> LoweredProgram:
    """Lowers every distinct signature once."""
    return lower_programs((program,), context)[0]


def lower_programs(programs: Sequence[Program], context: LoweringContext) -> tuple[LoweredProgram, ...]:
    """Lowers programs together: signatures that several have are lowered once, and all refer to the same calls."""
    templates: dict[int, list[int]] = {}
    for number, program in enumerate(programs):
        templates.setdefault(id(program.symbolic), []).append(number)
    lowering = _Lowering(context, several=len(templates) > 1)
    plain: dict[int, tuple[int, ...]] = {}
    for members in templates.values():
        alike = [programs[number] for number in members]
        plain.update(zip(members, _number_calls(alike, lowering), strict=True))
    calls, controls, signatures = tuple(lowering.calls), tuple(lowering.controls), tuple(lowering.signatures)
    estimated = np.array([call.estimated for call in calls], dtype=np.bool_)
    return tuple(
        LoweredProgram(calls, controls, tuple([lowering.items[n] for n in numbers]), estimated, signatures, numbers)
        for numbers in (plain[number] for number in range(len(programs)))
    )


class _Lowering:
    """Calls, controls and signatures so far; `items[n]` are those of signature number n.

    Signatures of one template differ; only those of `several` are looked up.
    """

    def __init__(self, context: LoweringContext, *, several: bool) -> None:
        self.context, self.several = context, several
        self.calls: dict[KernelCall, int] = {}
        self.controls: dict[Control, int] = {}
        self.signatures: list[Signature] = []
        self.items: list[tuple[int, ...]] = []
        self._known: dict[Signature, int] = {}

    def number(self, signature: Signature) -> int:
        """The number of a signature, lowered now if it is new."""
        number = len(self.items)
        if self.several:
            known = self._known.setdefault(signature, number)
            if known != number:
                return known
        row = []
        for item in lower(signature, self.context):
            if isinstance(item, Control):
                row.append(-1 - self.controls.setdefault(item, len(self.controls)))
            else:
                row.append(self.calls.setdefault(item, len(self.calls)))
        self.items.append(tuple(row))
        self.signatures.append(signature)
        return number


def _number_calls(programs: Sequence[Program], lowering: _Lowering) -> list[tuple[int, ...]]:
    """The numbers of the signatures of programs that share their symbolic ones; equal sizes are looked at once."""
    if len(programs) == 1:
        return [tuple([lowering.number(signature) for signature in programs[0].signatures])]
    values = np.stack([program.size_values for program in programs])
    varies = np.any(values != values[0], axis=0)
    changing = np.flatnonzero(varies).tolist()
    symbolic, first = programs[0].symbolic, values[0].tolist()
    used = [np.array(list_size_indices(signature), dtype=np.int64) for signature in symbolic]
    numbers = [lowering.number(*replace_indices_by_sizes((signature,), first)) for signature in symbolic]
    differ = [n for n, sizes in enumerate(used) if np.any(varies[sizes])]
    known = {n: {_make_key(values[0, used[n]]): numbers[n]} for n in differ}
    result = [tuple(numbers)]
    for row in values[1:]:
        sizes: list[int] = []
        for n in differ:
            key = _make_key(row[used[n]])
            if key not in known[n]:
                sizes = sizes or _replace_programs(first, changing, row)
                known[n][key] = lowering.number(*replace_indices_by_sizes((symbolic[n],), sizes))
            numbers[n] = known[n][key]
        result.append(tuple(numbers))
    return result


def _replace_programs(sizes: list[int], where: list[int], row: IntArray) -> list[int]:
    """A copy with other sizes at some places; the rest are the same objects, of which a thousand ranks have many."""
    copy = sizes.copy()
    for place, size in zip(where, row[where].tolist(), strict=True):
        copy[place] = size
    return copy


def _make_key(sizes: IntArray) -> bytes:
    """Sizes as a key; those of a collective between a thousand ranks as a digest, which takes less room."""
    data = sizes.tobytes()
    return data if len(data) <= _LONG_KEY else blake2b(data, digest_size=16).digest()


@dataclass(frozen=True, slots=True)
class OpCoverage:
    """An op of a program: how often it occurs, whether its kernels are known, and how many it launches."""

    name: str
    count: int
    lowered: bool
    launches: int


def list_op_coverage(program: Program, context: LoweringContext) -> list[OpCoverage]:
    """Every op of the program, by name."""
    occurrences = Counter(program.columns.op_signature.tolist())
    rows: dict[str, tuple[int, bool, int]] = {}
    for number, signature in enumerate(program.signatures):
        calls = [item for item in lower(signature, context) if isinstance(item, KernelCall)]
        count, known, launches = rows.get(signature.name, (0, True, 0))
        times = occurrences[number]
        estimated = any(call.estimated for call in calls)
        rows[signature.name] = (count + times, known and not estimated, launches + times * len(calls))
    return [OpCoverage(name, *row) for name, row in sorted(rows.items())]
