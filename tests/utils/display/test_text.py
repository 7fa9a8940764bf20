"""Exact rendered text."""

from __future__ import annotations

import pytest

from traincast.utils.display.text import format_bar, format_count, format_milliseconds, format_quantity, format_table


def test_table_aligns_columns():
    assert format_table(("name", "ms"), [("gemm", "12.5"), ("a", "3")], right=(1,)) == "\n".join(
        ["name    ms", "────  ────", "gemm  12.5", "a        3"]
    )


def test_table_without_rows_is_its_header():
    assert format_table(("a", "b"), []) == "a  b\n─  ─"


@pytest.mark.parametrize(
    ("fraction", "drawn"), [(0, ""), (0.5, "█████"), (0.55, "█████▌"), (1, "██████████"), (7, "██████████"), (-1, "")]
)
def test_bar(fraction, drawn):
    assert format_bar(fraction, width=10) == drawn


@pytest.mark.parametrize(
    ("seconds", "text"), [(1.2e-5, "0.012"), (3.456e-3, "3.46"), (0.0999, "99.90"), (0.812, "812"), (12.5, "12,500")]
)
def test_milliseconds(seconds, text):
    assert format_milliseconds(seconds) == text


@pytest.mark.parametrize(("number", "text"), [(12, "12"), (1500, "1.5 k"), (774e6, "774 M"), (1.3e9, "1.3 B")])
def test_count(number, text):
    assert format_count(number) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (43e3, "43 kB"),
        (64.6e9, "64.6 GB"),
        (2.5e12, "2.5 TB"),
        (3e15, "3 PB"),
    ],
)
def test_units_have_the_prefix_of_their_thousands(number, text):
    assert format_quantity(number, "B") == text
