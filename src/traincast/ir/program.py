"""One rank's training step: scopes and ops in host order, kept as columns."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property
from weakref import WeakKeyDictionary

import numpy as np

from traincast.ir.ops import Op, Phase, Scope, Signature, StorageKind, Tensor
from traincast.ir.sizes import SizeTable, replace_indices_by_sizes, separate_forms_and_sizes
from traincast.utils.arrays import BoolArray, Int32Array, IntArray

_TABLE, _COMMUNICATION = len(StorageKind), len(StorageKind) + 1
USES = (*(kind.name.lower() for kind in StorageKind), "embedding_table", "communication")
"""What a storage is for: its kind, or one of two uses that only ops tell."""
_EXCHANGED = (StorageKind.INPUT, StorageKind.ACTIVATION, StorageKind.BUFFER)


@dataclass(frozen=True, eq=False, kw_only=True)
class Columns:
    """The arrays of a program. Pointers (`*_ptr`) have one entry more than the things they divide."""

    op_signature: Int32Array
    op_module: Int32Array  # index into `names`
    op_forward: Int32Array  # forward op of a backward op, or -1
    op_stream: Int32Array
    input_ptr: Int32Array
    input_tensor: Int32Array
    output_ptr: Int32Array
    output_tensor: Int32Array
    tensor_storage: Int32Array
    storage_bytes: Int32Array  # index into `sizes`
    storage_kind: Int32Array
    storage_alloc: Int32Array  # op that allocates it, or -1: there before the step
    storage_free: Int32Array  # op after which it is freed, or the number of ops: outlives the step
    scope_name: Int32Array  # index into `names`
    scope_phase: Int32Array
    scope_thread: Int32Array
    scope_after: Int32Array
    scope_ptr: Int32Array  # ops of scope i are scope_ptr[i] .. scope_ptr[i + 1]

    @staticmethod
    def names() -> tuple[str, ...]:
        """Names of the columns, in order."""
        return tuple(field.name for field in fields(Columns))


@dataclass(frozen=True, eq=False, kw_only=True)
class Program:
    """One rank's step at one batch size and sequence length, able to become another.

    `symbolic` are the distinct op signatures with sizes as indices into `sizes`. `seq_len` is 0 for a
    model without sequences. `rigid` says why the program cannot be re-batched ("" when it can).
    """

    sizes: SizeTable
    symbolic: tuple[Signature, ...]
    names: tuple[str, ...]
    columns: Columns
    batch_size: int
    seq_len: int = 0
    rigid: str = ""

    @property
    def num_ops(self) -> int:
        """Number of ops."""
        return len(self.columns.op_signature)

    @property
    def num_scopes(self) -> int:
        """Number of top-level host ops."""
        return len(self.columns.scope_name)

    @cached_property
    def size_values(self) -> IntArray:
        """Every size at the program's batch size and sequence length."""
        return self.sizes.at(self.batch_size, self.seq_len)

    @cached_property
    def signatures(self) -> tuple[Signature, ...]:
        """The distinct op signatures with plain numbers."""
        return replace_indices_by_sizes(self.symbolic, self.size_values.tolist())

    @cached_property
    def forms(self) -> tuple[tuple[Signature, tuple[int, ...]], ...]:
        """Every distinct signature without its sizes, and these sizes."""
        return separate_forms_and_sizes(self.signatures)

    @cached_property
    def op_scope(self) -> Int32Array:
        """The scope of every op."""
        counts = np.diff(self.columns.scope_ptr)
        return np.repeat(np.arange(self.num_scopes, dtype=np.int32), counts)

    @cached_property
    def op_phase(self) -> Int32Array:
        """The phase of every op (its scope's)."""
        return self.columns.scope_phase[self.op_scope]

    @cached_property
    def ops(self) -> tuple[Op, ...]:
        """Every op as an object, in host order. For reading and tests; prediction uses the columns."""
        return tuple(self.get_op(index) for index in range(self.num_ops))

    @cached_property
    def scopes(self) -> tuple[Scope, ...]:
        """Every top-level host op as an object, in host order."""
        c = self.columns
        return tuple(
            Scope(
                index=i,
                name=self.names[c.scope_name[i]],
                phase=Phase(int(c.scope_phase[i])),
                thread=int(c.scope_thread[i]),
                after=int(c.scope_after[i]),
                first_op=int(c.scope_ptr[i]),
                num_ops=int(c.scope_ptr[i + 1] - c.scope_ptr[i]),
            )
            for i in range(self.num_scopes)
        )

    @cached_property
    def storage_nbytes(self) -> IntArray:
        """Bytes of every storage."""
        values: IntArray = self.size_values[self.columns.storage_bytes]
        return values

    @cached_property
    def storages(self) -> Storages:
        """What is known of every storage besides its size; programs that share columns and signatures share it."""
        known = _STORAGES.setdefault(self.columns, {})
        description = known.get(id(self.symbolic))
        if description is None:  # holds the signatures, so their id stays theirs
            description = known[id(self.symbolic)] = _describe_storages(self.columns, self.symbolic)
        return description

    def resized(self, batch_size: int, seq_len: int) -> Program:
        """The same program at another batch size and sequence length."""
        return replace(self, batch_size=batch_size, seq_len=seq_len)

    def get_op(self, index: int) -> Op:
        """One op as an object."""
        c = self.columns
        signature = self.signatures[c.op_signature[index]]
        scope = int(self.op_scope[index])
        inputs = c.input_tensor[c.input_ptr[index] : c.input_ptr[index + 1]].tolist()
        outputs = c.output_tensor[c.output_ptr[index] : c.output_ptr[index + 1]].tolist()
        return Op(
            index=index,
            signature=signature,
            inputs=tuple(Tensor(t, int(c.tensor_storage[t]), s) for t, s in zip(inputs, signature.inputs, strict=True)),
            outputs=tuple(
                Tensor(t, int(c.tensor_storage[t]), s) for t, s in zip(outputs, signature.outputs, strict=True)
            ),
            phase=Phase(int(c.scope_phase[scope])),
            module=self.names[c.op_module[index]],
            scope=scope,
            forward=int(c.op_forward[index]),
            thread=int(c.scope_thread[scope]),
            stream=int(c.op_stream[index]),
        )


@dataclass(frozen=True, eq=False, slots=True)
class Storages:
    """Per storage of a program: whether it is in host memory (some op sees its tensors on a CPU device), and what it
    is for: its kind; one more for the parameters that lookups read, two more for inputs, activations, buffers and
    buckets of gradients that collectives read or write."""

    symbolic: tuple[Signature, ...]
    on_host: BoolArray
    use: IntArray


_STORAGES: WeakKeyDictionary[Columns, dict[int, Storages]] = WeakKeyDictionary()


def _describe_storages(c: Columns, symbolic: tuple[Signature, ...]) -> Storages:
    on_host = np.zeros(len(c.storage_bytes), dtype=np.bool_)
    for specs, pointer, tensor in (
        ([s.inputs for s in symbolic], c.input_ptr, c.input_tensor),
        ([s.outputs for s in symbolic], c.output_ptr, c.output_tensor),
    ):
        flags = [[spec.device.startswith("cpu") for spec in row] for row in specs]
        touches = np.array([any(row) for row in flags], dtype=np.bool_)
        for op in np.flatnonzero(touches[c.op_signature]):
            row = flags[c.op_signature[op]]
            on_host[c.tensor_storage[tensor[pointer[op] : pointer[op + 1]][row]]] = True
    use = c.storage_kind.astype(np.int64)
    looks_up = np.array(["embedding" in signature.name for signature in symbolic], dtype=np.bool_)
    exchanges = np.array([signature.name.startswith("c10d::") for signature in symbolic], dtype=np.bool_)
    if looks_up.any():
        read = _find_touched_storages(c, looks_up, c.input_ptr, c.input_tensor)
        use[read & (c.storage_kind == StorageKind.PARAMETER)] = _TABLE
        # FBGEMM's modules keep the state of their fused optimizer in buffers
        use[_find_optimizer_moments(c, symbolic) & (c.storage_kind == StorageKind.BUFFER)] = StorageKind.OPTIMIZER_STATE
    if exchanges.any():
        touched = _find_touched_storages(c, exchanges, c.input_ptr, c.input_tensor)
        touched |= _find_touched_storages(c, exchanges, c.output_ptr, c.output_tensor)
        # what stays for gradients alongside the gradients themselves: DDP's buckets
        lasting = (
            (c.storage_kind == StorageKind.GRADIENT) & (c.storage_alloc < 0) & (c.storage_free >= len(c.op_signature))
        )
        use[touched & (np.isin(c.storage_kind, _EXCHANGED) | lasting)] = _COMMUNICATION
    return Storages(symbolic, on_host, use)


def _find_optimizer_moments(c: Columns, symbolic: tuple[Signature, ...]) -> BoolArray:
    """Which storages lookups are given as moments of their optimizer."""
    flags = {
        number: [name.startswith("momentum") for name, count in signature.groups for _ in range(count)]
        for number, signature in enumerate(symbolic)
        if "embedding" in signature.name
    }
    moments = np.zeros(len(c.storage_bytes), dtype=np.bool_)
    for op in np.flatnonzero(np.isin(c.op_signature, list(flags))):
        inputs = c.input_tensor[c.input_ptr[op] : c.input_ptr[op + 1]]
        moments[c.tensor_storage[inputs[flags[int(c.op_signature[op])]]]] = True
    return moments


def _find_touched_storages(c: Columns, marked: BoolArray, pointer: Int32Array, tensor: Int32Array) -> BoolArray:
    """Which storages the ops with a marked signature touch."""
    touched = np.zeros(len(c.storage_bytes), dtype=np.bool_)
    touched[c.tensor_storage[tensor[np.repeat(marked[c.op_signature], np.diff(pointer))]]] = True
    return touched


def find_storages_of_ops(program: Program, first: int, end: int) -> Int32Array:
    """The storages that ops `first` to `end` (excluded) read or write."""
    c = program.columns
    tensors = (
        c.input_tensor[c.input_ptr[first] : c.input_ptr[end]],
        c.output_tensor[c.output_ptr[first] : c.output_ptr[end]],
    )
    storages: Int32Array = c.tensor_storage[np.concatenate(tensors)]
    return storages


def find_stale_storages(program: Program) -> IntArray:
    """Storages that are freed before any op runs, which captures note as freed after op 0."""
    c = program.columns
    stale = (c.storage_alloc < 0) & (c.storage_free == 0)
    if program.num_ops:
        stale[find_storages_of_ops(program, 0, 1)] = False
    return np.flatnonzero(stale)
