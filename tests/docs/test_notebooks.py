"""The notebooks run, and show what they showed when they were written down."""

from __future__ import annotations

import json
import re
import runpy

import pytest

from tests.docs.pages import DOCS, ROOT

NOTEBOOKS = sorted((DOCS / "notebooks").glob("*.ipynb"))
NUMBER = re.compile(r"-?\d+(?:[.,]\d+)*(?:e-?\d+)?")

REMEDY = "run scripts/run_notebooks.py"


def numbers(texts):
    """Every number of some texts."""
    return [float(found.replace(",", "")) for text in texts for found in NUMBER.findall(text)]


def shown(notebook, kind):
    """What cells show: printed text, or the text of their last expression."""
    texts = []
    for cell in notebook["cells"]:
        for output in cell.get("outputs", ()):
            lines = output["text"] if output["output_type"] == "stream" else output["data"].get(kind, ())
            texts.append("".join(lines))
    return texts


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_shows_what_it_showed(path):
    written = json.loads(path.read_text(encoding="utf-8"))

    again = runpy.run_path(str(ROOT / "scripts" / "run_notebooks.py"))["run"](written)

    before, now = shown(written, "text/plain"), shown(again, "text/plain")
    assert [NUMBER.sub("#", text) for text in now] == [NUMBER.sub("#", text) for text in before], REMEDY
    assert numbers(now) == pytest.approx(numbers(before), rel=0.02, abs=0.1), REMEDY
    assert shown(again, "text/plain")
    html = "".join(shown(again, "text/html"))
    assert "<table>" in html and "<svg" in html and "<script" not in html


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_in_a_kernel_of_jupyter(path):
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel", reason="pip install '.[notebook]' runs the notebooks in a kernel of Jupyter")
    written = nbformat.read(path, as_version=4)
    before = shown(json.loads(path.read_text(encoding="utf-8")), "text/plain")

    nbclient.NotebookClient(
        written, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(DOCS / "tutorial")}}
    ).execute()

    now = shown(json.loads(nbformat.writes(written)), "text/plain")
    plain = [[" ".join(NUMBER.sub("#", text).split()) for text in texts] for texts in (now, before)]
    assert plain[0] == plain[1]  # IPython sets long values in several lines


def test_there_are_two_notebooks_of_the_format_that_jupyter_reads():
    assert [path.stem for path in NOTEBOOKS] == ["explain-a-trace", "size-a-dlrm-job"]
    for path in NOTEBOOKS:
        notebook = json.loads(path.read_text(encoding="utf-8"))
        assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
        assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
