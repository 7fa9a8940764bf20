"""Pages of curves, layouts, plans, shardings, evaluations and two traces."""

from __future__ import annotations

import json

import pytest

import traincast
from tests.traces.timelines import rank_events
from traincast.app.cli.main import main
from traincast.app.pages.page import render_page
from traincast.app.pages.writing import make_page
from traincast.utils.errors import TraincastError
from traincast.utils.metrics import compute_error_row
from traincast_evaluation.page import read_evaluation_page
from traincast_evaluation.suites.registry import Evaluation

SUMMARY = {"suite": "dlrm", "group": "all", "n": 2, "gmae": 1.0, "mape": 12.5, "median": 3.0, "worst": -20.0,
           "worst_case": "<b>", "bias": 0.5}  # fmt: skip


def sections(page):
    return {section.key: section for section in page.sections}


def test_a_scaling_curve_is_drawn_with_its_interval():
    curve = traincast.scaling("dlrm-ddp", on="dgx1-v100", gpus=[1, 2], batch_size=64)

    page = make_page(curve, 3.0)

    chart = sections(page)["answer"].charts["scaling"]
    low, high, step = (series["y"] for series in chart["series"])
    assert chart["x"] == [1, 2]
    assert all(a < b < c for a, b, c in zip(low, step, high, strict=True))
    assert "$ a million samples" in sections(page)["answer"].html
    assert page.subtitle.endswith("below the curve: 2 GPUs")
    assert list(sections(page))[1:5] == ["why", "timeline", "kernels", "memory"]
    assert [tile.label for tile in page.tiles] == ["One step, 2 GPUs", "Efficiency", "Memory", "Cost"]


@pytest.fixture(scope="module")
def plan():
    return traincast.plan("mpt-125m", on="dgx-h100", gpus=2, global_batch=4)


def test_a_layout_says_what_its_step_waits_for():
    result = traincast.predict("mpt-125m", on="dgx-h100", gpus=2, tp=2)

    page = sections(make_page(result, 2.0))

    assert list(page)[:6] == ["answer", "why", "timeline", "kernels", "memory", "money"]
    assert "exposed: tensor parallel" in page["why"].html
    assert "$" in page["money"].html and "tp 2" in page["answer"].html


def test_a_layout_that_does_not_fit_says_so_at_the_top():
    result = traincast.predict("llama3-70b", on="dgx-h100", gpus=2, tp=2)

    memory = make_page(result).tiles[2]

    assert (memory.label, memory.value, memory.kind) == ("Memory", "Does not fit", "poor")
    assert "of 80 GB needed" in memory.note


def test_whether_it_fits_has_a_page_with_what_would_help():
    fit = traincast.fits("mpt-125m", on="v100", gpus=1, batch_size=64)

    page = make_page(fit)

    assert [tile.label for tile in page.tiles] == ["Memory", "Needed", "Most of it", "Would make it fit"]
    assert page.tiles[0].value == ("Fits" if fit.fits else "Does not fit")
    assert page.tiles[3].value == fit.remedies[0].text
    assert list(sections(page)) == ["answer", "largest", "memory", "provenance"]
    assert sections(page)["answer"].html.count("<tr>") == len(fit.remedies) + 1


def test_a_search_lists_layouts_and_shows_the_best_in_full(plan):
    page = make_page(plan)

    assert list(sections(page))[:3] == ["search", "answer", "why"]
    assert sections(page)["search"].html.count("<tr>") == len(plan.best) + 1
    assert f"{plan.scored} layouts scored" in page.subtitle


def test_a_sharding_shows_every_rank_and_table(tmp_path):
    tables = tmp_path / "tables.yaml"
    tables.write_text("tables:\n- {name: a<b>, rows: 1000, dim: 16}\n- {name: c, rows: 2000, dim: 8}\n")
    result = traincast.shard(tables, on="dgx1-v100", gpus=2, batch_size=64, torchrec=False, time_limit=0.1)

    page = make_page(result)

    assert list(sections(page))[:5] == ["answer", "why", "timeline", "ranks", "tables"]
    assert "a&lt;b&gt;" in sections(page)["tables"].html
    assert sections(page)["ranks"].html.count("<tr>") == 1 + len({one.ranks for one in result.best.prediction.ranks})


def test_an_evaluation_shows_its_error_groups_and_worst_cases(tmp_path, capsys):
    cases = [{"case": f"c{n}", "measured_ms": 10.0, "predicted_ms": 10.0 + n, "others": {}} for n in range(12)]
    path = tmp_path / "dlrm.json"
    path.write_text(json.dumps({"summary": [SUMMARY], "cases": [*cases, {"case": "left out", "measured_ms": None}]}))

    assert main(["report", str(path), "-o", str(tmp_path / "r.html")]) == 0

    assert capsys.readouterr().out.startswith("Accuracy: dlrm\n")
    page = sections(read_evaluation_page(path))
    assert "12.50 % mean absolute error" in page["answer"].html
    assert "&lt;b&gt;" in page["answer"].html
    assert len(page["cases"].charts["cases"]["x"]) == 12
    assert page["cases"].html.index(">c11<") < page["cases"].html.index(">c10<")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"summary": []}', "is no evaluation"),
        ('{"summary": [1]}', "is no evaluation"),
        ("[1]", "is no evaluation"),
        ('{"summary": [{"n": 1}]}', "a row of `summary` needs numbers n, gmae"),
    ],
)
def test_what_is_no_evaluation_is_refused(tmp_path, text, said):
    path = tmp_path / "x.json"
    path.write_text(text)

    with pytest.raises(TraincastError, match=said):
        read_evaluation_page(path)


def test_an_evaluation_in_memory_is_the_same_page():
    row = compute_error_row("here", "all", [1.1], [1.0], ["a"])

    page = make_page(Evaluation(suite="here", summary=(row,), notes=("two steps were left out",)))

    assert page.title == "Accuracy: here"
    assert "two steps were left out" in sections(page)["answer"].html


def traced(tmp_path, name, work):
    path = tmp_path / name
    path.write_text(json.dumps({"traceEvents": rank_events(work)}))
    return path


def test_two_traces_are_compared(tmp_path, capsys):
    before, after = traced(tmp_path, "old.json", 300), traced(tmp_path, "new.json", 200)

    page = make_page(traincast.trace(after), against=traincast.trace(before))
    assert main(["report", str(after), "--against", str(before), "-o", str(tmp_path / "r.html")]) == 0

    assert page.subtitle == "new.json against old.json"
    assert page.tiles[1].note == "0.100 ms shorter" and page.tiles[1].kind == "good"
    assert set(sections(page)["timeline"].charts) == {"timeline-before", "timeline-after"}
    assert render_page(page) == (tmp_path / "r.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["dlrm-ddp", "--on", "v100", "--against", "x.json"], "--against compares traced runs"),
        (["mpt-125m", "--on", "dgx-h100", "--of", "plan", "--gpus", "1,2"], "--gpus takes one number here"),
    ],
)
def test_what_does_not_go_together_is_refused(arguments, said, tmp_path, capsys):
    assert main(["report", *arguments, "-o", str(tmp_path / "r.html")]) == 2

    assert said in capsys.readouterr().err


def test_only_traces_are_compared():
    with pytest.raises(TraincastError, match="`against` compares traced runs; give a trace"):
        make_page(traincast.list_platforms(), against=object())
