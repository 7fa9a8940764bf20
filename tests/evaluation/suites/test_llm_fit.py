"""Constants fitted anew: numbers that made steps are found again from half of them, the same way every time."""

from __future__ import annotations

import importlib.util
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from traincast.costs.in_step import SHIPPED, load_shipped_tables, make_in_step
from traincast.models.transformers.reading import make_transformer
from traincast.simulator.parallelism.layout import Layout
from traincast.simulator.parallelism.predict import estimate_seconds
from traincast_evaluation.suites.cases import Case
from traincast_evaluation.suites.llm_fit import (
    ConstantsFit,
    LinearFit,
    compute_half_errors,
    compute_log_error,
    list_predictable,
)
from traincast_evaluation.suites.training_request import TrainingRequest

SMALL = make_transformer(
    "small", {"layers": 2, "hidden": 2048, "heads": 16, "ffn": 8192, "vocab": 32000, "seq_len": 2048}
)
TRUTH = replace(SHIPPED, sustained={**SHIPPED.sustained, "hopper 16": 1.7}, stall_us=160.0)


def question(tp: int, micro: int) -> TrainingRequest:
    return TrainingRequest(model=SMALL, on="dgx-h100", layout=Layout(gpus=8, tp=tp, micro_batch=micro))


def measured(asked: TrainingRequest) -> float:
    return 1e3 * estimate_seconds(SMALL, asked.platform(), asked.layout, in_step=TRUTH)


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    asked = [(question(tp, micro), micro) for tp in (1, 4) for micro in (4, 8, 16)]
    return [
        Case(name=str(i), group="made, tier A", question=one, measured_ms=measured(one), fitted=micro != 8)
        for i, (one, micro) in enumerate(asked)
    ]


def test_numbers_that_made_the_steps_are_found_again(cases) -> None:
    fit = ConstantsFit(cases, SHIPPED, ("hopper 16", "stall_us", "rowwise"))
    after = fit.run(rounds=4)
    assert after.sustained["hopper 16"] == pytest.approx(1.7, rel=0.02)
    assert after.stall_us == pytest.approx(160.0, rel=0.2)
    assert after.rowwise == SHIPPED.rowwise  # nothing depends on it
    assert fit._touched["rowwise"] == []
    (row,) = compute_half_errors(cases, SHIPPED, after)
    assert row.source == "made" and row.fitted_after < 1.0 < row.fitted_before
    assert row.held_after < 1.0 < row.held_before
    assert ConstantsFit(cases, SHIPPED, ("hopper 16", "stall_us", "rowwise")).run(rounds=4) == after


def test_only_the_fitted_half_is_looked_at(cases) -> None:
    spoiled = [case if case.fitted else replace(case, measured_ms=99 * case.measured_ms) for case in cases]
    plain, same = (ConstantsFit(some, SHIPPED, ("hopper 16",)).run(rounds=1) for some in (cases, spoiled))
    assert plain == same


def test_a_group_left_out_is_told_by_the_others_only(cases) -> None:
    fit = LinearFit(cases, SHIPPED, ("hopper 16", "rowwise"))
    members = [i < 2 for i in range(len(cases))]
    row = fit.leave_out("first", members)
    assert row.steps == 2 and row.own == ()
    assert row.left_out < 0.5 * row.shipped, "the others have the same clock"
    spoiled = [replace(c, measured_ms=9 * c.measured_ms) if left else c for c, left in zip(cases, members, strict=True)]
    told = np.array([True, False])
    shift = [LinearFit(some, SHIPPED, fit.moved)._fit(~np.array(members), told) for some in (cases, spoiled)]
    assert shift[0] == pytest.approx(shift[1])
    alone = LinearFit(cases[:2], SHIPPED, fit.moved).leave_out("all", [True, True])
    assert alone.own == ("hopper 16",), "no other step tells it: kernels run as they do alone"
    assert alone.bias < row.bias


def test_a_number_stays_above_what_can_be() -> None:
    asked = TrainingRequest(model=SMALL, on="dgx-a100", layout=Layout(gpus=1, micro_batch=4, attention="unfused"))
    case = Case(name="x", group="made", question=asked, measured_ms=0.01, fitted=True)
    assert ConstantsFit([case], SHIPPED, ("batched",)).run(rounds=1).batched >= 0.5


def test_cases_that_are_refused_do_not_count(cases) -> None:
    bad = replace(cases[0], question=question(3, 4))
    assert list_predictable([*cases[:2], bad], SHIPPED) == cases[:2]
    assert compute_log_error(cases[0], TRUTH) == 0.0


def test_every_shipped_number_is_named_once_and_read_back() -> None:
    tables = load_shipped_tables()
    assert not set(tables["fitted"]) & set(tables["measured"])
    known = tables["fitted"] | tables["measured"]
    assert SHIPPED.by_name() == known | {name: known[source] for name, source in tables["carried"].items()}
    assert make_in_step(SHIPPED.by_name()) == SHIPPED
    assert all(math.isfinite(value) and value > 0 for value in SHIPPED.by_name().values())
    assert {"fitted", "measured", "by_hand", "lambda", "watts_per_tflops", "rows"} == set(tables["provenance"])


def test_the_script_writes_all_that_the_shipped_file_says() -> None:
    path = Path(__file__).parents[3] / "scripts" / "fit_training_constants.py"
    spec = importlib.util.spec_from_file_location("fit_training_constants", path)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)

    rows = load_shipped_tables()["provenance"]["rows"]
    assert script.table_text(SHIPPED, rows) == script.FILE.read_text(encoding="utf-8")
