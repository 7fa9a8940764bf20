"""What is switched on to save memory in a step of ops: moments of its optimizer in fewer bits, or in host memory."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from traincast.ir.memory import CATEGORIES, MemoryEvents
from traincast.utils.errors import TraincastError

MOMENT_BYTES = {"fp32": 8.0, "bf16": 4.0, "int8": 2.0 + 8.0 / 256}
"""Of both moments of a weight; 8-bit ones have two fp32 scales per 256 weights (bitsandbytes, torchao)."""
FEWEST_ELEMENTS = 4096
"""Of a tensor whose moments are stored in 8 bits: both libraries leave smaller ones alone."""
_OPTIMIZER = CATEGORIES.index("optimizer_state")


def save_optimizer_state(events: MemoryEvents, kind: str, *, on_host: bool) -> MemoryEvents:
    """The step with fp32 moments of `torch.optim` stored as another kind, or in host memory. State of tables that are
    updated in backward has a type of its own."""
    mine = (events.category == _OPTIMIZER) & (events.appears >= 0)
    if not mine.any():
        raise TraincastError("its optimizer keeps no state that could be elsewhere; leave out what saves it")
    large = mine & (events.nbytes >= 4 * (FEWEST_ELEMENTS if kind == "int8" else 1))
    share = MOMENT_BYTES[kind] / MOMENT_BYTES["fp32"]
    smaller = replace(events, nbytes=np.where(large, np.ceil(events.nbytes * share).astype(np.int64), events.nbytes))
    return smaller.move_to_host(mine) if on_host else smaller
