"""Pages of what-ifs, advice and sweeps say what those say."""

from __future__ import annotations

import json

import pytest

import traincast
from traincast.app.pages.decisions import read_sweep_page, try_usual_edits
from traincast.app.pages.parts import is_sweep, is_trace
from traincast.app.pages.writing import add_what_ifs, make_page
from traincast.utils.display.text import format_dollars
from traincast.utils.errors import TraincastError


@pytest.fixture(scope="module")
def result():
    return traincast.predict("dlrm-default", on="v100", batch_size=1024)


def test_a_report_of_a_prediction_has_what_ifs_with_money(result):
    rows = try_usual_edits(result, 3.6)

    page = add_what_ifs(make_page(result, 3.6), result, 3.6)
    html = {section.key: section.html for section in page.sections}["money"]
    assert [row.edits[0] for row in rows if row.change.ratio < 1]
    assert all(row.before.iteration == pytest.approx(result.iteration) for row in rows)
    for row in rows:
        assert row.edits[0] in html
        assert format_dollars(row.cost_after.to_dict()["dollars_per_million_samples"]) in html


def test_a_what_if_shows_both_steps():
    result = traincast.whatif("dlrm-default", on="v100", edits=["host-speed=2"], batch_size=1024)

    page = make_page(result)
    sections = {section.key: section for section in page.sections}
    assert list(sections)[:2] == ["answer", "why"]
    assert f"from {1e3 * result.before.iteration:.2f} ms" in page.tiles[1].note
    assert result.verdict[1:] in sections["answer"].html
    assert "timeline" in sections


def test_advice_names_the_best_first():
    advice = traincast.advise("dlrm-ddp", on="v100", batch_size=64)

    html = make_page(advice).sections[0].html.replace(' class="t"', "").replace("<wbr>", "")
    best = " + ".join(advice.suggestions[0].answer.edits)
    assert html.index(f"<td>{best}</td>") < html.index(f"<td>{' + '.join(advice.suggestions[1].answer.edits)}</td>")


def test_a_sweep_tells_the_best_points_from_the_others(tmp_path):
    sweep = traincast.sweep("dlrm-default", on="v100", vary={"batch-size": [256, 1024, 4096]}, price=2.0, processes=1)
    file = tmp_path / "sweep.json"
    file.write_text(json.dumps(sweep.to_dict()))

    page, read = make_page(sweep), read_sweep_page(file)

    chart = page.sections[0].charts["sweep"]
    (points,) = chart["series"]
    assert sum(points["filled"]) == len(sweep.pareto)
    assert len(chart["x"]) == 3 and set(points["names"]) == {"256", "1024", "4096"}
    assert chart["x_label"] == "GB on the fullest GPU"  # one GPU at one price: cost is time
    assert [tile.label for tile in page.tiles] == ["Points", "Fastest", "Cheapest", "Least GPU time"]
    assert read.sections[0].html == page.sections[0].html
    assert is_sweep(str(file)) and not is_trace(str(file))


@pytest.mark.parametrize("text", ["[]", "{}", '{"axes": {}, "pareto": [1], "rows": [], "failures": []}',
                                  '{"axes": {}, "pareto": [{}], "rows": [], "failures": []}'])  # fmt: skip
def test_what_is_no_sweep_is_refused(text, tmp_path):
    file = tmp_path / "sweep.json"
    file.write_text(text)

    with pytest.raises(TraincastError, match=r"sweep\.json"):
        read_sweep_page(file)
