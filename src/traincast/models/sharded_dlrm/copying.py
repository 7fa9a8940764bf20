"""Copying the step of one GPU into that of a rank, scope by scope."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from traincast.ir.ops import Phase, Signature, StorageKind, TensorSpec
from traincast.ir.program import Program, find_storages_of_ops
from traincast.models.data_parallel.buckets import Reducer
from traincast.models.data_parallel.data_parallel import find_accumulating, find_end_of_backward, find_gradients
from traincast.models.layers.builder import RankBuilder, Ref
from traincast.models.sharded_dlrm.captured import EmbeddingModule
from traincast.utils.errors import TraincastError


class StepCopier:
    """Copies the scopes of `source` but those in `dropped` into `builder`, with the storages that other ops use.

    What takes the place of dropped scopes is written between `copy_scopes`s. A storage lives as long as it did;
    `replace_tensor` puts another tensor in the place of one whose op was dropped.
    """

    def __init__(self, source: Program, dropped: Sequence[int], builder: RankBuilder) -> None:
        builder.continue_from(source, builder.world)
        c = source.columns
        self.source, self.builder = source, builder
        self._tensors: dict[int, int] = {}
        self._ops: dict[int, int] = {}
        self._scopes: list[int] = []
        self._lasting: set[int] = set()
        self._born = _group_storages_by_op(c.storage_alloc, source.num_ops)
        self._gone = _group_storages_by_op(c.storage_free, source.num_ops)
        self._storages = {
            storage: builder.target.add_storage(
                int(source.storage_nbytes[storage]), self._get_storage_kind(storage), before_step=True
            )
            for storage in _find_resident_storages(source, dropped)
        }

    def copy_scopes(self, scopes: range) -> None:
        """Copies scopes as they are."""
        c, names = self.source.columns, self.source.names
        for scope in scopes:
            after = int(c.scope_after[scope])
            self.builder.open_scope_on(
                int(c.scope_thread[scope]), names[c.scope_name[scope]], Phase(int(c.scope_phase[scope])),
                after=-1 if after < 0 else self._scopes[after],
            )  # fmt: skip
            self._scopes.append(self.builder.target.last_scope)
            for op in range(int(c.scope_ptr[scope]), int(c.scope_ptr[scope + 1])):
                self._copy_op(op)

    def drop_scopes(self, scopes: range) -> None:
        """Leaves scopes out: what waits for them waits for what was written last, what they let go is gone."""
        c = self.source.columns
        self._scopes += [self.builder.target.last_scope] * len(scopes)
        for op in range(int(c.scope_ptr[scopes.start]), int(c.scope_ptr[scopes.stop])):
            self._free_after(op)

    def get_ref(self, tensor: int, spec: TensorSpec) -> Ref:
        """A tensor of the source, as it is here."""
        return Ref(self._copy_tensor(tensor), self._find_storage(tensor), spec)

    def replace_tensor(self, tensor: int, by: Ref) -> None:
        """From here on another tensor stands in the place of one of the source, for all that is on its storage."""
        c = self.source.columns
        storage = int(c.tensor_storage[tensor])
        for known in [one for one in self._tensors if c.tensor_storage[one] == storage]:
            del self._tensors[known]
        self._tensors[tensor], self._storages[storage] = by.tensor, by.storage

    def _copy_op(self, op: int) -> None:
        c = self.source.columns
        for storage in self._born[op]:
            self._storages[storage] = self.builder.target.add_storage(
                int(self.source.storage_nbytes[storage]), self._get_storage_kind(storage)
            )
        signature = self._spread_collective(self.source.signatures[c.op_signature[op]])
        self._ops[op] = self.builder.target.add_op(
            signature,
            [self._copy_tensor(int(tensor)) for tensor in c.input_tensor[c.input_ptr[op] : c.input_ptr[op + 1]]],
            [self._copy_tensor(int(tensor)) for tensor in c.output_tensor[c.output_ptr[op] : c.output_ptr[op + 1]]],
            module=self.source.names[c.op_module[op]],
            forward=self._ops.get(int(c.op_forward[op]), -1),
            stream=int(c.op_stream[op]),
        )
        self._free_after(op)

    def _spread_collective(self, signature: Signature) -> Signature:
        """A collective of the one rank is one of all ranks."""
        if signature.scalar("collective") is None:
            return signature
        scalars = ((name, self.builder.world.ranks if name == "group" else value) for name, value in signature.scalars)
        return replace(signature, scalars=tuple(scalars))

    def _free_after(self, op: int) -> None:
        for storage in self._gone[op]:
            here = self._storages.get(storage)
            if here is not None and here not in self._lasting:
                self.builder.target.free_storage(here)

    def _copy_tensor(self, tensor: int) -> int:
        if tensor not in self._tensors:
            self._tensors[tensor] = self.builder.target.add_tensor(self._find_storage(tensor))
        return self._tensors[tensor]

    def _find_storage(self, tensor: int) -> int:
        """The storage of a tensor of the source, as it is here."""
        storage = int(self.source.columns.tensor_storage[tensor])
        if storage not in self._storages:
            raise TraincastError(f"storage {storage} of the workload is used before it is allocated; capture it again")
        return self._storages[storage]

    def _get_storage_kind(self, storage: int) -> StorageKind:
        return StorageKind(int(self.source.columns.storage_kind[storage]))


class ReducingCopier(StepCopier):
    """Copies a step of one GPU without its embedding `modules`, each gradient reduced over all ranks where it is ready;
    a step that reduces its gradients itself does so."""

    def __init__(self, source: Program, modules: Sequence[EmbeddingModule], builder: RankBuilder) -> None:
        self.dropped = {scope for one in modules for scopes in (one.forward, one.backward) for scope in scopes}
        super().__init__(source, sorted(self.dropped), builder)
        accumulating = find_accumulating(source).tolist()
        self.end = find_end_of_backward(source, accumulating) if accumulating else source.num_scopes
        self.begin = int((source.columns.scope_phase == Phase.BACKWARD).argmax())
        communicates = any(signature.scalar("collective") is not None for signature in source.symbolic)
        self._ready = {} if communicates else {gradient.scope: gradient for gradient in find_gradients(source)}
        forms = [gradient.grad.spec for gradient in self._ready.values()]
        self._reducer = Reducer(builder, builder.world, forms, kind=StorageKind.GRADIENT, as_views=True)

    def copy_scope(self, scope: int) -> None:
        """One scope as it is; a gradient that is ready then goes into its bucket, and stays a part of it."""
        if scope in self.dropped:
            self.drop_scopes(range(scope, scope + 1))
            return
        self.copy_scopes(range(scope, scope + 1))
        if scope in self._ready:
            gradient = self._ready[scope]
            grad = self.get_ref(gradient.grad.tensor, gradient.grad.spec)
            slot = self._reducer.reduce_gradient(grad, stream=gradient.stream)
            self.replace_tensor(gradient.grad.tensor, slot)
            self._lasting.add(slot.storage)

    def finish_reduction(self) -> None:
        """Reduced gradients are there; what waits for the scope copied last waits for what was written since."""
        if self._ready:
            self._reducer.finish_reduction()
            self._scopes[-1] = self.builder.target.last_scope


def _group_storages_by_op(column: np.ndarray[tuple[int], np.dtype[np.int32]], ops: int) -> list[list[int]]:
    """Storages by the op that a column names."""
    result: list[list[int]] = [[] for _ in range(ops)]
    for storage, op in enumerate(column.tolist()):
        if 0 <= op < ops:
            result[op].append(storage)
    return result


def _find_resident_storages(program: Program, dropped: Sequence[int]) -> list[int]:
    """Storages that are there before the step and are not those of dropped ops alone. Gradients of the step before are
    left out: they are parts of DDP's buckets."""
    c = program.columns
    gone = np.isin(program.op_scope, dropped)
    by_kept, by_dropped = (np.zeros(len(c.storage_bytes), dtype=np.bool_) for _ in range(2))
    for op in range(program.num_ops):
        (by_dropped if gone[op] else by_kept)[find_storages_of_ops(program, op, op + 1)] = True
    grads = (c.storage_kind == StorageKind.GRADIENT) & ~by_kept
    return np.flatnonzero((c.storage_alloc < 0) & (by_kept | ~by_dropped) & ~grads).tolist()
