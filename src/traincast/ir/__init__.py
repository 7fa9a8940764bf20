"""What a training step is: tensors, ops, programs and workloads, their file format and their re-batching."""

from traincast.ir.builder import ProgramBuilder
from traincast.ir.file import load_workload, save_workload
from traincast.ir.memory import Memory, compute_peak_memory
from traincast.ir.ops import Op, Phase, Scope, Signature, StorageKind, Tensor, TensorSpec
from traincast.ir.program import Program
from traincast.ir.workload import Workload

__all__ = [
    "Memory",
    "Op",
    "Phase",
    "Program",
    "ProgramBuilder",
    "Scope",
    "Signature",
    "StorageKind",
    "Tensor",
    "TensorSpec",
    "Workload",
    "compute_peak_memory",
    "load_workload",
    "save_workload",
]
