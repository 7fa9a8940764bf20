"""Whether the tensors of a step are the same from op to op, as in captures, or only have forms, as in traces."""

from __future__ import annotations

import numpy as np

from traincast.ir.program import Program
from traincast.ir.workload import Workload
from traincast.utils.errors import TraincastError


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
