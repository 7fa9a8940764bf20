"""A whole program lowered: its distinct kernel calls as columns, and which signature launches which."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from traincast.kernels.call import BoolArray, Calls, IntArray, KernelCall
from traincast.kernels.registry import Control, LoweringContext, lower
from traincast.workload.program import Program


@dataclass(frozen=True, eq=False, slots=True)
class LoweredProgram:
    """Distinct calls of a program, and the items of each signature in launch order.

    Item values in `items[signature]` are call indices, or `-1 - i` for `controls[i]`.
    """

    calls: tuple[KernelCall, ...]
    controls: tuple[Control, ...]
    items: tuple[tuple[int, ...], ...]
    estimated: BoolArray

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
    calls: dict[KernelCall, int] = {}
    controls: dict[Control, int] = {}
    items = []
    for signature in program.signatures:
        row = []
        for item in lower(signature, context):
            if isinstance(item, Control):
                row.append(-1 - controls.setdefault(item, len(controls)))
            else:
                row.append(calls.setdefault(item, len(calls)))
        items.append(tuple(row))
    return LoweredProgram(
        calls=tuple(calls),
        controls=tuple(controls),
        items=tuple(items),
        estimated=np.array([call.estimated for call in calls], dtype=np.bool_),
    )
