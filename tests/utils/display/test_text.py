"""Exact rendered text."""

from __future__ import annotations

import pytest

from traincast.utils.display.text import (
    format_bar,
    format_count,
    format_milliseconds,
    format_quantity,
    format_table,
    use_width,
    wrap_words,
)


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


WIDE = ("plan", "ms", "", "why it takes longer than the first")
ROWS = [("first", "6.42", "██████████████████████", ""), ("second", "12.84", "███████████", "output exchange 3.13 ms")]


def test_a_table_too_wide_for_its_terminal_has_cells_of_several_lines_and_bars_of_the_same_proportion():
    with use_width(44):
        lines = format_table(WIDE, ROWS, right=(1,)).splitlines()

    assert max(map(len, lines)) == 44
    assert lines[0].split() == ["why", "it", "takes"]  # a header stands at the bottom, where its column begins
    first, second = (line.count("█") for line in lines if line.startswith(("first", "second")))
    assert abs(first - 2 * second) <= 1  # to the next character
    assert any(line.endswith("3.13 ms") for line in lines)  # a number keeps its unit
    assert format_table(WIDE, ROWS, right=(1,)).splitlines()[0].endswith("than the first")


def test_columns_that_fit_in_no_line_follow_below_with_the_first_one():
    header = ("rank", *(f"column{number}" for number in range(6)))
    with use_width(30):
        lines = format_table(header, [("rank 0", *("1.5",) * 6)]).splitlines()

    assert max(map(len, lines)) <= 30
    assert sum(line.startswith("rank 0") for line in lines) == 3
    assert [word for line in lines for word in line.split() if word.startswith("column")] == list(header[1:])


def test_a_row_of_one_cell_is_a_heading_of_those_below():
    assert format_table(("a", "b"), [("long heading",), ("1", "2")]) == "a  b\n─  ─\n\nlong heading\n1  2"


def test_words_are_kept_whole_and_numbers_with_their_units():
    assert wrap_words("a step of 90 % or 12 ms", 12) == ["a step of", "90 % or", "12 ms"]
