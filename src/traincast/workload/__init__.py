"""What a training step is: tensors, ops, programs and workloads, their file format and their re-batching."""

from traincast.workload.builder import ProgramBuilder
from traincast.workload.file import load_workload, save_workload
from traincast.workload.ops import Op, Phase, Scope, Signature, StorageKind, Tensor, TensorSpec
from traincast.workload.program import Memory, Program, peak_memory
from traincast.workload.workload import Workload

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
    "load_workload",
    "peak_memory",
    "save_workload",
]
