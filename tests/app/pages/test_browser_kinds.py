"""Every other kind of page in a real browser: sections are drawn, nothing complains, nothing leaves the page."""

from __future__ import annotations

import json

import pytest

from tests.browsing import PHONE
from tests.docs.pages import DOCS
from traincast.app.cli.main import main

TABLES = "tables:\n- {name: a, rows: 1000000, dim: 64, pooling: 20}\n- {name: b, rows: 1000, dim: 64, pooling: 5}\n"
TRACE = str(DOCS / "tutorial" / "example-trace.json")
COMMANDS = {
    "scaling": "dlrm-ddp --on dgx1-v100 --gpus 1,2,4",
    "layout": "mpt-125m --on dgx-h100 --gpus 8 --tp 2",
    "plan": "mpt-125m --on dgx-h100 --gpus 2 --of plan",
    "sharding": "tables.yaml --on dgx1-v100 --gpus 2 --of sharding",
    "what-if": "dlrm-ddp --on v100 --apply cuda-graph --price 2",
    "sweep": "sweep.json",
    "evaluation": "evaluation.json",
    "two traces": f"{TRACE} --against {TRACE}",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Tables, and the JSON of a sweep and of an evaluation."""
    place = tmp_path_factory.mktemp("kinds")
    (place / "tables.yaml").write_text(TABLES)
    case = {"device": "V100", "case": "a", "measured_ms": 2.0, "predicted_ms": 2.1, "interval_ms": [1.9, 2.4],
            "covered": True, "error_percent": 5.0}  # fmt: skip
    row = {"suite": "dlrm", "group": "all: step", "n": 1, "gmae": 5.0, "mape": 5.0, "median": 5.0, "worst": 5.0,
           "bias": 5.0, "covered": 100.0, "worst_case": "a", "reference": ""}  # fmt: skip
    (place / "evaluation.json").write_text(json.dumps({"summary": [row], "cases": [case]}))
    return place


@pytest.mark.parametrize("kind", COMMANDS)
def test_sections_are_drawn_and_accessible(browser, kind, folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    if kind == "sweep":
        assert main(["sweep", "dlrm-ddp", "--on", "v100", "--vary", "batch-size=64,128", "--json"]) == 0
        (folder / "sweep.json").write_text(capsys.readouterr().out)
    assert main(["report", *COMMANDS[kind].split(), "-o", f"{kind}.html"]) == 0
    url = (folder / f"{kind}.html").as_uri()
    browser.open(url)

    texts = browser.run("[...document.querySelectorAll('section')].map(s => [s.id, s.innerText.length])")
    assert texts and all(length > 40 for _, length in texts), texts
    assert browser.violations() == []
    browser.open(url, size=PHONE, scheme="dark")
    assert browser.run("document.documentElement.scrollWidth <= window.innerWidth")
    assert browser.violations() == []
    assert browser.complaints() == []
    assert {address for address in browser.requests() if not address.startswith(("data:", "about:"))} == {url}
