"""How ops on DTensors are sharded, found out once for all ranks and sizes of a capture.

PyTorch keeps what it finds, together with the mesh it found it for, whose groups are those of one rank; so it must
forget it before the next (`ranks`). What it finds does not depend on the groups: it is kept here without the mesh, and
given to the mesh that asks. It is the same on all ranks, as ranks must agree on it; where it has sizes of one rank
alone (arguments to be changed, tensors to be sent before the op), it is found anew.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OutputSharding
from torch.distributed.tensor._sharding_prop import ShardingPropagator

from traincast.capturing.forms import PLAIN, Unusual
from traincast.capturing.patches import Patches
from traincast.capturing.recorder import Recorder


def install_shardings(patches: Patches, recorder: Recorder) -> None:
    """Lets PyTorch ask here first until the patches are undone; not while a step is recorded."""
    known = recorder.execution.forms.shardings
    propagator: Any = ShardingPropagator
    find, find_forms = propagator.propagate_op_sharding_non_cached, propagator._propagate_tensor_meta_non_cached

    def kept(what: str, schema: Any, found: Callable[[], Any], strip: Any, give: Any) -> Any:
        meshes: list[DeviceMesh] = []
        try:
            key = (what, schema.op, torch.get_default_dtype(), _key(schema.args_schema, meshes),
                   *((name, _key(value, meshes)) for name, value in schema.kwargs_schema.items()))  # fmt: skip
        except Unusual:
            return found()
        if recorder.book.recording:
            return found()
        if key not in known:
            result = found()
            with suppress(Unusual):
                known[key] = strip(result, meshes)
            return result
        return give(known[key], meshes)

    def sharding(self: Any, schema: Any) -> Any:
        return kept("sharding", schema, lambda: find(self, schema), _without_mesh, _on_mesh)

    def forms(self: Any, schema: Any) -> Any:
        def found() -> Any:
            try:
                return find_forms(self, schema) if recorder.book.recording else _forms_without_data(schema)
            except Unusual:
                return find_forms(self, schema)

        return kept("forms", schema, found, lambda f, _: f, lambda f, _: f)

    patches.set(propagator, "propagate_op_sharding_non_cached", sharding)
    patches.set(propagator, "_propagate_tensor_meta_non_cached", forms)


def _key(value: Any, meshes: list[DeviceMesh]) -> Any:
    """All that a sharding depends on; notes the meshes it is for. Meshes of the same ranks are equal, but not the same:
    each has groups of its own."""
    kind = type(value)
    if kind is DTensorSpec:
        place = next((i for i, mesh in enumerate(meshes) if mesh is value.mesh), len(meshes))
        if place == len(meshes):
            meshes.append(value.mesh)
        ordered = (value.shard_order, value.use_strided_shard_as_shard_order)
        return place, value.mesh, value.placements, *ordered, value.tensor_meta
    if kind in PLAIN:
        return kind, value
    if kind is tuple or kind is list:
        return (kind, *(_key(item, meshes) for item in value))
    raise Unusual


def _forms_without_data(schema: Any) -> Any:
    """The forms of what an op gives for whole tensors, asked of the op itself; PyTorch asks its fake tensors, which
    takes ten times as long. Unusual is what only they can tell."""
    if schema.op.namespace != "aten" or schema.op is torch.ops.aten.equal.default:
        raise Unusual
    if not schema.op._schema.returns:
        return None  # as PyTorch has it
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
        try:
            made = schema.op(*_emptied(schema.args_schema), **_emptied(schema.kwargs_schema))
        except (RuntimeError, TypeError, ValueError) as error:
            raise Unusual from error
        if isinstance(made, torch.Tensor):
            return TensorMeta(made.shape, made.stride(), made.dtype)
        if isinstance(made, (tuple, list)) and all(isinstance(out, torch.Tensor) for out in made):
            return type(made)(TensorMeta(out.shape, out.stride(), out.dtype) for out in made)
    raise Unusual


def _emptied(value: Any) -> Any:
    """Arguments of an op with tensors without data where there are shardings."""
    if isinstance(value, DTensorSpec):
        form: Any = value.tensor_meta
        return torch.empty_strided(form.shape, form.stride, dtype=form.dtype, device="meta")
    if isinstance(value, dict):
        return {name: _emptied(item) for name, item in value.items()}
    return type(value)(map(_emptied, value)) if type(value) in (tuple, list) else value


def _without_mesh(found: OutputSharding, meshes: list[DeviceMesh]) -> Any:
    """The placements of the results, if the op can run on its tensors as they are."""
    if found.redistribute_schema is not None or found.needs_redistribute or found.use_val_from_redistribute_schema:
        raise Unusual
    numbers = {id(mesh): number for number, mesh in enumerate(meshes)}

    def number(mesh: Any) -> int:
        if id(mesh) not in numbers:
            raise Unusual
        return numbers[id(mesh)]

    return _moved(found.output_spec, number)


def _on_mesh(specs: Any, meshes: list[DeviceMesh]) -> OutputSharding:
    return OutputSharding(_moved(specs, meshes.__getitem__))


def _moved(specs: Any, mesh: Callable[[Any], Any]) -> Any:
    """Copies of the placements, with what `mesh` gives for the mesh (or its number) that they have."""
    if specs is None:
        return None
    if type(specs) is tuple or type(specs) is list:
        return type(specs)(_moved(spec, mesh) for spec in specs)
    if type(specs) is not DTensorSpec:
        raise Unusual
    moved: Any = copy.copy(specs)
    moved.mesh = mesh(specs.mesh)
    return moved
