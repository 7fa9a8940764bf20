"""From what was seen to a `Program`: scopes from PyTorch's own profiler, ops from the recorder."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_iter

from traincast.capturing.recorder import CONTROL_MARK, OP_MARK, UNRECORDED, RawOp, get_original_name
from traincast.capturing.regions import Regions
from traincast.capturing.storages import StorageBook, list_strided_parts
from traincast.ir.builder import ProgramBuilder
from traincast.ir.ops import Phase, StorageKind
from traincast.ir.program import Program
from traincast.utils.errors import TraincastError

_ENGINE = "autograd::engine::evaluate_function: "
_DISPATCHED = "PythonDispatchMode"
# Composites that add into their own intermediate result, except while a mode is watching.
_ADD_INTO = ("aten::linear", "aten::_scaled_dot_product_attention_math")
_LOSSES = ("_loss", "cross_entropy", "cross_entropy_with_logits", "kl_div")


@dataclass(slots=True)
class HostScope:
    """A top-level host op of the profiler and the recorded ops inside it.

    `sums` are additions that the engine writes into their first input if nobody else holds it, `into` those
    that a composite always writes there.
    """

    name: str
    backward: bool
    ops: list[int] = field(default_factory=list)
    sums: set[int] = field(default_factory=set)
    into: set[int] = field(default_factory=set)


def list_host_scopes(tree: Iterable[Any]) -> list[HostScope]:
    """The top-level events of a profiler's tree, in order, with the ops marked inside them.

    A mark that no dispatcher call surrounds belongs to a detach that autograd makes only because a mode is
    watching; a run without one does not have it.
    """
    scopes = []
    for event in sorted(tree, key=lambda e: e.start_time_ns):
        if event.name == UNRECORDED:
            continue
        backward = event.name.startswith(_ENGINE)
        scope = HostScope(get_original_name(event.name.removeprefix(_ENGINE)), backward)
        _collect_ops(event, scope)
        scope.ops.sort()
        if scope.ops or not event.name.startswith((_DISPATCHED, OP_MARK, CONTROL_MARK)):
            scopes.append(scope)
    return scopes


def _collect_ops(event: Any, scope: HostScope) -> None:
    """Adds the ops marked inside an event to the scope, and notes which additions are in place without a mode."""
    for child in event.children:
        if child.name.startswith(CONTROL_MARK):
            scope.ops.append(int(child.name.removeprefix(CONTROL_MARK)))
        elif child.name.startswith(OP_MARK) and event.name == _DISPATCHED:
            scope.ops.append(int(child.name.removeprefix(OP_MARK)))
        before = len(scope.ops)
        _collect_ops(child, scope)
        if child.name == "aten::add" and event.name.startswith(_ENGINE):
            scope.sums.update(scope.ops[before:])
        elif child.name == "aten::add" and event.name in _ADD_INTO:
            scope.into.update(scope.ops[before:])


def insert_other_threads(scopes: list[HostScope], ops: list[RawOp], elsewhere: list[int]) -> list[HostScope]:
    """The scopes with one for every op of another thread, before those of later ops."""
    seen = {index for scope in scopes for index in scope.ops}
    for index in elsewhere:
        if index not in seen:
            place = next((i for i, s in enumerate(scopes) if s.ops and s.ops[0] > index), len(scopes))
            scopes.insert(place, HostScope(ops[index].signature.name, backward=False, ops=[index]))
    return scopes


def assemble_program(
    ops: list[RawOp], book: StorageBook, scopes: list[HostScope], *, batch_size: int, seq_len: int
) -> Program:
    """The program of a recorded step."""
    kept = [index for scope in scopes for index in scope.ops]
    _check_complete(ops, kept)
    sums = {i for scope in scopes for i in scope.into | {j for j in scope.sums if ops[j].reuses_first}}
    ops = _sum_in_place(ops, book, sums)
    builder = ProgramBuilder(batch_size=batch_size, seq_len=seq_len)
    _add_storages(builder, book, np.cumsum(np.bincount(kept, minlength=len(ops) + 1)) - 1)
    number: dict[int, int] = {}
    thread = 0
    for scope, phase in zip(scopes, _find_phases(ops, scopes), strict=True):
        on_engine = scope.backward or (thread == 1 and _is_in_backward(ops, scope))
        changed = int(on_engine) != thread
        thread = int(on_engine)
        builder.open_scope(scope.name, phase, thread=thread, after=builder.num_scopes - 1 if changed else -1)
        for index in scope.ops:
            op = ops[index]
            number[index] = builder.add_op(
                op.signature, op.inputs, op.outputs,
                module=op.module, forward=number.get(op.forward, -1), stream=op.stream,
            )  # fmt: skip
    return builder.build_program()


def _is_in_backward(ops: list[RawOp], scope: HostScope) -> bool:
    """Whether a scope after an autograd node's is the engine's as well: callbacks at the end of backward run on its
    thread."""
    return bool(scope.ops) and all(ops[i].phase == Phase.BACKWARD for i in scope.ops)


def _check_complete(ops: list[RawOp], kept: list[int]) -> None:
    """Nothing but autograd's extra detaches may be missing from the profiler's tree."""
    missing = sorted(set(range(len(ops))) - set(kept))
    lost = next((ops[i].signature.name for i in missing if ops[i].signature.name != "aten::detach"), None)
    if lost is not None or len(kept) != len(set(kept)):
        raise TraincastError(
            f"op {lost or ops[0].signature.name} was not seen by PyTorch's profiler; is another running?"
        )


def _sum_in_place(ops: list[RawOp], book: StorageBook, sums: set[int]) -> list[RawOp]:
    """The ops with these additions written into their first input, as they are when no mode is watching."""
    same: dict[int, int] = {}  # tensor that was made -> tensor that is written to
    changed: list[RawOp] = []
    for index, op in enumerate(ops):
        op = replace(op, inputs=tuple(same.get(t, t) for t in op.inputs))
        if index in sums:
            made, target = op.outputs[0], op.inputs[0]
            same[made] = target
            book.merge_storages(made, target)
            signature = replace(op.signature, name="aten::add_", outputs=op.signature.inputs[:1])
            op = replace(op, signature=signature, outputs=(target,))
        changed.append(op)
    return changed


def _add_storages(builder: ProgramBuilder, book: StorageBook, place: Any) -> None:
    """Storages and tensors; `place` gives for each op seen the last op kept up to it."""
    number: dict[int, int] = {}
    used = {book.find_merged(storage) for storage in book.tensor_storage}
    aside = 0  # bytes that only are there: samples kept one by one, as many as a batch has
    for info in book.recorded:
        # What is on the host and no op touches is no part of the step: modules make such tensors when first imported.
        if info.merged_into is not None or (info.device != "cuda" and info.index not in used):
            continue
        # Host memory is not the device's: it takes no device bytes. Nor does what the step leaves on `meta`.
        held = info.device == "cuda" and not (info.hollow and info.index not in used)
        if info.index not in used and not held:
            continue
        if info.index not in used and info.kind == StorageKind.INPUT and info.alloc < 0 and info.free is None:
            aside += info.nbytes
            continue
        number[info.index] = builder.add_storage(info.nbytes if held else 0, info.kind)
        alloc = -1 if info.alloc < 0 else int(place[info.alloc])
        free = None if info.free is None else max(int(place[info.free]) if info.free >= 0 else -1, alloc, 0)
        builder.set_lifetime(number[info.index], alloc, free)
    if aside:
        builder.set_lifetime(builder.add_storage(aside, StorageKind.INPUT), -1, None)
    for storage in book.tensor_storage:
        builder.add_tensor(number[book.find_merged(storage)])


def _find_phases(ops: list[RawOp], scopes: list[HostScope]) -> list[Phase]:
    phases: list[Phase] = []
    current = Phase.FORWARD
    for scope in scopes:
        if scope.name.startswith(("Optimizer.zero_grad#", "cuda::")):
            phases.append(Phase.OTHER)
            continue
        if scope.backward:
            current = Phase.BACKWARD
        elif scope.name.startswith("Optimizer.step#"):
            current = Phase.OPTIMIZER
        elif scope.ops:
            # the events that order a collective come before it
            current = next((p for i in scope.ops if (p := ops[i].phase) != Phase.OTHER), ops[scope.ops[0]].phase)
            if current == Phase.FORWARD and scope.name.endswith(_LOSSES):
                current = Phase.LOSS
        elif current == Phase.OPTIMIZER:
            current = Phase.OTHER
        phases.append(current)
    return phases


class StorageClassifier:
    """Classifies the storages of a book by the modules and optimizers the step was seen to use."""

    def __init__(self, book: StorageBook, regions: Regions) -> None:
        self._book = book
        self._regions = regions

    def classify_before_step(self) -> None:
        """After the warm-up: whatever is alive and is nothing else is an input."""
        for info in self._book.live.values():
            info.kind = StorageKind.INPUT
        self._classify_storages()
        self._regions.on_optimizer = self._classify_storages

    def classify_after_step(self) -> None:
        """After the recorded step: gradients and optimizer state it made."""
        self._classify_storages()

    def _classify_storages(self) -> None:
        with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():  # looking is no op of the step
            self._classify_all()

    def _classify_all(self) -> None:
        for root in self._regions.roots:
            for buffer in root.buffers():
                self._mark_storage(buffer, StorageKind.BUFFER)
            for parameter in root.parameters():
                self._mark_parameter(parameter)
        for bucket in (reference() for reference in self._regions.buckets):
            if bucket is not None:
                self._mark_storage(bucket, StorageKind.GRADIENT)
        for optimizer in self._regions.optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    self._mark_parameter(parameter)
            self._mark_all(optimizer.state, StorageKind.OPTIMIZER_STATE)

    def _mark_parameter(self, parameter: torch.Tensor) -> None:
        self._mark_storage(parameter, StorageKind.PARAMETER)
        if parameter.grad is not None:
            self._mark_storage(parameter.grad, StorageKind.GRADIENT)

    def _mark_all(self, state: Any, kind: StorageKind) -> None:
        for per_parameter in state.values():
            for value in tree_iter(per_parameter):
                if isinstance(value, torch.Tensor):
                    self._mark_storage(value, kind)

    def _mark_storage(self, tensor: torch.Tensor, kind: StorageKind) -> None:
        for part in list_strided_parts(getattr(tensor, "_local_tensor", tensor)):  # a DTensor is a shard in a wrapper
            info = self._book.live.get(part.untyped_storage()._cdata)
            if info is not None:
                info.kind = kind
