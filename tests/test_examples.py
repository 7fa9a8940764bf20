"""With the profile `ci`, Hypothesis tries the same examples whatever a process has imported before."""

from __future__ import annotations

import importlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st


def drawn():
    """Examples as a test would get them."""
    seen = []

    @settings(settings(), max_examples=50, database=None)
    @given(st.lists(st.integers(), min_size=20, max_size=20))
    def see(numbers):
        seen.append(numbers)

    see()
    return seen


def test_examples_do_not_depend_on_what_was_imported(tmp_path, monkeypatch):
    if not settings().derandomize:
        pytest.skip("a plain run tries new examples each time")
    before = drawn()
    (tmp_path / "imported_elsewhere.py").write_text("NUMBERS = 987654321, 876543219, 765432198\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("imported_elsewhere")

    assert drawn() == before
    assert len(before) == 50
