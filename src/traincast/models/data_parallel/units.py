"""What is sharded together: the parameters of every layer, where passes of a step use them, and their gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from traincast.ir.ops import ACCUMULATE_GRAD, DTYPE_BYTES, Phase, StorageKind, TensorSpec, find_layer
from traincast.ir.program import Program
from traincast.models.layers.builder import Ref
from traincast.utils.arrays import BoolArray
from traincast.utils.errors import TraincastError

Pass: TypeAlias = tuple[int, bool]
"""A pass of a step: the number of its micro-batch, and whether it is the backward one."""
CAST = "aten::_to_copy"
ADD = "aten::add_"
_HALF = ("bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter by its storage: elements and their type. `used_as` is the type that ranks gather it in: that of
    autocast where the step only uses it cast, in `copies` (storages), as FSDP's mixed precision does."""

    storage: int
    numel: int
    dtype: str
    used_as: str
    copies: tuple[int, ...] = ()


@dataclass(slots=True)
class Unit:
    """The parameters of a layer, and the first scope of every pass that runs it."""

    name: str
    parameters: list[Parameter] = field(default_factory=list)
    first: dict[Pass, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class NewGradient:
    """A gradient that is ready when `scope` ends in pass `number`, of the layer `unit`: `new` is what the pass made,
    `total` what it became or, with `added`, what it was added to."""

    new: Ref
    total: Ref
    added: bool
    scope: int
    number: int
    unit: str


def find_passes(phases: Sequence[int]) -> list[Pass | None]:
    """The pass of every scope; None for inputs, the update and what belongs to none.

    >>> find_passes([Phase.FORWARD, Phase.BACKWARD, Phase.LOSS, Phase.OPTIMIZER])
    [(0, False), (0, True), (1, False), None]
    """
    number, backward = 0, False
    passes: list[Pass | None] = []
    for phase in phases:
        if phase not in (Phase.FORWARD, Phase.LOSS, Phase.BACKWARD):
            passes.append(None)
            continue
        number += backward and phase != Phase.BACKWARD
        backward = phase == Phase.BACKWARD
        passes.append((number, backward))
    return passes


def find_units(program: Program) -> list[Unit]:
    """The layers with parameters on the device, in the order of their first use; a parameter that several layers share
    belongs to the first."""
    passes = find_passes(program.columns.scope_phase.tolist())
    units: dict[str, Unit] = {}
    unit_of: dict[int, Unit] = {}
    for storage, (parameter, layer) in _find_parameters(program, passes).items():
        unit = units.setdefault(layer, Unit(layer))
        unit.parameters.append(parameter)
        unit_of |= dict.fromkeys((storage, *parameter.copies), unit)
    _find_first_scopes(program, passes, units, unit_of)
    return list(units.values())


def _find_parameters(program: Program, passes: Sequence[Pass | None]) -> dict[int, tuple[Parameter, str]]:
    """The parameters that passes use, by their storage, and the layers that use them first."""
    c = program.columns
    wanted = (c.storage_kind == StorageKind.PARAMETER) & ~program.storages.on_host
    seen: dict[int, tuple[TensorSpec, str]] = {}
    casts: dict[int, list[tuple[int, str]]] = {}
    plain: set[int] = set()
    for op, tensor, spec in _find_uses(program, wanted):
        place = passes[program.op_scope[op]]
        if place is None:
            continue
        storage = int(c.tensor_storage[tensor])
        seen.setdefault(storage, (spec, find_layer(program.names[c.op_module[op]])))
        signature = program.signatures[c.op_signature[op]]
        if signature.name == CAST and not place[1] and signature.outputs[0].dtype in _HALF:
            made = int(c.tensor_storage[c.output_tensor[c.output_ptr[op]]])
            casts.setdefault(storage, []).append((made, signature.outputs[0].dtype))
        else:
            plain.add(storage)
    found = {}
    for storage, (spec, layer) in seen.items():
        copies = [] if storage in plain else casts.get(storage, [])
        numel = int(program.storage_nbytes[storage]) // DTYPE_BYTES[spec.dtype]
        used_as = copies[0][1] if copies else spec.dtype
        found[storage] = (Parameter(storage, numel, spec.dtype, used_as, tuple(made for made, _ in copies)), layer)
    return found


def _find_uses(program: Program, wanted: BoolArray) -> Iterator[tuple[int, int, TensorSpec]]:
    """Ops that read tensors on the wanted storages, with tensor and form, in the order they run."""
    c = program.columns
    for entry in np.flatnonzero(wanted[c.tensor_storage[c.input_tensor]]).tolist():
        op = int(np.searchsorted(c.input_ptr, entry, side="right")) - 1
        spec = program.signatures[c.op_signature[op]].inputs[entry - int(c.input_ptr[op])]
        yield op, int(c.input_tensor[entry]), spec


def _find_first_scopes(
    program: Program, passes: Sequence[Pass | None], units: dict[str, Unit], unit_of: dict[int, Unit]
) -> None:
    """Sets where each pass needs a unit first: at an op of its modules, or that uses its parameters."""
    c = program.columns
    by_module = [units.get(find_layer(name)) if name else None for name in program.names]
    inputs, pointer, storage = c.input_tensor.tolist(), c.input_ptr.tolist(), c.tensor_storage.tolist()
    scopes, modules = program.op_scope.tolist(), c.op_module.tolist()
    for op in range(program.num_ops):
        place = passes[scopes[op]]
        if place is None:
            continue
        used = [unit_of.get(storage[tensor]) for tensor in inputs[pointer[op] : pointer[op + 1]]]
        for unit in (by_module[modules[op]], *used):
            if unit is not None:
                unit.first.setdefault(place, scopes[op])


def find_new_gradients(program: Program) -> list[NewGradient]:
    """The gradients of all passes in the order in which they become ready."""
    c = program.columns
    passes = find_passes(c.scope_phase.tolist())
    made_by: dict[int, str] = {}
    found = []
    for scope in program.scopes:
        ops = program.ops[scope.first_op : scope.first_op + scope.num_ops]
        for op in ops:
            made_by |= {tensor.storage: op.module for tensor in op.outputs if op.module}
        place = passes[scope.index]
        if scope.name != ACCUMULATE_GRAD or not ops or place is None:
            continue
        last = ops[-1]
        if len(last.outputs) != 1:
            raise TraincastError("a sparse gradient cannot be sharded; use dense embeddings, or leave out `zero`")
        added = last.name == ADD and len(last.inputs) == 2
        new, total = last.inputs[1] if added else last.outputs[0], last.outputs[0]
        unit = find_layer(made_by.get(last.inputs[-1].storage if last.inputs else -1, ""))
        refs = [Ref(tensor.id, tensor.storage, tensor.spec) for tensor in (new, total)]
        found.append(NewGradient(refs[0], refs[1], added, scope.index, place[0], unit))
    return found
