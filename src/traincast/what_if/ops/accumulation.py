"""Gradient accumulation: several passes of forward and backward before one update."""

from __future__ import annotations

from dataclasses import replace

from traincast.errors import TraincastError
from traincast.workload.ops import Phase, Signature, StorageKind
from traincast.workload.program import Program
from traincast.workload.rewrite import OpRow, Rewrite, ScopeRow
from traincast.workload.workload import Workload

_ACCUMULATE = "torch::autograd::AccumulateGrad"
_ZERO = "Optimizer.zero_grad#"


def accumulated(step: Workload, passes: int) -> tuple[Workload, str]:
    """The step with `passes` batches before its update; a step then has as many times the samples."""
    if step.mode != "training":
        raise TraincastError(f"'{step.name}' is a step of {step.mode}; gradients are accumulated in training")
    if len(step.ranks) > 1:
        raise TraincastError(
            f"'{step.name}' runs on {len(step.ranks)} GPUs; which of its passes exchange gradients is not known: "
            "accumulate on one GPU, or capture the step with `gpus`"
        )
    if "accumulation" in step.meta:
        raise TraincastError(f"'{step.name}' accumulates {step.meta['accumulation']} batches already")
    program = _repeated(step.programs[0], passes)
    edited = replace(step, programs=(program,), meta={**step.meta, "accumulation": str(passes)})
    return edited, f"a step is {passes} batches of {step.batch_size} samples and one update"


def _repeated(program: Program, passes: int) -> Program:
    rows = Rewrite(program)
    backward = [i for i, scope in enumerate(rows.scopes) if scope.phase == Phase.BACKWARD]
    if not backward:
        raise TraincastError("the step has no backward pass whose gradients could be accumulated")
    end = backward[-1] + 1
    once = [scope for scope in rows.scopes[:end] if not scope.name.startswith(_ZERO)]
    copies: list[ScopeRow] = []
    last = rows.scopes[end - 1]
    for _ in range(passes - 1):
        copy = _Pass(rows, once).copied(last)
        copies += copy
        last = copy[-1]
    for scope in rows.scopes[end:]:
        if scope.after is rows.scopes[end - 1]:
            scope.after = last
    rows.scopes[end:end] = copies
    return rows.build()


class _Pass:
    """One more pass: ops on tensors of its own, but for what outlives a pass."""

    def __init__(self, rows: Rewrite, scopes: list[ScopeRow]) -> None:
        self.rows, self.scopes = rows, scopes
        self.tensor: dict[int, int] = {}
        self.storage: dict[int, int] = {}
        self.op: dict[int, OpRow] = {}

    def copied(self, before: ScopeRow) -> list[ScopeRow]:
        """The scopes again, after `before`."""
        new: dict[int, ScopeRow] = {}
        for scope in self.scopes:
            after = None if scope.after is None else new.get(id(scope.after))
            copy = ScopeRow(scope.name, scope.phase, scope.thread, after=after)
            copy.ops = [self._op(op, scope.name) for op in scope.ops]
            new[id(scope)] = copy
        made = list(new.values())
        if made and made[0].thread != before.thread:
            made[0].after = before
        return made

    def _op(self, op: OpRow, scope: str) -> OpRow:
        inputs = tuple(map(self._tensor, op.inputs))
        if scope == _ACCUMULATE and op.signature.name == "aten::detach":
            # there is a gradient already: the new one is added to it
            spec = op.signature.inputs[0]
            add = Signature("aten::add_", (spec, spec), (spec,), (("alpha", 1),), (("self", 1), ("other", 1)), "Tensor")
            copy = OpRow(add, (op.inputs[0], inputs[0]), (op.inputs[0],), op.module, op.stream)
        else:
            copy = OpRow(op.signature, inputs, tuple(map(self._tensor, op.outputs)), op.module, op.stream)
            copy.forward = None if op.forward is None else self.op.get(id(op.forward))
        self.op[id(op)] = copy
        return copy

    def _tensor(self, tensor: int) -> int:
        """The tensor of this pass: a new one where the step made its memory."""
        row = self.rows.storage_of(tensor)
        if not row.made:
            return tensor
        if tensor not in self.tensor:
            old = self.rows.tensors[tensor]
            if old not in self.storage:
                self.rows.new_tensor(row.size, StorageKind(row.kind))
                self.storage[old] = len(self.rows.storages) - 1
            self.rows.tensors.append(self.storage[old])
            self.tensor[tensor] = len(self.rows.tensors) - 1
        return self.tensor[tensor]
