"""docs/extend/add-an-op.md, carried out: its lowering is written, and its test passes."""

from __future__ import annotations

from tests.docs.pages import DOCS, run_page


def test_the_page_runs_as_it_stands(tmp_path):
    assert run_page(DOCS / "extend" / "add-an-op.md", tmp_path) == 1
