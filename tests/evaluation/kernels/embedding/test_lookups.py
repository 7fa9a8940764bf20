"""Whole lookups: which are held back, what they are made of, and what a fit learns from them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from traincast.costs.kernels.embedding.model import WATCHES, Watches
from traincast.costs.kernels.embedding.physics import Rates, guess_longest_bag, make_fill_call, make_uniform_tables
from traincast.costs.kernels.registry import Control, ControlKind
from traincast.hardware import load_device
from traincast.utils.errors import TraincastError
from traincast_evaluation.kernels.embedding.fit import FITTED_TO_WHOLE, fit_rates_to_whole
from traincast_evaluation.kernels.embedding.lookups import (
    ATEN_FILE,
    FBGEMM_FILE,
    FOLDER,
    UGACHE_FILE,
    WholeLookup,
    WholeLookups,
    is_held_back,
    read_whole_lookups,
    uses_links,
)

H100 = load_device("h100")


def tables(host=0, lookups=200_000, rows=50_000_000, dim=128):
    given = make_uniform_tables(
        batch=lookups, lookups=lookups, rows=(rows,), dims=(dim,), index_bytes=8, row_item_bytes=4
    )  # fmt: skip
    return replace(given, host=host)


def whole(*items, **fields):
    given = {"device": H100, "items": items, "seconds": 1e-3, "held_out": False, "group": "g", "name": "n"}
    return WholeLookup(**(given | fields))


def test_a_third_of_the_configurations_is_held_back_and_always_the_same():
    held = [is_held_back((device, rows, None)) for device in ("a", "b") for rows in range(3000)]
    assert 0.3 < np.mean(held) < 0.37
    assert is_held_back(("a", 1.05, None)) == is_held_back(("a", 1.05, float("nan")))
    assert [is_held_back(("a", number)) for number in range(12)] == [
        is_held_back(["a", number]) for number in range(12)
    ]


def test_what_was_held_back_before_the_fit_is_so_today(shared_data):
    """Rows of one configuration fall together; the numbers are those of the day the split was made."""
    rows = read_whole_lookups(shared_data)
    counts = {}
    for row in rows:
        source = row.group.split()[0]
        held, seen = counts.get(source, (0, 0))
        counts[source] = (held + row.held_out, seen + (not row.held_out))
    assert counts == {"FBGEMM": (33, 94), "UGache": (67, 80), "ATen": (16, 16)}
    sides = {}
    for row in rows:
        sides.setdefault((row.group, row.name, row.items), set()).add(row.held_out)
    assert all(len(side) == 1 for (group, _, _), side in sides.items() if "cached" not in group)


def test_launches_follow_each_other_and_those_beside_run_at_the_same_time():
    near, far = tables().call("row_gather"), tables(host=1).call("row_gather")
    one, both, beside, two = WholeLookups(
        [whole(near), whole(far), whole(near, beside=(far,)), whole(near, Control(ControlKind.EVENT_RECORD), far)]
    ).seconds(Rates(), Watches())
    assert one < both
    assert beside == both
    assert two == pytest.approx(one + both)


def test_a_stopwatch_adds_what_its_kind_adds():
    watches = Watches(training=1e-3, inference=2e-3, gradient=3e-3)
    lookup = tables().call("tbe_forward")
    seconds = WholeLookups([whole(lookup, watch=word) for word in WATCHES]).seconds(Rates(), watches)
    assert seconds - seconds[0] == pytest.approx([0.0, 1e-3, 2e-3, 3e-3])
    known = WholeLookups([whole(lookup, known_seconds=5e-4)]).seconds(Rates(), watches)
    assert known[0] == pytest.approx(seconds[0] + 5e-4)


def test_what_crosses_a_link_is_told_from_what_stays():
    assert not uses_links(whole(tables().call("tbe_forward")))
    assert uses_links(whole(tables(host=3).call("row_gather")))
    assert uses_links(whole(beside=(tables(host=1).call("row_gather"),)))
    assert uses_links(whole(make_fill_call(100.0, 0.0)))


def test_a_fit_to_whole_lookups_finds_the_rates_that_made_them():
    true = Rates(
        select_seconds=1e-6, select_dram_seconds=3e-7, gather_share=0.7, host_read_share=0.8, host_update_share=0.6,
        peer_share=0.5, fused_write_share=0.25, gradient_write_share=0.1, fill_cycles=400.0,
    )  # fmt: skip
    watches = Watches(training=3e-4, inference=5e-4, gradient=2e-4)
    kinds = [
        ("lookup_forward", 0, 1000), ("lookup_forward", 0, 1 << 30), ("row_gather", 0, 1 << 30),
        ("tbe_forward", 1, 1 << 30), ("tbe_backward_adam", 1, 1 << 30), ("row_gather", 3, 1 << 30),
        ("tbe_backward_sgd", 0, 1 << 30),
        ("lookup_backward_dense", 0, 1 << 30),
    ]  # fmt: skip
    calls = [tables(host, size, rows).call(kind) for kind, host, rows in kinds for size in (400_000, 4_000_000)]
    lookups = [whole(call) for call in (*calls, make_fill_call(1e6, 0.0), make_fill_call(1e6, 1e8))]
    lookups += [whole(calls[4], watch=word) for word in WATCHES]
    made = WholeLookups(lookups).seconds(true, watches)
    lookups = [replace(lookup, seconds=float(seconds)) for lookup, seconds in zip(lookups, made, strict=True)]
    rates, added = fit_rates_to_whole(WholeLookups(lookups), Rates())
    for name in FITTED_TO_WHOLE:
        assert getattr(rates, name) == pytest.approx(getattr(true, name), rel=0.05), name
    assert added.inference == pytest.approx(watches.inference, rel=0.05)
    assert rates.read_share == Rates().read_share, "told by kernels alone"


@pytest.mark.parametrize(
    ("batch", "count", "lookups", "longest"),
    [
        (128, 3, 128 * 104, 104.0),  # every sample makes 104: no bag has more
        (128, 3, 128 * 3, 1.0),
        (128, 3, 0, 0.0),
        (8192, 1, 61_072, 7.455 * (np.log(8192) + 0.5772)),
        (8192, 122, 15_807_216, 15.816 * (np.log(8192 * 122) + 0.5772)),
    ],
)
def test_bags_of_unknown_lengths_are_as_uneven_as_an_exponential_law(batch, count, lookups, longest):
    assert guess_longest_bag(batch, count, lookups) == pytest.approx(longest, rel=1e-3)


def test_an_exponential_law_has_such_a_longest_bag():
    draws = np.random.default_rng(3).exponential(7.455, size=(200, 8192)).max(axis=1)
    assert guess_longest_bag(8192, 1, 61_072) == pytest.approx(draws.mean(), rel=0.02)


def test_a_folder_without_the_tables_is_named(tmp_path):
    (tmp_path / FOLDER).mkdir()
    with pytest.raises(TraincastError, match=f"measurements '{FBGEMM_FILE}' are not under"):
        read_whole_lookups(tmp_path)


@pytest.mark.parametrize("file", [FBGEMM_FILE, UGACHE_FILE, ATEN_FILE])
def test_a_time_that_is_none_is_named_by_file_row_and_column(shared_data, tmp_path, file):
    (tmp_path / FOLDER).mkdir()
    for name in (FBGEMM_FILE, UGACHE_FILE, ATEN_FILE):
        text = (shared_data / name).read_text(encoding="utf-8")
        if name == file:
            lines = text.splitlines()
            at = lines[0].split(",").index("latency_us")
            lines[1] = _replaced(lines[1], at, "-5")
            text = "\n".join(lines) + "\n"
        (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(TraincastError, match=f"'{file}', row 0, column 'latency_us': -5.0 is not a positive number"):
        read_whole_lookups(tmp_path)


def _replaced(line, at, value):
    import csv
    import io

    cells = next(csv.reader([line]))
    cells[at] = value
    out = io.StringIO()
    csv.writer(out).writerow(cells)
    return out.getvalue().strip()
