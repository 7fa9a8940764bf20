"""Where the operands of every op of a step are: how many bytes were touched since each was touched last.

Storages are followed in the order of the ops, in a steady state (the step before it has the same order). What is
freed goes to a list of free blocks, and what is allocated takes the block freed last that is large enough, as malloc
does: memory that is still warm. No page is new: steps run with an allocator that keeps what it has.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import exp
from typing import NamedTuple

import numpy as np

from traincast.ir.ops import Signature
from traincast.ir.program import Program
from traincast.utils.arrays import FloatArray

FAR = 1 << 40  # bytes: further than any cache reaches
CODE_BYTES = 64 << 10
"""About what an op runs through of its own, from its first check to its kernel."""
_RELATIVE_FIT = 4.0  # a free block this many times too large is left for others
_FREE_BLOCKS = 64  # older ones are cold by any measure


@dataclass(frozen=True, slots=True)
class Operand:
    """What an op touches of a tensor: this many bytes, last touched this many bytes of other data ago."""

    nbytes: int
    distance: int


@dataclass(slots=True)
class _Memory:
    """Storages by when they were touched last (the latest at the end), and free blocks."""

    farthest: int
    touched: OrderedDict[int, int] = field(default_factory=OrderedDict)
    free: list[tuple[int, int]] = field(default_factory=list)  # (block of a storage that is gone, bytes)
    names: dict[str, int] = field(default_factory=dict)  # of ops, whose code is at key -1 - number

    def touch(self, key: int, nbytes: int) -> int:
        """How far back this storage is; it is the latest now."""
        distance = self._distance(key)
        self.touched[key] = max(self.touched.pop(key, 0), nbytes)
        return distance

    def _distance(self, key: int) -> int:
        if key not in self.touched:
            return FAR
        between = 0
        for other in reversed(self.touched):
            if other == key:
                return between
            between += self.touched[other]
            if between > self.farthest:
                return FAR
        return FAR

    def allocate(self, key: int, nbytes: int) -> None:
        """Takes over the block freed last that fits."""
        for position in range(len(self.free) - 1, -1, -1):
            old, size = self.free[position]
            if nbytes <= size <= _RELATIVE_FIT * nbytes + 4096:
                del self.free[position]
                self._rename(old, key, nbytes)
                return

    def _rename(self, old: int, new: int, nbytes: int) -> None:
        """The new storage is where the old one lay: as warm, at its place in the order."""
        if old in self.touched:
            items = [(new, nbytes) if key == old else (key, size) for key, size in self.touched.items()]
            self.touched = OrderedDict(items)

    def release(self, key: int, nbytes: int) -> None:
        """Frees a storage."""
        self.free.append((key, nbytes))
        del self.free[:-_FREE_BLOCKS]


class Found(NamedTuple):
    """What an op finds: its inputs and outputs, and how many bytes ago an op of its name ran."""

    operands: tuple[Operand, ...]
    code: int


Touched = Callable[[int, Signature], Sequence[float]]
"""How many bytes an op (by number) touches of each of its inputs and outputs: of a table only the rows looked up."""


def list_whole_tensors(_: int, signature: Signature) -> list[float]:
    """All of every tensor."""
    return [float(spec.nbytes) for spec in (*signature.inputs, *signature.outputs)]


def list_operands(program: Program, farthest: float, touched: Touched = list_whole_tensors) -> list[Found]:
    """The operands of every op, inputs before outputs, and its code, in a step that follows one of its kind.

    `farthest` is the distance in bytes beyond which all is equally far.
    """
    memory = _Memory(int(farthest))
    _replay_accesses(program, memory, touched, offset=0)
    return _replay_accesses(program, memory, touched, offset=len(program.columns.storage_bytes))


def _replay_accesses(program: Program, memory: _Memory, touched: Touched, offset: int) -> list[Found]:
    """One step; storages that are made in it are other ones than those of the step before (`offset`)."""
    c, nbytes = program.columns, program.storage_nbytes
    keys = np.arange(len(nbytes)) + np.where(c.storage_alloc < 0, 0, offset)
    gone: dict[int, list[int]] = {}
    for storage, op in enumerate(c.storage_free.tolist()):
        gone.setdefault(op, []).append(storage)
    rows = []
    names = memory.names
    for op, number in enumerate(c.op_signature.tolist()):
        row = []
        signature = program.signatures[number]
        code = memory.touch(-1 - names.setdefault(signature.name, len(names)), CODE_BYTES)
        sizes = touched(op, signature)
        for size, storage in zip(sizes, _list_storages(program, op), strict=True):
            key = int(keys[storage])
            if c.storage_alloc[storage] == op and key not in memory.touched:
                memory.allocate(key, int(nbytes[storage]))
            # an expanded tensor has fewer bytes than elements; a sparse gradient that was emptied grows in place, and
            # its storages are known as they were made: empty
            used = int(min(size, nbytes[storage] or size))
            row.append(Operand(used, memory.touch(key, used)))
        rows.append(Found(tuple(row), code))
        for storage in gone.get(op, ()):
            memory.release(int(keys[storage]), int(nbytes[storage]))
    return rows


def _list_storages(program: Program, op: int) -> list[int]:
    """The storages of an op's inputs and outputs."""
    c = program.columns
    read = c.input_tensor[c.input_ptr[op] : c.input_ptr[op + 1]]
    made = c.output_tensor[c.output_ptr[op] : c.output_ptr[op + 1]]
    return [int(c.tensor_storage[tensor]) for tensor in (*read.tolist(), *made.tolist())]


def split_by_level(operands: Iterable[Operand], l2: float, l3: float) -> FloatArray:
    """Bytes that come from the L2 cache, from the L3 and from memory: float64[3].

    An operand is where its distance and its own size together say.
    """
    levels = np.zeros(3)
    for operand in operands:
        reach = operand.distance + operand.nbytes
        inner, outer = _count_held_bytes(reach, l2), _count_held_bytes(reach, l3)
        levels += operand.nbytes * np.array([inner, max(outer - inner, 0.0), 1 - max(outer, inner)])
    return levels


def _count_held_bytes(reach: float, capacity: float) -> float:
    """The share of data last touched this many bytes ago that a cache still holds: what comes in takes the place of
    anything in it, so less and less remains. (Had the oldest to go first, all would stay up to the capacity and none
    beyond; samples show no such step.)"""
    return exp(-reach / capacity)
