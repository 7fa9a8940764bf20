"""No small program of `shared/capture_cases` is answered wrong without a word; `try_corpus.py` runs them all."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

pytest.importorskip("torch")

import traincast
from tests.corpus.cases import CASES, OPTIONS, find_fault, list_cases, try_case
from traincast.utils.errors import TraincastError

SLICE = ["sizes.py:make_log", "other_peak.py:make_int8", "cpu_table.py:make_step"]


@pytest.fixture(scope="module")
def folder(shared_data: Path) -> Path:
    found = shared_data.parent / "capture_cases"
    if not found.is_dir():
        pytest.skip("no capture cases alongside the measurements")
    return found


def test_something_is_expected_of_every_case(folder):
    assert set(list_cases(folder)) == set(CASES)


@pytest.mark.parametrize("case", [*random.Random(29).sample(sorted(set(CASES) - set(OPTIONS)), 5), *SLICE])
def test_no_case_is_wrong_without_a_word(folder, case):
    if case.startswith("bnb.py"):
        pytest.importorskip("bitsandbytes")
    if case.startswith("triton"):
        pytest.importorskip("triton")
    assert find_fault(case, try_case(folder, case)) == ""


@pytest.mark.parametrize("name", ["make_saturating", "make_chunks"])
def test_a_batch_far_from_the_captured_one_is_told_and_its_interval_holds_the_step(folder, name):
    # Given a step that is cut from some batch size on, captured below and at that size
    below, there = (traincast.capture(str(folder / f"sizes.py:{name}"), batch_size=batch) for batch in (32, 1280))

    # When both are predicted at the larger one
    asked = traincast.predict(below, on="a100-80gb", batch_size=1280)
    known = traincast.predict(there, on="a100-80gb").iteration

    # Then the first says that it is far away, and is wide enough
    assert any("40 times the one captured" in text for text in asked.workload.assumptions)
    assert asked.interval_terms["far_from_captured_size"] > 0.2
    assert asked.interval[0] <= known <= asked.interval[1]


def test_a_batch_that_is_padded_to_the_same_size_is_not_resized(folder):
    padded = traincast.capture(str(folder / "sizes.py:make_padded"), batch_size=32)
    with pytest.raises(TraincastError, match="captured at one batch size only"):
        traincast.predict(padded, on="a100-80gb", batch_size=1280)
