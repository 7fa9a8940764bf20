"""Which ops of a program a compiler takes together: those of compiled regions, and their backward."""

from __future__ import annotations

import numpy as np

from traincast.arrays import BoolArray
from traincast.workload.program import Program

REGION = "Torch-Compiled Region: 0/0"
"""The scope of a compiled function, named as PyTorch's profiler names it."""
_PREFIX = "Torch-Compiled Region"


def compiled_ops(program: Program) -> BoolArray:
    """Which ops run inside a compiled region, or compute gradients of one that does."""
    named = np.array([name.startswith(_PREFIX) for name in program.names], dtype=bool)
    inside: BoolArray = named[program.columns.scope_name][program.op_scope]
    forward = program.columns.op_forward
    return inside | ((forward >= 0) & inside[forward])
