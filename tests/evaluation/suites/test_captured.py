"""Steps captured from programs in the style of published examples: a seeded slice of the table that has them."""

from __future__ import annotations

import csv
import random

import pytest

from traincast_evaluation.suites.captured import HELD_BACK
from traincast_evaluation.suites.registry import evaluate


@pytest.fixture
def one_row(shared_data, tmp_path):
    """A folder with one ResNet-50 step on one GPU, drawn by a fixed seed."""
    pytest.importorskip("torch")
    with (shared_data / "iterations" / "dle_models.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    drawn = random.Random(15).choice([row for row in rows if row["model"] == "resnet50" and row["gpus"] == "1"])
    (tmp_path / "iterations").mkdir()
    with (tmp_path / "iterations" / "dle_models.csv").open("w", encoding="utf-8", newline="") as file:
        table = csv.DictWriter(file, list(drawn))
        table.writeheader()
        table.writerow(drawn)
    return drawn, tmp_path


def test_a_captured_step_is_near_its_published_time_and_says_whether_it_was_held_back(one_row):
    row, folder = one_row

    result = evaluate("captured", folder)

    (outcome,) = result.outcomes
    assert outcome.case.measured_ms == float(row["iteration_ms"])
    assert abs(outcome.error_percent) < 15.0
    assert outcome.low_ms < outcome.case.measured_ms < outcome.high_ms
    kept = outcome.case.name.endswith(HELD_BACK)
    assert [r.group for r in result.summary] == [
        "all: step",
        f"rows {'held back' if kept else 'looked at'}",
        "resnet50",
    ]
