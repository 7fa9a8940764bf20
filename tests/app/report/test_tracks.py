"""Slices on tracks as Perfetto wants them; times are microseconds."""

from __future__ import annotations

from traincast.app.report.chrome import untangle_slices


def piece(start, length, tid=7, category="kernel"):
    return {"ph": "X", "pid": 1, "tid": tid, "name": "k", "cat": category, "ts": start, "dur": length}


def slices(*events):
    return [(e["tid"], e["ts"], e["dur"]) for e in untangle_slices(list(events)) if e["ph"] == "X"]


def test_slices_that_touch_stay_as_they_are():
    assert slices(piece(0.1, 0.2), piece(0.3, 0.4)) == [(7, 0.1, 0.2), (7, 0.3, 0.4)]


def test_a_nanosecond_of_overlap_is_rounding():
    assert slices(piece(0.0, 0.301), piece(0.3, 0.4)) == [(7, 0.0, 0.301), (7, 0.301, 0.399)]


def test_what_overlaps_in_part_goes_to_a_track_beside():
    assert slices(piece(0.0, 2.0), piece(1.0, 2.0), piece(2.5, 1.0)) == [
        (7, 0.0, 2.0),
        (100_007, 1.0, 2.0),
        (7, 2.5, 1.0),
    ]


def test_what_lies_inside_of_another_is_nested():
    assert slices(piece(0.0, 5.0), piece(1.0, 2.0), piece(3.0, 2.0)) == [(7, 0.0, 5.0), (7, 1.0, 2.0), (7, 3.0, 2.0)]


def test_every_track_has_a_name():
    events = untangle_slices([piece(0, 2), piece(1, 2), piece(0, 1, 3, "op"), piece(0, 1, 1000, "step")])

    names = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M"}
    assert names == {7: "stream 7", 100_007: "stream 7, alongside", 3: "thread 3", 1000: "steps"}
