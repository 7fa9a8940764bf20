"""Another optimizer in a captured step: its update by lists of parameters, as PyTorch 2 runs it."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import numpy as np

from traincast.ir.edit import without_phase
from traincast.ir.ops import Phase, StorageKind
from traincast.ir.program import Program
from traincast.ir.workload import Workload
from traincast.models.data_parallel.data_parallel import gradients_of
from traincast.models.data_parallel.inserting import InsertingBuilder
from traincast.models.layers.builder import Communicator, Ref
from traincast.models.layers.optimizers import TITLES, step_together, with_state
from traincast.transforms.updates import LISTS_SINCE
from traincast.utils.errors import TraincastError


def with_optimizer(step: Workload, optimizer: str) -> tuple[Workload, str]:
    """The step with another update of the parameters that have gradients."""
    if step.mode != "training":
        raise TraincastError(f"'{step.name}' is a step of {step.mode}; only training has an optimizer")
    if int(step.framework_version.partition(".")[0]) < LISTS_SINCE:
        raise TraincastError(f"'{step.name}' follows PyTorch {step.framework_version}; capture it with {optimizer}")
    bare = without_phase(step, Phase.OPTIMIZER)
    programs = tuple(_stepped(program, optimizer) for program in bare.programs)
    said = f"{TITLES[optimizer]} updates by lists of parameters (foreach), as PyTorch does by default"
    return replace(bare, programs=programs), said


def _stepped(program: Program, optimizer: str) -> Program:
    try:
        gradients = [one.grad for one in gradients_of(program)]
    except TraincastError:  # a gradient of two tensors
        raise TraincastError(
            f"some of its gradients are sparse, which are not updated by lists; capture it with {optimizer}, or with "
            "dense gradients"
        ) from None
    if not gradients:
        raise TraincastError("the step accumulates no gradients that an optimizer could use")
    tape = InsertingBuilder(program, Communicator(0, (0,)))
    tape.insert_before(program.num_scopes)
    stepped = with_state(tape, optimizer, _parameters(program, gradients))
    step_together(tape, optimizer, stepped, gradients)
    # what the training loop still held when the old optimizer was done, it holds until the new one is
    held = (program.columns.storage_alloc >= 0) & (program.columns.storage_free == program.num_ops - 1)
    for storage in np.flatnonzero(held).tolist():
        tape.insertion.free(storage)
    last = [i for i, phase in enumerate(program.columns.scope_phase.tolist()) if phase == Phase.BACKWARD][-1]
    built = tape.build()
    c = built.columns
    updates = np.flatnonzero(c.scope_phase == Phase.OPTIMIZER)
    after = c.scope_after.copy()
    after[updates[0]] = last
    names = tuple(_renamed(name, optimizer) for name in built.names)
    return replace(built, columns=replace(c, scope_after=after), names=names)


def _renamed(name: str, optimizer: str) -> str:
    if not name.startswith("Optimizer.zero_grad#"):
        return name
    return f"Optimizer.zero_grad#{TITLES[optimizer]}.zero_grad"


def _parameters(program: Program, gradients: list[Ref]) -> list[Ref]:
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
