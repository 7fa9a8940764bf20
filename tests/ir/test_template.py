"""Programs written alike share everything but sizes."""

from __future__ import annotations

import pytest

from traincast.ir import Program
from traincast.ir.builder import ProgramBuilder, SizesBuilder, share_templates
from traincast.ir.ops import Phase, StorageKind
from traincast.models.layers.builder import StepBuilder


def written(width: int, rows: int, like: Program | None = None, *, twice: bool = False) -> Program:
    target = ProgramBuilder(batch_size=8, by_place=True) if like is None else SizesBuilder(like)
    builder = StepBuilder(8, target=target)
    weight = builder.add_resident_tensor((width, rows), StorageKind.PARAMETER)
    for _ in range(2 if twice else 1):
        builder.open_scope("aten::mm", Phase.FORWARD)
        given = builder.add_tensor((8, width))
        builder.add_op(
            "aten::mm", [("self", given), ("mat2", weight)], [builder.add_tensor((8, rows))], [("sizes", (rows, 3))]
        )
    return builder.build_program()


def test_sizes_alone_give_the_same_program_as_writing_it():
    first = written(16, 100)
    second = written(32, 7, like=first)
    assert second.columns is first.columns and second.symbolic is first.symbolic
    alone = written(32, 7)
    assert [op.signature for op in second.ops] == [op.signature for op in alone.ops]
    assert second.storage_nbytes.tolist() == alone.storage_nbytes.tolist()


def test_shared_templates_keep_every_op():
    first = written(16, 100)
    programs = [first, written(32, 7, like=first), written(8, 8, twice=True)]
    shared = share_templates(programs)
    assert shared[0].columns is shared[1].columns is not shared[2].columns
    for before, after in zip(programs, shared, strict=True):
        assert [op.signature for op in after.ops] == [op.signature for op in before.ops]
        assert after.storage_nbytes.tolist() == before.storage_nbytes.tolist()
    # equal sizes and equal ops are kept once
    assert len(shared[0].sizes) < len(first.sizes)
    assert len(shared[2].symbolic) == 1


def test_another_program_does_not_fit_a_template():
    with pytest.raises(AssertionError, match="not written like its template"):
        written(16, 100, like=written(16, 100), twice=True)
