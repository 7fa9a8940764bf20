"""The page of a prediction says what the prediction says."""

from __future__ import annotations

import re

import pytest

import traincast
from traincast.app.pages.charts import find_roofline_points
from traincast.app.pages.prediction import make_prediction_page
from traincast.utils.display.text import format_dollars


@pytest.fixture(scope="module")
def result():
    return traincast.predict("dlrm-default", on="v100", batch_size=1024, clock_mhz=1297)


@pytest.fixture(scope="module")
def sections(result):
    return {section.key: section for section in make_prediction_page(result, price=3.6).sections}


def test_sections_come_in_reading_order(sections):
    assert list(sections) == ["answer", "why", "timeline", "kernels", "memory", "money", "roofline", "provenance"]


def test_title_names_model_and_device(result):
    page = make_prediction_page(result)

    assert page.title == "dlrm-default (training) on Tesla V100-SXM2-16GB, SM clock locked at 1297 MHz"
    assert page.subtitle == "batch 1024"


def test_the_number_stands_first_with_its_interval_and_evidence(result, sections):
    html = sections["answer"].html

    step, bound, memory, cost = make_prediction_page(result, price=3.6).tiles
    low, high = (f"{1e3 * limit:.2f}" for limit in result.interval)
    assert step == ("One step", f"{1e3 * result.iteration:.2f} ms", f"90 % interval {low} to {high} ms", "")
    assert bound.label == "Bound by" and bound.value.endswith("%")
    assert (memory.value, memory.kind) == ("Fits", "good")
    assert cost.value == format_dollars(1e6 * 1e-3 * result.iteration / 1024)
    assert re.search(r'<p class="verdict (good|fair|poor)">(Measured|(Partly|Mostly) extrapolated)</p>', html)


def test_parts_of_the_step_add_up(result, sections):
    label = re.search(r'aria-label="(One step: [^"]*)"', sections["why"].html)[1]

    shares = [int(share) for share in re.findall(r"(\d+)%", label)]
    assert 99 <= sum(shares) <= 101
    assert "exposed" not in label  # one GPU communicates nothing


def test_the_timeline_has_every_launch_and_the_whole_path(result, sections):
    data = sections["timeline"].charts["timeline"]

    device = [track for track in data["tracks"] if track["side"] == "device"]
    assert sum(len(track["length"]) for track in device) - len(result.timeline.launches) in (0, 1)  # one over the end
    assert data["end"] == pytest.approx(1e9 * result.iteration, rel=1e-6)
    assert sum(part[2] for part in data["path"]) == pytest.approx(1e9 * result.iteration, rel=1e-3)


def test_memory_over_the_step_reaches_the_peak(result, sections):
    chart = sections["memory"].charts["memory"]

    live = next(one for one in reversed(chart["series"]) if one["kind"] == "step")["y"]  # all categories together
    assert max(live) == pytest.approx(result.memory.peak_bytes / 1e9, rel=1e-3)
    assert chart["x"] == sorted(chart["x"])
    assert len(chart["x"]) == len(live)


def test_money_is_price_times_gpus_times_seconds(result, sections):
    # $3.6 an hour is a thousandth of a dollar a second
    assert format_dollars(1e6 * 1e-3 * result.iteration / 1024) in sections["money"].html


def test_without_a_price_no_dollars_are_made_up(result):
    page = make_prediction_page(result)
    html = page.sections[5].html

    assert "$" not in html and page.tiles[3].label == "GPU time"
    assert "No price" in html


def test_roofline_points_are_products_below_the_peak(result):
    points = find_roofline_points(result.timeline)

    products = [point for point in points if point.family == "gemm"]
    assert products
    for point in products:
        assert point.flops / point.seconds < result.platform.device.get_peak_flops("fp32")
    assert {point.family for point in points} >= {"gemm", "embedding", "elementwise"}
    assert "memcpy" not in {point.family for point in points}


def test_roofline_chart_keeps_kernels_where_they_are(result, sections):
    chart = sections["roofline"].charts["roofline"]

    assert chart["x"] == sorted(chart["x"])
    for series in chart["series"]:
        assert len(series["y"]) == len(chart["x"])
    drawn = sum(y is not None for series in chart["series"] if series["kind"] == "points" for y in series["y"])
    points = find_roofline_points(result.timeline)
    longest = [point for point in points if point.flops / point.seconds > 1e9]
    assert len(longest) <= drawn < len(points)  # without those that are launches and little else


def test_provenance_names_tables_rows_profile_and_commit(sections):
    html = sections["provenance"].html

    html = html.replace("<wbr>", "")
    for words in ("kernels/gemm_fp32.parquet", "95,404", "study-2022", "traincast 0.", "sitar-lab/NeuSight"):
        assert words in html


def test_ranks_that_differ_have_a_row_each():
    alike = traincast.predict("dlrm-ddp", on="dgx1-v100", gpus=2, batch_size=64)
    result = traincast.predict("dlrm-v2", on="dgx-a100", gpus=4, batch_size=64)

    html = {section.key: section.html for section in make_prediction_page(result).sections}["ranks"]

    assert html.count("<tr>") == 1 + len(result.ranks)
    assert "Milliseconds of the step, and memory" in html
    assert "ranks" not in {section.key for section in make_prediction_page(alike).sections}
