"""Which ops of a program are lowered, and which are only estimated."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from traincast.costs.kernels.call import KernelCall
from traincast.costs.kernels.lower import lower
from traincast.costs.kernels.registry import LoweringContext
from traincast.ir.program import Program


@dataclass(frozen=True, slots=True)
class OpCoverage:
    """An op of a program: how often it occurs, whether its kernels are known, and how many it launches."""

    name: str
    count: int
    lowered: bool
    launches: int


def coverage(program: Program, context: LoweringContext) -> list[OpCoverage]:
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
