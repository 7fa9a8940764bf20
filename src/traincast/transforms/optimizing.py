"""Another optimizer in a captured step: its update by lists of parameters, as PyTorch 2 runs it."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import numpy as np

from traincast.ir.edit import remove_phase
from traincast.ir.editor import ProgramEditor
from traincast.ir.ops import Phase, Signature, StorageKind
from traincast.ir.program import Program
from traincast.ir.rows import OpRow
from traincast.ir.workload import Workload
from traincast.models.data_parallel.buckets import InsertingBuilder
from traincast.models.data_parallel.data_parallel import find_gradients
from traincast.models.layers.builder import Communicator, Ref
from traincast.models.layers.optimizers import TITLES, make_optimizer_state, write_foreach_step
from traincast.utils.errors import TraincastError

LISTS_SINCE = 2  # the PyTorch whose optimizers work on lists by default


def change_optimizer(step: Workload, optimizer: str) -> tuple[Workload, str]:
    """The step with another update of the parameters that have gradients."""
    if step.mode != "training":
        raise TraincastError(f"'{step.name}' is a step of {step.mode}; only training has an optimizer")
    if int(step.framework_version.partition(".")[0]) < LISTS_SINCE:
        raise TraincastError(f"'{step.name}' follows PyTorch {step.framework_version}; capture it with {optimizer}")
    bare = remove_phase(step, Phase.OPTIMIZER)
    programs = tuple(_replace_optimizer(program, optimizer) for program in bare.programs)
    notes = f"{TITLES[optimizer]} updates by lists of parameters (foreach), as PyTorch does by default"
    return replace(bare, programs=programs), notes


def _replace_optimizer(program: Program, optimizer: str) -> Program:
    try:
        gradients = [one.grad for one in find_gradients(program)]
    except TraincastError:  # a gradient of two tensors
        raise TraincastError(
            f"some of its gradients are sparse, which are not updated by lists; capture it with {optimizer}, or with "
            "dense gradients"
        ) from None
    if not gradients:
        raise TraincastError("the step accumulates no gradients that an optimizer could use")
    builder = InsertingBuilder(program, Communicator(0, (0,)))
    builder.insert_before(program.num_scopes)
    stepped = make_optimizer_state(builder, optimizer, _match_parameters(program, gradients))
    write_foreach_step(builder, optimizer, stepped, gradients)
    # what the training loop still held when the old optimizer was done, it holds until the new one is
    held = (program.columns.storage_alloc >= 0) & (program.columns.storage_free == program.num_ops - 1)
    for storage in np.flatnonzero(held).tolist():
        builder.insertion.free_storage(storage)
    backward = np.flatnonzero(program.columns.scope_phase == Phase.BACKWARD)
    builder.insertion.set_wait(program.num_scopes, int(backward[-1]))  # the first new scope
    built = builder.build_program()
    return replace(built, names=tuple(_rename_optimizer_scope(name, optimizer) for name in built.names))


def _rename_optimizer_scope(name: str, optimizer: str) -> str:
    if not name.startswith("Optimizer.zero_grad#"):
        return name
    return f"Optimizer.zero_grad#{TITLES[optimizer]}.zero_grad"


def _match_parameters(program: Program, gradients: list[Ref]) -> list[Ref]:
    """A parameter for every gradient: one of its size that no other gradient has."""
    c = program.columns
    by_size: dict[int, list[int]] = defaultdict(list)
    wanted = (c.storage_kind == StorageKind.PARAMETER) & ~program.storages.on_host
    tensor_of = {int(storage): tensor for tensor, storage in reversed(list(enumerate(c.tensor_storage.tolist())))}
    for storage in np.flatnonzero(wanted).tolist():
        if storage in tensor_of:
            by_size[int(program.storage_nbytes[storage])].append(storage)
    found = []
    for grad in gradients:
        alike = by_size[grad.spec.nbytes]
        if not alike:
            raise TraincastError("a gradient has no parameter of its size; capture the step with that optimizer")
        storage = alike.pop(0)
        found.append(Ref(tensor_of[storage], storage, grad.spec))
    return found


def update_by_lists(editor: ProgramEditor) -> None:
    """Joins the updates of single parameters that an optimizer is left with."""
    for scope in editor.scopes:
        if scope.phase != Phase.OPTIMIZER:
            continue
        single = [op for op in scope.ops if op.signature.name == "aten::add_" and len(op.inputs) == 2]
        if len(single) < 2 or len({(op.signature.scalars, op.stream) for op in single}) > 1:
            continue
        joined = _join_updates(single)
        scope.ops = [joined if op is single[0] else op for op in scope.ops if op not in single[1:]]
        for storage in editor.storages:  # what was held until one of them was done
            if any(storage.free is op for op in single):
                storage.free = joined


def _join_updates(single: list[OpRow]) -> OpRow:
    first, number = single[0], len(single)
    specs = tuple(op.signature.inputs[place] for place in (0, 1) for op in single)
    tensors = tuple(op.inputs[place] for place in (0, 1) for op in single)
    groups = (("self", number), ("other", number))
    signature = Signature("aten::_foreach_add_", specs, (), first.signature.scalars, groups, "List")
    return OpRow(signature, tensors, (), first.module, first.stream)
