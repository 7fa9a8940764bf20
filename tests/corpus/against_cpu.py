"""Set-ups of the corpus against real runs of them on this CPU: op by op, and the most memory held."""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.capturing.oracle import Peak, differences, execution_trace, profiled_peak
from tests.corpus.setups import Setup
from traincast.capturing import capture_step
from traincast.workload import Op, Program, Workload


def captured(setup: Setup) -> Workload:
    """The step with attention in its portable form."""
    with sdpa_kernel(SDPBackend.MATH):
        return capture_step(setup.build, batch_size=setup.batch, seq_len=setup.seq_len, name=setup.name, rebatch=False)


def real(setup: Setup) -> object:
    sizes = (setup.batch,) if setup.seq_len is None else (setup.batch, setup.seq_len)
    return setup.build(*sizes, device="cpu")


def op_differences(setup: Setup, folder: Path) -> list[str]:
    """Where the captured ops differ from PyTorch's execution trace of a real run; empty if nowhere."""
    with sdpa_kernel(SDPBackend.MATH):
        trace = execution_trace(real(setup), folder)
    left = [op for op in captured(setup).programs[0].ops if not _moves(op)]
    found = list(differences(trace, left))
    return found + [f"{op.name} is too much" for op in left[:3]]


def _moves(op: Op) -> bool:
    """Whether an op only takes a host tensor to the device, for which a CPU does nothing."""
    if op.name != "aten::_to_copy":
        return False
    source, made = op.inputs[0].spec, op.outputs[0].spec
    return source.device != made.device and source.dtype == made.dtype


def peaks(setup: Setup) -> tuple[Peak, int]:
    """Bytes of the real peak with scratch space inside ops, and of the captured one."""
    gc.collect()
    before = {id(t) for t in _tensors()}
    with sdpa_kernel(SDPBackend.MATH):
        step = real(setup)
        step()
        for tensor in _tensors():
            if tensor.is_leaf and tensor.grad is not None:
                tensor.grad = None  # those of the first run are no part of what is held
        gc.collect()
        held = [t for t in _tensors() if id(t) not in before]
        peak = profiled_peak(step, held)
    return peak, _peak_bytes(captured(setup).programs[0])


def _peak_bytes(program: Program) -> int:
    """As `peak_memory`, without the blocks of a GPU's allocator, which a CPU does not have."""
    c, size = program.columns, program.storage_nbytes
    change = np.zeros(program.num_ops + 2, dtype=np.int64)
    np.add.at(change, np.maximum(c.storage_alloc, 0), size)
    np.subtract.at(change, np.minimum(c.storage_free, program.num_ops) + 1, size)
    return int(change.cumsum().max())


def _tensors() -> list[torch.Tensor]:
    return [
        thing for thing in gc.get_objects()
        if issubclass(type(thing), torch.Tensor) and thing.device.type == "cpu" and thing.layout is torch.strided
    ]  # fmt: skip
