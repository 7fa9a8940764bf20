"""Any answer as a file, through Python and the command line."""

from __future__ import annotations

import json

import pytest

import traincast
from traincast.app.cli.main import main
from traincast.app.pages import writing as written
from traincast.app.pages.parts import is_trace
from traincast.utils.errors import TraincastError


def test_the_command_line_writes_one_file_and_says_what_is_in_it(tmp_path, capsys):
    out = tmp_path / "r.html"

    assert main(["report", "dlrm-ddp", "--on", "v100", "--batch-size", "64", "-o", str(out), "--json"]) == 0

    document = json.loads(capsys.readouterr().out)
    assert document["bytes"] == len(out.read_bytes()) < 5e6
    assert document["sections"][:3] == ["answer", "why", "timeline"]
    assert out.read_text(encoding="utf-8").startswith("<!doctype html>")


def test_a_trace_is_told_from_a_model(tmp_path, capsys):
    out = tmp_path / "r.html"

    assert main(["report", "docs/tutorial/example-trace.json", "-o", str(out)]) == 0

    assert capsys.readouterr().out.startswith("Traced steps of example-trace\nwrote ")


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("trace.json", '{"traceEvents": []}', True),
        ("config.json", '{"architectures": ["LlamaForCausalLM"], "hidden_size": 64}', False),
        ("dlrm.yaml", "tables: []", False),
        ("step.tc", "x", False),
    ],
)
def test_what_a_file_is_shows_in_its_name_and_first_lines(tmp_path, name, text, expected):
    path = tmp_path / name
    path.write_text(text)

    assert is_trace(str(path)) is expected
    assert is_trace(str(tmp_path)) is True


@pytest.mark.parametrize("name", ["dlrm-default", "no/such/trace.json", "a\0b.json", ""])
def test_what_is_no_file_is_no_trace(name):
    assert is_trace(name) is False


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["dlrm-ddp"], "--on is missing: name the GPU or node to predict the step on"),
        (["dlrm-ddp", "resnet50", "--on", "v100"], "several SOURCES are for traces, and not all of these are; "),
        (["dlrm-ddp", "--on", "v100", "--price", "-1"], "--price -1: give dollars of one GPU for an hour, 0 or more"),
        (["dlrm-ddp", "--on", "v100", "--price", "nan"], "--price nan: give dollars of one GPU for an hour"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(arguments, said, tmp_path, capsys):
    assert main(["report", *arguments, "-o", str(tmp_path / "r.html")]) == 2

    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_an_answer_without_a_page_of_its_own_is_shown_as_tables(tmp_path):
    page = traincast.write_report(traincast.list_platforms(), tmp_path / "p.html")

    assert page.sections == ("answer", "provenance")
    assert "NVIDIA H100" in (tmp_path / "p.html").read_text(encoding="utf-8")


def test_a_report_that_is_too_large_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(written, "MOST_BYTES", 1000)

    with pytest.raises(TraincastError, match=r"more than 0; give fewer GPUs or a shorter trace"):
        traincast.write_report(traincast.list_platforms(), tmp_path / "p.html")

    assert list(tmp_path.iterdir()) == []
