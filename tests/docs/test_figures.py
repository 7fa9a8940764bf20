"""Figures of README and the evidence are those of the suites; scripts/write_figures.py writes them."""

from __future__ import annotations

import runpy

import pytest

from tests.docs.pages import ROOT

FAST = ("dlrm", "cnn", "transformers", "distributed-embeddings", "multi-gpu")
SLOW = {"captured", "llm"}
"""Suites that take a minute and more: left to the script."""


@pytest.fixture
def script():
    return runpy.run_path(str(ROOT / "scripts" / "write_figures.py"))


@pytest.mark.parametrize("suite", FAST)
def test_pages_show_what_a_suite_gives(suite, script, shared_data):
    from traincast_evaluation.suites.registry import evaluate

    result = evaluate(suite, shared_data).to_dict()

    for name, suites in script["ROWS"].items():
        text = (ROOT / name).read_text(encoding="utf-8")
        if suite in suites:
            assert script["page_with_figures"](text, suites[suite], result) == text, "run scripts/write_figures.py"


def test_every_suite_is_compared_or_left_to_the_script(script):
    shown = {suite for suites in script["ROWS"].values() for suite in suites}

    assert shown - SLOW == set(FAST)


def test_cells_follow_from_the_titles_of_their_columns(script):
    head = ["| what | n | GMAE | worst | others |", "|---|---|---|---|---|"]
    page = "\n".join([*head, "| steps | 1 | 9 | 9 | 7.1 |", "| rest | 2 | 3 | 4 | |"])
    row = {"group": "all", "n": 12, "gmae": 4.359, "worst": 20.54}

    filled = script["page_with_figures"](page, {"steps": "all"}, {"summary": [row]})

    assert filled.splitlines() == [*head, "| steps | 12 | 4.36 | +20.5 | 7.1 |", "| rest | 2 | 3 | 4 | |"]


def test_a_row_that_no_page_has_is_named(script):
    with pytest.raises(SystemExit, match="no row of the page begins with"):
        script["page_with_figures"]("# Page", {"steps": "all"}, {"summary": [{"group": "all"}]})
