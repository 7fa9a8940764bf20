"""Gradient accumulation: several passes of forward and backward before one update, of which the last alone exchanges
gradients (`no_sync` of DistributedDataParallel)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from traincast.ir.editor import ProgramEditor, TensorCopies
from traincast.ir.ops import ACCUMULATE_GRAD, Phase, Signature, StorageKind
from traincast.ir.program import Program
from traincast.ir.rows import OpRow, ScopeRow
from traincast.ir.workload import Workload
from traincast.transforms.streams import RECORD, WAIT
from traincast.utils.errors import TraincastError

_BROADCAST = "torch.distributed::_broadcast_coalesced"
"""The scope in which buffers are sent before forward."""
_ALL_REDUCE = "c10d::allreduce_"
_COPIES = ("aten::copy_", "aten::mul")
"""What puts a gradient into its bucket."""
_ZERO = "Optimizer.zero_grad#"
_KEPT = ("aten::detach", "aten::clone")
"""What makes a new gradient the parameter's where there was none."""


def accumulate_gradients(step: Workload, passes: int) -> tuple[Workload, str]:
    """The step with `passes` batches before its update; a step then has as many times the samples."""
    if step.mode != "training":
        raise TraincastError(f"'{step.name}' is a step of {step.mode}; gradients are accumulated in training")
    if "accumulation" in step.meta:
        raise TraincastError(f"'{step.name}' accumulates {step.meta['accumulation']} batches already")
    known: dict[int, Program] = {}
    programs = []
    for program in step.programs:
        key = id(program.columns)  # ranks that run the same ops share them and differ in their sizes
        made = known[key] = known[key] if key in known else _repeat_micro_batches(program, passes)
        programs.append(replace(program, symbolic=made.symbolic, names=made.names, columns=made.columns))
    edited = replace(step, programs=tuple(programs), meta={**step.meta, "accumulation": str(passes)})
    notes = f"a step is {passes} batches of {step.batch_size} samples and one update"
    notes += ", gradients are reduced in the last pass only" * (len(step.ranks) > 1)
    return edited, notes + "; tables that backward itself updates are updated in every pass" * _fuse_ops(
        step.programs[0]
    )


def _fuse_ops(program: Program) -> bool:
    """Whether backward updates embedding tables: it is given their weights then."""
    c = program.columns
    weights = c.storage_kind[c.tensor_storage[c.input_tensor]] == StorageKind.PARAMETER
    ops = np.unique(np.searchsorted(c.input_ptr, np.flatnonzero(weights), side="right") - 1)
    late = ops[program.op_phase[ops] == Phase.BACKWARD]
    return any("embedding" in program.symbolic[number].name for number in np.unique(c.op_signature[late]).tolist())


def _repeat_micro_batches(program: Program, passes: int) -> Program:
    editor = ProgramEditor(program)
    backward = [i for i, scope in enumerate(editor.scopes) if scope.phase == Phase.BACKWARD]
    if not backward:
        raise TraincastError("the step has no backward pass whose gradients could be accumulated")
    end = backward[-1] + 1
    once, rest = editor.scopes[:end], editor.scopes[end:]
    late = _find_reductions(editor, once)
    # DDP sends buffers before the first pass only: those after it follow a pass without a collective
    again = [scope for scope in once if not scope.name.startswith((_ZERO, _BROADCAST))]
    copies = [_Pass(editor, again) for _ in range(1, passes)]
    for before, copy in pairwise([once, *(copy.scopes for copy in copies)]):
        if copy[0].thread != before[-1].thread:
            copy[0].after = before[-1]
    for scope in rest:
        if scope.after is not None:
            scope.after = copies[-1].new.get(scope.after, scope.after)
    editor.scopes = [*once, *(scope for copy in copies for scope in copy.scopes), *rest]
    editor.drop_ops(late.union(copy.op[op] for copy in copies[:-1] for op in late if op in copy.op))
    return editor.build()


class _Pass:
    """One more pass: ops on tensors of its own, but for what outlives a pass. `op` and `new` are the ops and scopes of
    this pass by those that they are copies of."""

    def __init__(self, editor: ProgramEditor, scopes: Sequence[ScopeRow]) -> None:
        self.editor = editor
        self.tensors = TensorCopies(editor, lambda storage: editor.storages[storage].made)
        self.op: dict[OpRow, OpRow] = {}
        self.new: dict[ScopeRow, ScopeRow] = {}
        for scope in scopes:
            after = None if scope.after is None else self.new.get(scope.after)
            ops = [self._op(op, scope.name) for op in scope.ops]
            self.new[scope] = ScopeRow(scope.name, scope.phase, scope.thread, ops, after)
        self.scopes = list(self.new.values())

    def _op(self, op: OpRow, scope: str) -> OpRow:
        inputs = self.tensors.copy(op.inputs)
        name = op.signature.name
        if scope == ACCUMULATE_GRAD and name in _KEPT and self.editor.get_storage(op.outputs[0]).made:
            # there is a gradient already: the new one is added to it, and who reads it reads the sum
            grad, spec = op.outputs[0], op.signature.outputs[0]
            add = Signature("aten::add_", (spec, spec), (spec,), (("alpha", 1),), (("self", 1), ("other", 1)), "Tensor")
            copy = OpRow(add, (grad, inputs[0]), (grad,), op.module, op.stream)
            self.tensors.tensor[grad] = grad
        else:
            copy = OpRow(op.signature, inputs, self.tensors.copy(op.outputs), op.module, op.stream)
            copy.forward = None if op.forward is None else self.op.get(op.forward)
        self.op[op] = copy
        return copy


def _find_reductions(editor: ProgramEditor, scopes: Sequence[ScopeRow]) -> set[OpRow]:
    """Ops of these scopes that are left out without a collective of gradients."""
    ops = [op for scope in scopes for op in scope.ops]
    buckets = _find_buckets(editor, ops)
    _check_collectives(editor, scopes, buckets)
    found: set[OpRow] = set()
    events: set[int] = set()
    for place, op in enumerate(ops):
        if not any(editor.tensors[tensor] in buckets for tensor in (*op.inputs, *op.outputs)):
            continue
        found.add(op)
        if op.signature.name == _ALL_REDUCE:
            events |= _find_events(ops, place)
    waits = (op for op in ops if op.signature.name in (RECORD, WAIT) and op.signature.scalar("event") in events)
    return found.union(waits)


def _find_buckets(editor: ProgramEditor, ops: Sequence[OpRow]) -> set[int]:
    """Memory that is there before the step and is all-reduced in it."""
    reduced = [editor.tensors[op.inputs[0]] for op in ops if op.signature.name == _ALL_REDUCE]
    return {storage for storage in reduced if not editor.storages[storage].made}


def _find_events(ops: Sequence[OpRow], place: int) -> set[int]:
    """The events of a collective: one before it that its stream waits for, and one of its end."""
    around = [ops[n] for n in (place - 2, place + 1) if 0 <= n < len(ops)]
    found = [op.signature.scalar("event") for op in around if op.signature.name == RECORD]
    return {event for event in found if isinstance(event, int)}


def _check_collectives(editor: ProgramEditor, scopes: Sequence[ScopeRow], buckets: set[int]) -> None:
    """Rejects collectives of gradients that are no plain all-reduces of buckets."""
    for scope in scopes:
        for op in scope.ops:
            kind = op.signature.scalar("collective")
            if scope.phase == Phase.BACKWARD and kind == "reduce_scatter":
                raise TraincastError(
                    f"its ranks share gradients ({kind}), and whether each pass does so is a choice of the program; "
                    "capture the step with the passes you run"
                )
            copied = scope.name == ACCUMULATE_GRAD and op.signature.name in _COPIES
            into = {editor.tensors[tensor] for tensor in op.outputs if not editor.get_storage(tensor).made}
            if copied and not into <= buckets:
                raise TraincastError(
                    "its gradients are reduced by a hook of its own; capture the step with the passes you run"
                )
