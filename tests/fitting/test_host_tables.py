"""The published overhead tables: what is refused, by file, row and column."""

from __future__ import annotations

import pytest

from traincast.errors import TraincastError
from traincast.fitting.host import fit_host

NEWER = "type,op,model,batch,mean_us,count\n"
GOOD = "T2,aten::add,DLRM_default,512,10.5,40\n"


def refusal(folder, text):
    (folder / "overheads").mkdir()
    path = folder / "overheads" / "t1_t2_by_op_model.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    out = folder / "out"
    out.mkdir()
    with pytest.raises(TraincastError) as caught:
        fit_host(folder, out, lambda step, share: None)
    assert list(out.iterdir()) == []
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("row", "column", "value"),
    [
        ("T2,aten::add,DLRM_default,512,-3,40", "mean_us", "'-3'"),
        ("T2,aten::add,DLRM_default,512,nan,40", "mean_us", "'nan'"),
        ("T2,aten::add,DLRM_default,512,,40", "mean_us", "''"),
        ("T2,aten::add,DLRM_default,512,12us,40", "mean_us", "'12us'"),
        ("T2,aten::add,DLRM_default,0,10,40", "batch", "'0'"),
        ("T2,aten::add,DLRM_default,512,10,4.5", "count", "'4.5'"),
        ("T9,aten::add,DLRM_default,512,10,40", "type", "'T9'"),
        ("T2,aten::add", "model", "ends"),
    ],
)
def test_a_bad_value_is_named_by_file_row_and_column(tmp_path, row, column, value):
    message = refusal(tmp_path, NEWER + GOOD + row + "\n")
    assert f"'t1_t2_by_op_model.csv', row 1, column '{column}'" in message
    assert value in message


@pytest.mark.parametrize(
    ("text", "word"),
    [(NEWER, "no rows"), ("type,op\nT2,aten::add\n", "'model'"), ("", "'type'"), (b"\xff\xfe\x00", "cannot read")],
)
def test_a_table_that_is_none(tmp_path, text, word):
    message = refusal(tmp_path, text)
    assert "t1_t2_by_op_model.csv" in message
    assert word in message
