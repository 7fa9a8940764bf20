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

from traincast.capturing.metadata_cache import PLAIN, UnsupportedArgumentError
from traincast.capturing.patches import Patches
from traincast.capturing.recorder import Recorder


def install_shardings(patches: Patches, recorder: Recorder) -> None:
    """Lets PyTorch ask here first until the patches are undone; not while a step is recorded."""
    known = recorder.execution.metadata_cache.shardings
    propagator: Any = ShardingPropagator
    find, find_forms = propagator.propagate_op_sharding_non_cached, propagator._propagate_tensor_meta_non_cached

    def kept(what: str, schema: Any, found: Callable[[], Any], strip: Any, give: Any) -> Any:
        meshes: list[DeviceMesh] = []
        try:
            key = (what, schema.op, torch.get_default_dtype(), _make_key(schema.args_schema, meshes),
                   *((name, _make_key(value, meshes)) for name, value in schema.kwargs_schema.items()))  # fmt: skip
        except UnsupportedArgumentError:
            return found()
        if recorder.book.recording:
            return found()
        if key not in known:
            result = found()
            with suppress(UnsupportedArgumentError):
                known[key] = strip(result, meshes)
            return result
        return give(known[key], meshes)

    def sharding(self: Any, schema: Any) -> Any:
        return kept("sharding", schema, lambda: find(self, schema), _remove_mesh, _restore_mesh)

    def forms(self: Any, schema: Any) -> Any:
        def found() -> Any:
            try:
                return find_forms(self, schema) if recorder.book.recording else _infer_metadata(schema)
            except UnsupportedArgumentError:
                return find_forms(self, schema)

        return kept("forms", schema, found, lambda f, _: f, lambda f, _: f)

    patches.set_attribute(propagator, "propagate_op_sharding_non_cached", sharding)
    patches.set_attribute(propagator, "_propagate_tensor_meta_non_cached", forms)


def _make_key(value: Any, meshes: list[DeviceMesh]) -> Any:
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
        return (kind, *(_make_key(item, meshes) for item in value))
    raise UnsupportedArgumentError


def _infer_metadata(schema: Any) -> Any:
    """The forms of what an op gives for whole tensors, asked of the op itself; PyTorch asks its fake tensors, which
    takes ten times as long. Unusual is what only they can tell."""
    if schema.op.namespace != "aten" or schema.op is torch.ops.aten.equal.default:
        raise UnsupportedArgumentError
    if not schema.op._schema.returns:
        return None  # as PyTorch has it
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
        try:
            made = schema.op(*_make_empty(schema.args_schema), **_make_empty(schema.kwargs_schema))
        except (RuntimeError, TypeError, ValueError) as error:
            raise UnsupportedArgumentError from error
        if isinstance(made, torch.Tensor):
            return TensorMeta(made.shape, made.stride(), made.dtype)
        if isinstance(made, (tuple, list)) and all(isinstance(out, torch.Tensor) for out in made):
            return type(made)(TensorMeta(out.shape, out.stride(), out.dtype) for out in made)
    raise UnsupportedArgumentError


def _make_empty(value: Any) -> Any:
    """Arguments of an op with meta tensors where there are shardings."""
    if isinstance(value, DTensorSpec):
        form: Any = value.tensor_meta
        return torch.empty_strided(form.shape, form.stride, dtype=form.dtype, device="meta")
    if isinstance(value, dict):
        return {name: _make_empty(item) for name, item in value.items()}
    return type(value)(map(_make_empty, value)) if type(value) in (tuple, list) else value


def _remove_mesh(found: OutputSharding, meshes: list[DeviceMesh]) -> Any:
    """The placements of the results, if the op can run on its tensors as they are."""
    if found.redistribute_schema is not None or found.needs_redistribute or found.use_val_from_redistribute_schema:
        raise UnsupportedArgumentError
    numbers = {id(mesh): number for number, mesh in enumerate(meshes)}

    def number(mesh: Any) -> int:
        if id(mesh) not in numbers:
            raise UnsupportedArgumentError
        return numbers[id(mesh)]

    return _replace_mesh(found.output_spec, number)


def _restore_mesh(specs: Any, meshes: list[DeviceMesh]) -> OutputSharding:
    return OutputSharding(_replace_mesh(specs, meshes.__getitem__))


def _replace_mesh(specs: Any, mesh: Callable[[Any], Any]) -> Any:
    """Copies of the placements, with what `mesh` gives for the mesh (or its number) that they have."""
    if specs is None:
        return None
    if type(specs) is tuple or type(specs) is list:
        return type(specs)(_replace_mesh(spec, mesh) for spec in specs)
    if type(specs) is not DTensorSpec:
        raise UnsupportedArgumentError
    moved: Any = copy.copy(specs)
    moved.mesh = mesh(specs.mesh)
    return moved
