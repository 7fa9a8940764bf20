"""Putting a program together op by op: used by capture, by the torch-free models and by trace import."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

import numpy as np

from traincast.ir.ops import Phase, Signature, StorageKind, TensorSpec
from traincast.ir.program import Columns, Program
from traincast.ir.sizes import SizeTable
from traincast.ir.symbolic import with_size_indices
from traincast.utils.arrays import Int32Array

T = TypeVar("T", bound=Hashable)
_NEVER = int(np.iinfo(np.int32).max)  # beyond every op: the storage outlives the step


class _Index(Generic[T]):
    """Numbers distinct things in order of appearance."""

    def __init__(self) -> None:
        self.of: dict[T, int] = {}

    def __call__(self, thing: T) -> int:
        return self.of.setdefault(thing, len(self.of))


class _Places:
    """Numbers things in order of appearance, each time anew."""

    def __init__(self) -> None:
        self.of: list[int] = []

    def __call__(self, thing: int) -> int:
        self.of.append(thing)
        return len(self.of) - 1


class ProgramBuilder:
    """Collects storages, tensors, scopes and ops in host order; `build` gives the `Program`.

    All sizes are plain numbers at one batch size; `traincast.ir.generalise` turns several such programs
    into one that depends on the batch size. With `by_place` equal sizes keep numbers of their own, so that programs
    written alike have equal signatures whatever their sizes; `traincast.ir.template` joins them.
    """

    def __init__(self, *, batch_size: int, seq_len: int = 0, by_place: bool = False) -> None:
        self.batch_size = batch_size
        self.seq_len = seq_len
        self._sizes: _Index[int] | _Places = _Places() if by_place else _Index[int]()
        self._names = _Index[str]()
        self._signatures = _Index[Signature]()
        self._specs: dict[TensorSpec, TensorSpec] = {}
        self._column: dict[str, list[int]] = {name: [] for name in Columns.names()}
        for pointer in ("input_ptr", "output_ptr", "scope_ptr"):
            self._column[pointer].append(0)

    @property
    def num_ops(self) -> int:
        """Ops so far."""
        return len(self._column["op_signature"])

    @property
    def num_scopes(self) -> int:
        """Scopes so far."""
        return len(self._column["scope_name"])

    def storage(self, nbytes: int, kind: StorageKind = StorageKind.ACTIVATION, *, before_step: bool = False) -> int:
        """A new storage of `nbytes` bytes, allocated by the next op unless it is there `before_step`."""
        c = self._column
        c["storage_bytes"].append(self._sizes(nbytes))
        c["storage_kind"].append(int(kind))
        c["storage_alloc"].append(-1 if before_step else self.num_ops)
        c["storage_free"].append(_NEVER)
        return len(c["storage_bytes"]) - 1

    def set_kind(self, storage: int, kind: StorageKind) -> None:
        """Says what a storage turned out to hold."""
        self._column["storage_kind"][storage] = int(kind)

    def set_lifetime(self, storage: int, alloc: int, free: int | None) -> None:
        """The storage is allocated by op `alloc` (-1: there before the step), freed after op `free` (None: never)."""
        self._column["storage_alloc"][storage] = alloc
        self._column["storage_free"][storage] = _NEVER if free is None else free

    def free(self, storage: int) -> None:
        """The storage was released after the last op so far."""
        self._column["storage_free"][storage] = max(self.num_ops - 1, self._column["storage_alloc"][storage])

    def tensor(self, storage: int) -> int:
        """A new tensor on this storage."""
        self._column["tensor_storage"].append(storage)
        return len(self._column["tensor_storage"]) - 1

    def scope(self, name: str, phase: Phase, *, thread: int = 0, after: int = -1) -> int:
        """Opens a top-level host op; the ops that follow belong to it."""
        c = self._column
        c["scope_name"].append(self._names(name))
        c["scope_phase"].append(int(phase))
        c["scope_thread"].append(thread)
        c["scope_after"].append(after)
        c["scope_ptr"].append(self.num_ops)
        return self.num_scopes - 1

    def op(
        self,
        signature: Signature,
        inputs: Iterable[int],
        outputs: Iterable[int],
        *,
        module: str = "",
        forward: int = -1,
        stream: int = 0,
    ) -> int:
        """Adds an op to the scope opened last; `inputs` and `outputs` are tensor ids in signature order."""
        if not self.num_scopes:
            raise AssertionError("open a scope before adding an op")
        symbolic = self._symbolic(signature)
        c = self._column
        c["op_signature"].append(self._signatures(symbolic))
        c["op_module"].append(self._names(module))
        c["op_forward"].append(forward)
        c["op_stream"].append(stream)
        c["input_tensor"].extend(inputs)
        c["input_ptr"].append(len(c["input_tensor"]))
        c["output_tensor"].extend(outputs)
        c["output_ptr"].append(len(c["output_tensor"]))
        c["scope_ptr"][-1] = self.num_ops
        return self.num_ops - 1

    def _symbolic(self, signature: Signature) -> Signature:
        """With sizes as indices. Where equal sizes share a number, a form of a tensor is looked up once."""
        if isinstance(self._sizes, _Places):
            return with_size_indices(signature, self._sizes)
        return with_size_indices(signature, self._sizes, self._specs)

    def build(self) -> Program:
        """The program. Storages never freed outlive the step."""
        arrays: dict[str, Int32Array] = {name: np.array(v, dtype=np.int32) for name, v in self._column.items()}
        arrays["storage_free"] = np.minimum(arrays["storage_free"], np.int32(self.num_ops))
        sizes = np.array(list(self._sizes.of), dtype=np.int64)
        return Program(
            sizes=SizeTable.constant(sizes),
            symbolic=tuple(self._signatures.of),
            names=tuple(self._names.of),
            columns=Columns(**arrays),
            batch_size=self.batch_size,
            seq_len=self.seq_len,
        )
