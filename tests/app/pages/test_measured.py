"""The page of a traced run."""

from __future__ import annotations

import json

import pytest

import traincast
from tests.traces.profiler.test_tables import allocation, module
from tests.traces.timelines import event, kernel, launch, op, rank_events, step, write_trace, write_two_ranks
from traincast.app.pages import measured
from traincast.app.pages.measured import make_trace_page
from traincast.app.pages.page import render_page

EVIL = "<script>alert(1)</script>"


@pytest.fixture
def trace_file(tmp_path):
    events = rank_events(300)
    for one in events:
        one["name"] = one["name"].replace("aten::mm", f"aten::mm{EVIL}")
    path = tmp_path / "run.json"
    path.write_text(json.dumps({"traceEvents": events}))
    return path


@pytest.fixture
def page(trace_file):
    return make_trace_page(traincast.trace(trace_file), price=2.0)


def sections(page):
    return {section.key: section for section in page.sections}


def test_sections_come_in_reading_order(page):
    wanted = ["answer", "why", "kernels", "what-if", "timeline", "host", "collectives", "profile", "provenance"]
    assert list(sections(page)) == wanted


def test_the_median_step_stands_first(page):
    # 300 us of work, 10 us before it, 70 us of collective and 5 us after it
    assert page.tiles[0][:2] == ("One step, measured", "0.385 ms")
    assert sections(page)["answer"].html.startswith("<p>0.385 ms per step, held by ")


def test_idle_time_is_given_by_reason(page):
    html = sections(page)["why"].html

    assert "exposed communication" in html
    assert "idle: waiting for the host" in html


def test_names_of_a_stranger_cannot_run(page):
    html = render_page(page)

    assert EVIL not in html
    assert "aten::mm&lt;script&gt;alert(1)&lt;/script&gt;" in html


def test_gains_have_dollars_where_a_price_is_known(trace_file, page):
    assert "$ an hour" in sections(page)["what-if"].html
    assert "No price" in sections(make_trace_page(traincast.trace(trace_file)))["what-if"].html


def test_a_long_trace_shows_its_median_step(trace_file, monkeypatch):
    monkeypatch.setattr(measured, "MOST_SLICES", 2)

    html = sections(make_trace_page(traincast.trace(trace_file)))["timeline"].html

    assert "one step is shown" in html


def test_a_predicted_trace_says_where_it_errs():
    report = traincast.trace("docs/tutorial/example-trace.json", on="v100")

    page = sections(make_trace_page(report))

    tracks = page["timeline"].charts["timeline"]["tracks"]
    assert {track["origin"] for track in tracks} == {"measured", "predicted"}
    assert "Error of every step and its shares" in page["errors"].html
    assert "Predicted on v100" in page["answer"].html


def test_ranks_have_a_row_each(tmp_path):
    for rank, work in enumerate((300, 200)):
        document = {"traceEvents": rank_events(work, wait_us=300 - work), "distributedInfo": {"rank": rank}}
        (tmp_path / f"rank{rank}.json").write_text(json.dumps(document))

    page = make_trace_page(traincast.trace(tmp_path))

    assert page.subtitle.endswith("2 ranks")
    assert sections(page)["ranks"].html.count("<tr>") == 3


def test_the_tables_of_a_profiler_are_there(tmp_path):
    events = step(
        module("Net_0", 10, 200), event("user_annotation", "## forward ##", 10, 200),
        op("aten::mm", 12, 30, [[64, 64], [64, 64]]), launch(1, 20), kernel(1, 30, 20),
        launch(2, 60, name="cudaGraphLaunch"), kernel(2, 70, 30, name="first"), kernel(2, 110, 10, name="second"),
        allocation(15, 1 << 30, 1 << 30),
    )  # fmt: skip

    profile = sections(make_trace_page(traincast.trace(write_trace(tmp_path / "t.json", events))))["profile"]

    for text in ("Kernels with most time", "64x64 64x64", "Net_0", "## forward ##", "begins with first",
                 "Launches: from the call to its kernel", "Device memory"):  # fmt: skip
        assert text in profile.html
    (curve,) = profile.charts["memory"]["series"]
    assert curve["y"] == [pytest.approx(1.0737, abs=1e-4)]


def test_exchanges_have_their_bandwidth_and_what_was_waiting(tmp_path):
    html = sections(make_trace_page(traincast.trace(write_two_ranks(tmp_path))))["collectives"].html

    assert "others waited ms" in html
    assert "rank 1 (1 of 1)" in html
    assert '<td class="n">4,096</td>' in html


def test_a_page_stays_short_however_many_kernels_there_are(tmp_path):
    calls = [(launch(n, 10 * n), kernel(n, 10 * n + 5, 4, name=f"kernel_{n}_{'x' * 3000}")) for n in range(1, 400)]
    events = step(*(one for call in calls for one in call), length=5000)

    html = sections(make_trace_page(traincast.trace(write_trace(tmp_path / "t.json", events))))["profile"].html

    assert "374 more rows in the JSON." in html
    assert len(html) < 20_000
