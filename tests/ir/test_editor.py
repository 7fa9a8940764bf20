"""Programs as rows and back."""

from __future__ import annotations

import numpy as np
import pytest

import traincast
from traincast.ir.editor import ProgramEditor
from traincast.ir.program import Columns, peak_memory
from traincast.ir.validate import validate


@pytest.mark.parametrize("model", ["dlrm-default", "din", "vgg13"])
def test_a_program_that_is_not_changed_stays_as_it_is(model):
    program = traincast.load(model).programs[0]
    again = ProgramEditor(program).build()
    same = {name for name in Columns.names()
            if np.array_equal(getattr(again.columns, name), getattr(program.columns, name))}  # fmt: skip
    assert set(Columns.names()) - same <= {"op_signature", "scope_name"}  # numbered anew
    assert [s.name for s in again.scopes] == [s.name for s in program.scopes]
    assert peak_memory(again) == peak_memory(program)


def test_ops_that_are_dropped_take_their_scopes_and_memory_with_them():
    program = traincast.load("dlrm-default").programs[0]
    rows = ProgramEditor(program)
    rows.drop_ops({op for op in rows.ops if op.signature.name == "aten::zero_"})
    again = rows.build()
    validate(again)
    assert again.num_ops < program.num_ops
    assert "aten::zero_" not in {s.name for s in again.symbolic}
