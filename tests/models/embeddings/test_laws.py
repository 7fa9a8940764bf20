"""Laws of access that benchmarks name by their `alpha`: against row by row sums, and against published counts."""

from __future__ import annotations

import numpy as np
import pytest

from traincast.models.embeddings.access import Folded, Power, Zipf, format_access, make_row_classes, parse_access
from traincast.models.embeddings.reuse import RowClasses
from traincast.utils.errors import TraincastError


@pytest.mark.parametrize("exponent", [0.0, 1.0, 1.05, 1.4])
@pytest.mark.parametrize("rows", [1, 300, 50_000])
def test_a_power_law_rounded_down_equals_the_sum_over_single_rows(exponent, rows):
    edges = np.arange(1, rows + 2, dtype=np.float64)
    whole = np.log(edges) if exponent == 1.0 else edges ** (1.0 - exponent) / (1.0 - exponent)
    single = RowClasses.from_weights(np.ones(rows), np.diff(whole))
    classes = Power(exponent).make_classes(rows)
    assert classes.rows.sum() == rows
    for lookups in (10, 20_000):
        assert classes.count_unique_rows(lookups) == pytest.approx(single.count_unique_rows(lookups), rel=2e-4)


@pytest.mark.parametrize(
    ("rows", "lookups", "tables", "counted"),
    [
        (16_777_216, 1_048_576, 1, 293_987),
        (25_165_824, 1_048_576, 1, 306_290),
        (268_435_456, 1_048_576, 1, 366_968),
        (1_677_721, 104_857, 10, 350_280),
        (26_843_545, 104_857, 10, 433_723),
    ],
)
def test_the_power_law_gives_the_different_rows_that_nvidia_counted(rows, lookups, tables, counted):
    """`num_unique` of the dynamicemb benchmark at alpha 1.05; Zipf's law of the same exponent gives fewer."""
    assert tables * make_row_classes(Power(1.05), rows).count_unique_rows(lookups) == pytest.approx(counted, rel=1e-4)
    assert tables * make_row_classes(Zipf(1.05), rows).count_unique_rows(lookups) < 0.97 * counted


def test_a_folded_law_is_an_endless_one_counted_modulo_the_height():
    rows, exponent = 100, 1.5
    ranks = np.arange(1, 2_000_001, dtype=np.float64)
    weight = (ranks**-exponent).reshape(-1, rows).sum(axis=0)
    weight += 2.0 * 2_000_000.5**-0.5 / rows  # the integral of what is left
    single = RowClasses.from_weights(np.ones(rows), weight)
    classes = Folded(exponent).make_classes(rows)
    for lookups in (20, 200, 2000):
        assert classes.count_unique_rows(lookups) == pytest.approx(single.count_unique_rows(lookups), rel=2e-2)


@pytest.mark.parametrize("text", ["uniform", "zipf:1.05", "power:1.05", "folded:1.15"])
def test_laws_are_read_as_they_are_written(text):
    assert format_access(parse_access(text)) == text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("power:-1", "power law exponent -1; give a number from 0 to 10"),
        ("folded:1", "folded Zipf exponent 1; give a number from 1.001 to 10"),
        ("power:much", "access 'power:much'; give 'uniform' or 'zipf:EXPONENT', such as zipf:1.05"),
    ],
)
def test_exponents_that_make_no_law_are_refused(text, words):
    with pytest.raises(TraincastError) as caught:
        parse_access(text)
    assert str(caught.value) == words
