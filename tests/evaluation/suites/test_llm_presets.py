"""Settings that a release leaves out come from the nearest one that names them."""

from __future__ import annotations

from traincast_evaluation.suites.llm_presets import fill_from_presets
from traincast_evaluation.suites.published import Row

_COLUMNS = ("set", "model", "device", "gpus", "tp", "pp", "cp", "ep", "micro_batch", "seq_len", "precision", "compile",
            "activation_checkpointing", "notes", "software", "config_path")  # fmt: skip
NAMED = "models/x.py; scripts/performance/configs/x.py@v1"


def rows(*cells: dict[str, str]) -> list[Row]:
    shared = dict.fromkeys(_COLUMNS, "1") | {"model": "M", "config_path": "models/x.py", "compile": "no", "notes": ""}
    return [Row("t.csv", number, {**shared, **some}) for number, some in enumerate(cells, start=1)]


def released(version: str, **cells: str) -> dict[str, str]:
    return {"software": f"NeMo container 26 (Megatron-Bridge v{version})", **cells}


def test_the_nearest_release_of_the_same_layout_decides() -> None:
    filled = fill_from_presets(
        rows(
            released("0.6.0"),
            released("0.5.1", config_path=NAMED, compile="graphs", notes="late"),
            released("0.3.0", config_path=NAMED, compile="early", notes="early"),
        )
    )
    assert (filled[1]["compile"], filled[1]["notes"]) == ("graphs", "late")
    assert filled[1]["software"].endswith("v0.6.0)")  # nothing else is taken
    assert filled[3]["compile"] == "early"


def test_of_two_as_near_the_earlier_one_decides() -> None:
    table = rows(
        released("0.4.1"),
        released("0.4.2", config_path=NAMED, compile="after"),
        released("0.4.0", config_path=NAMED, compile="before"),
    )
    assert fill_from_presets(table)[1]["compile"] == "before"


def test_another_layout_helps_only_where_none_is_the_same() -> None:
    other = released("0.5.0", config_path=NAMED, compile="other layout", ep="64", precision="MXFP8")
    wide = released("0.5.0", config_path=NAMED, compile="16 bits", ep="32", precision="BF16")
    same = released("0.2.0", config_path=NAMED, compile="same layout", precision="MXFP8")
    asked = released("0.5.0", precision="MXFP8")
    assert fill_from_presets(rows(asked, other, wide, same))[1]["compile"] == "same layout"
    assert fill_from_presets(rows(asked, other, wide))[1]["compile"] == "other layout"
    assert fill_from_presets(rows(asked, wide))[1]["compile"] == "16 bits"
    assert fill_from_presets(rows({**asked, "model": "M (w/o MTP)"}, wide))[1]["compile"] == "16 bits"


def test_rows_without_a_release_or_a_like_stay_as_they_are() -> None:
    table = rows({"software": "Composer"}, released("0.5.0", device="X"), released("0.5.0", config_path=NAMED))
    filled = fill_from_presets(table)
    assert filled[1] is table[0] and filled[2] is table[1] and filled[3] is table[2]
