"""One step on several platforms: order, dollars, what does not fit, what cannot be predicted."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest

import traincast
from traincast.app.cli.main import main
from traincast.app.report.choices import draw_platforms, format_platform_comparison
from traincast.planner.what_if.money import choose_prices, load_list_prices
from traincast.utils.errors import TraincastError


@pytest.fixture(scope="module")
def result():
    names = ["v100", "h100", "p4"]
    return traincast.compare("resnet50", on=names, batch_size=128, price="h100=4,v100=0.5", samples=1.28e6)


def test_platforms_come_fastest_first_and_others_with_their_reason(result):
    assert [step.platform for step in result.steps] == ["h100", "v100", "p4"]
    assert result.fastest.platform == "h100"


def test_a_platform_that_cannot_run_it_is_named_with_the_reason():
    result = traincast.compare("llama3-8b", on=["v100", "h100"], dtype="fp8")

    assert [step.platform for step in result.steps] == ["h100"]
    assert "fp8" in result.failed["v100"]
    assert format_platform_comparison(result).splitlines()[-1].startswith("failed: v100: ")


def test_each_step_is_that_of_predict(result):
    alone = traincast.predict("resnet50", on="h100", batch_size=128)

    assert result.steps[0].prediction.iteration == alone.iteration


def test_dollars_are_price_times_hours(result):
    row = result.to_dict()["rows"][1]

    assert row["platform"] == "v100"
    assert row["dollars_per_million_samples"] == pytest.approx(0.5 / 3600 * 1e3 * row["iteration_ms"] / 128)
    assert row["run_dollars"] == pytest.approx(1.28 * row["dollars_per_million_samples"])


def test_text_has_the_verdict_first_then_every_platform(result):
    lines = format_platform_comparison(result).splitlines()

    assert lines[0].startswith("resnet50: h100 is fastest, ")
    assert lines[1].startswith("v100 is cheapest, $")
    assert {line.split()[0] for line in lines if "resnet" not in line and " of " in line} >= {"h100", "v100", "p4"}


def test_drawing_has_a_bar_and_whiskers_per_platform(result):
    root = ElementTree.fromstring(draw_platforms(result))
    bars = [float(rect.get("width")) for rect in root.iter("{http://www.w3.org/2000/svg}rect")][1:]

    assert bars == sorted(bars)
    steps = result.steps
    assert bars[1] / bars[0] == pytest.approx(steps[1].seconds_per_sample / steps[0].seconds_per_sample, rel=0.01)
    assert len(list(root.iter("{http://www.w3.org/2000/svg}path"))) == 3


def test_a_step_that_fits_nowhere_is_a_check_that_failed(capsys):
    words = ["compare", "llama3-8b", "--on", "h100,a100-80gb", "--gpus", "1"]

    assert main(words) == 1
    assert "does not fit on" in capsys.readouterr().out


@pytest.mark.parametrize(("price", "known", "source"), [
    ("2.5", {"": 2.5}, "as given"), (3.0, {"": 3.0}, "as given"), ("none", {}, ""),
])  # fmt: skip
def test_prices_of_all(price, known, source):
    assert choose_prices(price) == (known, source)


def test_prices_that_are_not_given_are_the_dated_list():
    prices, source = choose_prices("h100=2")
    listed, said = load_list_prices()

    assert prices == {**listed, "h100": 2.0}
    assert source == f"as given, else {said}"
    assert said.endswith("2026-08-22")
    assert set(listed) <= {platform.key for platform in traincast.list_platforms()} | {"rtx-4090"}


@pytest.mark.parametrize("price", ["h100=much", "-1", "h100=0", ""])
def test_what_is_no_price_is_refused(price):
    with pytest.raises(TraincastError, match="price"):
        choose_prices(price)
