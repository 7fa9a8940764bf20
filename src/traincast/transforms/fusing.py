"""Chains of element-wise ops as one kernel each, in steps of training too."""

from __future__ import annotations

from dataclasses import replace

from traincast.costs.kernels.registry import lowering_context
from traincast.ir.identity import check_follows_tensors
from traincast.ir.ops import Phase
from traincast.ir.program import Program
from traincast.ir.rewrite import Rewrite
from traincast.ir.workload import Workload
from traincast.transforms.fusion import Fusion, fusion_of
from traincast.utils.errors import TraincastError

SAID = (
    "chains of element-wise ops run as one kernel each; what the backward pass needs is stored, nothing is computed "
    "again"
)


def fused(step: Workload) -> tuple[Workload, str]:
    """The step with chains fused."""
    check_follows_tensors(step)
    context = lowering_context(step)
    programs = tuple(_fused(program, fusion_of(program, context)) for program in step.programs)
    before, after = (sum(p.num_ops for p in ps) for ps in (step.programs, programs))
    if before == after:
        raise TraincastError(f"'{step.name}' has no chains of element-wise ops to fuse")
    return replace(step, programs=programs), SAID


def _fused(program: Program, fusion: Fusion) -> Program:
    rows = Rewrite(program)
    gone: set[int] = set()
    for group in fusion.groups:
        merged = fusion.merged(group)
        last = rows.ops[merged.members[-1]]
        gone |= {id(rows.ops[member]) for member in merged.members[:-1]}
        last.signature, last.inputs, last.outputs = merged.signature, merged.inputs, merged.outputs
    rows.drop(lambda op: id(op) in gone)
    for scope in rows.scopes:
        if len(scope.ops) == 1 and scope.ops[0].signature.name.startswith("inductor::"):
            scope.name = scope.ops[0].signature.name + ("Backward" if scope.phase == Phase.BACKWARD else "")
    return rows.build()
