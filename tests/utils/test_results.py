"""What every result can do, shown by two small ones."""

from __future__ import annotations

import builtins
from dataclasses import dataclass

import pytest

from traincast.utils.errors import TraincastError
from traincast.utils.results import Result, ResultList, drop_nested_values


@dataclass(frozen=True, repr=False)
class Durations(Result):
    names: tuple[str, ...]
    text: str = "two kernels"

    def to_dict(self):
        return {"names": list(self.names)}

    def headline(self):
        return self.text

    def records(self):
        rows = [{"name": name, "ms": 1.25, "runs": 3, "note": None, "warm": True} for name in self.names]
        return {"kernels": rows, "none": []}


class Names(ResultList[str]):
    def headline(self):
        return f"{len(self)} names"


def test_repr_is_the_name_of_the_class_and_the_headline():
    assert repr(Durations(("gemm",))) == "Durations: two kernels"


def test_repr_stays_short():
    many = "\n".join(f"line {number}" for number in range(40))

    lines = repr(Durations((), many)).splitlines()

    assert len(lines) == 11
    assert lines[0] == "Durations: line 0"
    assert lines[-1] == "... 30 lines more"


def test_frames_are_the_tables_with_rows():
    frames = Durations(("gemm", "copy")).frames()

    assert list(frames) == ["kernels"]
    assert frames["kernels"].shape == (2, 5)
    assert frames["kernels"]["name"].to_list() == ["gemm", "copy"]


def test_frames_without_polars_say_what_to_install(monkeypatch):
    real = builtins.__import__

    def without_polars(name, *rest):
        if name == "polars":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without_polars)
    with pytest.raises(TraincastError, match=r"pip install 'traincast\[data\]'"):
        Durations(("gemm",)).frames()


def test_html_has_headline_and_tables_escaped():
    html = Durations(("<gemm>",), "a < b")._repr_html_()

    assert html.startswith("<p>Durations: a &lt; b</p>")
    assert "<summary>kernels (1 row)</summary>" in html
    assert "<td>&lt;gemm&gt;</td>" in html
    assert '<td style="text-align:right">1.25</td><td style="text-align:right">3</td><td></td><td>True</td>' in html
    assert "none" not in html


def test_html_shows_the_first_rows_of_many():
    html = Durations(tuple(f"k{number}" for number in range(21)))._repr_html_()

    assert "kernels (21 rows, the first 20 of them here)" in html
    assert "<td>k19</td>" in html
    assert "<td>k20</td>" not in html


def test_html_of_rows_with_different_columns_leaves_cells_empty():
    class Ragged(Durations):
        def records(self):
            return {"rows": [{"a": "x"}, {"b": "y"}]}

    assert "<td>x</td><td></td></tr><tr><td></td><td>y</td>" in Ragged(())._repr_html_()


def test_a_list_of_results_is_a_sequence():
    names = Names(["a", "b", "c"])

    assert (len(names), names[0], names[1:], list(names), "b" in names) == (3, "a", ("b", "c"), ["a", "b", "c"], True)
    assert repr(names) == "Names: 3 names"
    assert names.frames() == {}


@pytest.mark.parametrize("call", [Result.to_dict, Result.headline])
def test_what_a_subclass_must_say_is_refused_without_it(call):
    with pytest.raises(NotImplementedError, match="Result"):
        call(Result())


def test_flat_rows_have_plain_values_only():
    assert drop_nested_values({"a": 1, "b": [2], "c": {"d": 3}, "e": None}) == {"a": 1, "e": None}
