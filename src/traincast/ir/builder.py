"""Putting a program together op by op: used by capture, by the torch-free models and by trace import."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from typing import Generic, TypeVar

import numpy as np

from traincast.ir.ops import Phase, Scalar, Signature, StorageKind, TensorSpec
from traincast.ir.program import Columns, Program
from traincast.ir.rows import NEVER, make_pointers
from traincast.ir.sizes import SizeTable, replace_indices_by_sizes, replace_sizes_by_indices
from traincast.utils.arrays import Int32Array, IntArray

T = TypeVar("T", bound=Hashable)


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
    """Collects storages, tensors, scopes and ops in host order; `build_program` gives the `Program`.

    All sizes are plain numbers at one batch size; `traincast.ir.generalise` turns several such programs
    into one that depends on the batch size. With `by_place` equal sizes keep numbers of their own, so that programs
    written alike have equal signatures whatever their sizes; `share_templates` joins them.
    """

    # what is written gets numbers behind those of a program that is there already; see `Insertion`
    _ops_before = _scopes_before = _tensors_before = _storages_before = 0

    def __init__(self, *, batch_size: int, seq_len: int = 0, by_place: bool = False) -> None:
        self.batch_size = batch_size
        self.seq_len = seq_len
        self._sizes: _Index[int] | _Places = _Places() if by_place else _Index[int]()
        self._number_size: Callable[[int], int] = self._sizes
        self._names = _Index[str]()
        self._signatures = _Index[Signature]()
        # where equal sizes share a number, a form of a tensor is looked up once
        self._specs: dict[TensorSpec, TensorSpec] | None = None if by_place else {}
        self._column: dict[str, list[int]] = {name: [] for name in Columns.names()}
        for pointer in ("input_ptr", "output_ptr"):
            self._column[pointer].append(0)
        self._op_scope: list[int] = []
        self._place = -1  # the scope that ops go to

    @property
    def num_ops(self) -> int:
        """Ops so far."""
        return self._ops_before + len(self._op_scope)

    @property
    def num_scopes(self) -> int:
        """Scopes so far."""
        return self._scopes_before + len(self._column["scope_name"])

    @property
    def last_scope(self) -> int:
        """The scope opened last (-1: none)."""
        return self.num_scopes - 1

    def add_storage(self, nbytes: int, kind: StorageKind = StorageKind.ACTIVATION, *, before_step: bool = False) -> int:
        """A new storage of `nbytes` bytes, allocated by the next op unless it is there `before_step`."""
        c = self._column
        c["storage_bytes"].append(self._number_size(nbytes))
        c["storage_kind"].append(int(kind))
        c["storage_alloc"].append(-1 if before_step else self.num_ops)
        c["storage_free"].append(NEVER)
        return self._storages_before + len(c["storage_bytes"]) - 1

    def set_kind(self, storage: int, kind: StorageKind) -> None:
        """Says what a storage turned out to hold."""
        self._column["storage_kind"][storage - self._storages_before] = int(kind)

    def set_lifetime(self, storage: int, alloc: int, free: int | None) -> None:
        """The storage is allocated by op `alloc` (-1: there before the step), freed after op `free_storage` (None:
        never)."""
        self._column["storage_alloc"][storage] = alloc
        self._column["storage_free"][storage] = NEVER if free is None else free

    def free_storage(self, storage: int) -> None:
        """The storage was released after the last op so far."""
        self._column["storage_free"][storage] = max(self.num_ops - 1, self._column["storage_alloc"][storage])

    def add_tensor(self, storage: int) -> int:
        """A new tensor on this storage."""
        self._column["tensor_storage"].append(storage)
        return self._tensors_before + len(self._column["tensor_storage"]) - 1

    def open_scope(self, name: str, phase: Phase, *, thread: int = 0, after: int = -1) -> int:
        """Opens a top-level host op; the ops that follow belong to it."""
        c = self._column
        c["scope_name"].append(self._names(name))
        c["scope_phase"].append(int(phase))
        c["scope_thread"].append(thread)
        c["scope_after"].append(after)
        self._place = self._scopes_before + len(c["scope_name"]) - 1
        return self._place

    def add_op(
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
        if self._place < 0:
            raise AssertionError("open a scope before adding an op")
        self._op_scope.append(self._place)
        c = self._column
        c["op_signature"].append(self._number_signature(signature))
        c["op_module"].append(self._names(module))
        c["op_forward"].append(forward)
        c["op_stream"].append(stream)
        c["input_tensor"].extend(inputs)
        c["input_ptr"].append(len(c["input_tensor"]))
        c["output_tensor"].extend(outputs)
        c["output_ptr"].append(len(c["output_tensor"]))
        return self._ops_before + len(self._op_scope) - 1

    def _number_signature(self, signature: Signature) -> int:
        return self._signatures(replace_sizes_by_indices(signature, self._number_size, self._specs))

    def build_program(self) -> Program:
        """The program. Storages never freed outlive the step."""
        arrays: dict[str, Int32Array] = {name: np.array(v, dtype=np.int32) for name, v in self._column.items()}
        op_scope = np.array(self._op_scope, dtype=np.int64)
        arrays["scope_ptr"] = make_pointers(np.bincount(op_scope, minlength=self.num_scopes)).astype(np.int32)
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


class SizesBuilder(ProgramBuilder):
    """Takes only the sizes of a program that is written like `template` (built `by_place`), which gives the rest."""

    def __init__(self, template: Program) -> None:
        super().__init__(batch_size=template.batch_size, seq_len=template.seq_len, by_place=True)
        self._template = template
        self._taken: list[int] = self._sizes.of if isinstance(self._sizes.of, list) else []
        self._ops = 0

    @property
    def num_ops(self) -> int:
        """Ops so far."""
        return self._ops

    def add_op(
        self,
        signature: Signature,
        inputs: Iterable[int],
        outputs: Iterable[int],
        *,
        module: str = "",
        forward: int = -1,
        stream: int = 0,
    ) -> int:
        """Takes the sizes of an op."""
        taken = self._taken
        for spec in (*signature.inputs, *signature.outputs):
            taken += spec.shape
            taken += spec.stride
        for _, value in signature.scalars:
            _collect_sizes(value, taken)
        self._ops += 1
        return self._ops - 1

    def build_program(self) -> Program:
        """The template with the sizes taken."""
        if len(self._taken) != len(self._template.sizes) or self._ops != self._template.num_ops:
            raise AssertionError("this program is not written like its template")
        return replace(self._template, sizes=SizeTable.constant(np.array(self._taken, dtype=np.int64)))


def _collect_sizes(value: Scalar, taken: list[int]) -> None:
    if isinstance(value, tuple):
        for item in value:
            _collect_sizes(item, taken)
    elif type(value) is int:
        taken.append(value)


def share_templates(programs: Sequence[Program]) -> list[Program]:
    """The programs, in the same order, with equal sizes numbered alike and signatures that became equal made one.

    They come from builders with `by_place`, those of one form from `SizesBuilder`: these share all but sizes.
    """
    alike: dict[int, list[int]] = {}
    for index, program in enumerate(programs):
        alike.setdefault(id(program.columns), []).append(index)
    result = list(programs)
    for members in alike.values():
        values = np.stack([programs[i].size_values for i in members])
        distinct, place = np.unique(values, axis=1, return_inverse=True)
        template = _renumber_program(programs[members[0]], place.reshape(-1))
        for row, index in enumerate(members):
            result[index] = replace(template, sizes=SizeTable.constant(np.ascontiguousarray(distinct[row])))
    return result


def _renumber_program(program: Program, place: IntArray) -> Program:
    """The program with its sizes at other numbers, and signatures that became equal made one."""
    numbers = place.tolist()
    distinct: dict[Signature, int] = {}
    which = [
        distinct.setdefault(replace_sizes_by_indices(plain, _keep_number), len(distinct))
        for plain in replace_indices_by_sizes(program.symbolic, numbers)
    ]
    columns = replace(
        program.columns,
        op_signature=np.array(which, dtype=np.int32)[program.columns.op_signature],
        storage_bytes=place[program.columns.storage_bytes].astype(np.int32),
    )
    return replace(program, columns=columns, symbolic=tuple(distinct))


def _keep_number(number: int) -> int:
    return number
