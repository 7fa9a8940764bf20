"""What ops work in on a GPU while they run, besides their tensors."""

from __future__ import annotations

from traincast.costs.kernels.contract import Calls
from traincast.costs.kernels.conv import CONV
from traincast.costs.kernels.conv.workspace import estimate_workspace_bytes
from traincast.costs.kernels.lower import LoweredProgram, lower_program
from traincast.costs.kernels.registry import make_lowering_context
from traincast.hardware.device import Device
from traincast.ir.memory import CATEGORIES, Memory, add_op_blocks, compute_peak_memory
from traincast.ir.ops import Signature
from traincast.ir.program import Program
from traincast.ir.workload import Workload

_SUMS = ("aten::embedding_dense_backward", "aten::_embedding_bag_dense_backward")
_FEW_LOOKUPS = 3072  # up to which one kernel adds the rows without sorting
_ROWS_AT_ONCE = 10  # lookups of one row that a warp adds


def compute_memory_on(device: Device, workload: Workload, number: int) -> Memory:
    """The memory of one of a workload's programs with what its ops work in on this device."""
    program = workload.programs[number]
    lowered = lower_program(program, make_lowering_context(workload, device))
    return add_op_workspaces(compute_peak_memory(program), program, lowered, device)


def add_op_workspaces(memory: Memory, program: Program, lowered: LoweredProgram, device: Device) -> Memory:
    """The memory of a program with copies for cuDNN's kernels, and what sorts the lookups of dense tables."""
    if device.is_cpu or memory.events.ticks != 2 * program.num_ops:  # the fullest of a class may run another program
        return memory
    events = add_op_blocks(memory.events, program, [count_sorting_bytes(one) for one in program.signatures])
    if rows := [number for number, call in enumerate(lowered.calls) if call.family is CONV]:
        calls = Calls.of(CONV, [lowered.calls[number] for number in rows])
        nbytes = dict(zip(rows, estimate_workspace_bytes(calls, device).tolist(), strict=True))
        most = [max((nbytes.get(item, 0.0) for item in items), default=0.0) for items in lowered.items]
        events = add_op_blocks(events, program, most, CATEGORIES.index("workspace"))
    return Memory(events)


def count_sorting_bytes(signature: Signature) -> int:
    """Bytes in which PyTorch adds the gradients of rows that are looked up more than once: lookups and their places
    sorted, where the lookups of every row begin, and a sum in fp32 for every ten lookups of a row (PyTorch 2,
    `EmbeddingBackwardKernel.cu`)."""
    if signature.name not in _SUMS or len(signature.inputs) < 2 or not signature.outputs:
        return 0
    indices, table = signature.inputs[1], signature.outputs[0]
    lookups, (rows, dim) = indices.numel, table.shape
    if lookups <= _FEW_LOOKUPS and signature.name == _SUMS[0]:
        return 0
    found = min(lookups, rows)
    sums = lookups // _ROWS_AT_ONCE + found
    return (3 * lookups + 2 * found + sums) * indices.itemsize + 4 * sums * dim
