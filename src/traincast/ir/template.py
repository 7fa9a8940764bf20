"""Programs that were written alike: those that differ in sizes only share everything else."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from traincast.ir.builder import ProgramBuilder
from traincast.ir.ops import Scalar, Signature
from traincast.ir.program import Program
from traincast.ir.sizes import SizeTable
from traincast.ir.symbolic import with_plain_sizes, with_size_indices
from traincast.utils.arrays import IntArray


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
        """Takes the sizes of an op."""
        taken = self._taken
        for spec in (*signature.inputs, *signature.outputs):
            taken += spec.shape
            taken += spec.stride
        for _, value in signature.scalars:
            _take(value, taken)
        self._ops += 1
        return self._ops - 1

    def build(self) -> Program:
        """The template with the sizes taken."""
        if len(self._taken) != len(self._template.sizes) or self._ops != self._template.num_ops:
            raise AssertionError("this program is not written like its template")
        return replace(self._template, sizes=SizeTable.constant(np.array(self._taken, dtype=np.int64)))


def _take(value: Scalar, taken: list[int]) -> None:
    if isinstance(value, tuple):
        for item in value:
            _take(item, taken)
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
        template = _renumbered(programs[members[0]], place.reshape(-1))
        for row, index in enumerate(members):
            result[index] = replace(template, sizes=SizeTable.constant(np.ascontiguousarray(distinct[row])))
    return result


def _renumbered(program: Program, place: IntArray) -> Program:
    """The program with its sizes at other numbers, and signatures that became equal made one."""
    numbers = place.tolist()
    distinct: dict[Signature, int] = {}
    which = [
        distinct.setdefault(with_size_indices(plain, _same), len(distinct))
        for plain in with_plain_sizes(program.symbolic, numbers)
    ]
    columns = replace(
        program.columns,
        op_signature=np.array(which, dtype=np.int32)[program.columns.op_signature],
        storage_bytes=place[program.columns.storage_bytes].astype(np.int32),
    )
    return replace(program, columns=columns, symbolic=tuple(distinct))


def _same(number: int) -> int:
    return number
