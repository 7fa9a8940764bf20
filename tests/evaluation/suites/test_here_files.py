"""Predictions before measurements, and measurements that survive an interruption."""

from __future__ import annotations

import json

import pytest

from traincast.utils.errors import TraincastError
from traincast_evaluation.suites.here_files import Measured, Predicted, Record
from traincast_evaluation.trials.catalog import draw_one_process_trials

TRIALS = draw_one_process_trials(dlrms=1)[:2]
ONE = Measured(step=(2.0, 4.0), reference=(1.0, 1.0), busy=(1.0, 3.0), reference_busy=(2.0, 2.0), isolated=1.5)


def record(folder, basis="profile 1"):
    return Record(folder, "here", basis)


def test_predictions_are_written_once_and_read_back(tmp_path):
    made = {trial.key: Predicted(1.0, 0.5, 2.0) for trial in TRIALS}
    record(tmp_path).write_predictions(made, TRIALS, "profile 1")
    assert record(tmp_path).read_predictions() == made
    content = json.loads(record(tmp_path).predictions_path.read_text())
    assert content["basis"] == "profile 1" and len(content["trials"]) == 2


def test_another_profile_begins_a_new_record(tmp_path):
    record(tmp_path).write_predictions({"a": Predicted(1.0, 0.5, 2.0)}, TRIALS, "profile 1")
    assert record(tmp_path, "profile 2").read_predictions() == {}


def test_nothing_is_predicted_after_the_first_measurement(tmp_path):
    record(tmp_path).add("a", ONE)
    with pytest.raises(AssertionError, match="before the first measurement"):
        record(tmp_path).write_predictions({}, TRIALS, "profile 1")


def test_measurements_are_read_back_by_both_clocks(tmp_path):
    record(tmp_path).add("a", ONE)
    measured = record(tmp_path).measurements()
    assert measured == {"a": ONE}
    assert measured["a"].ratios("wall").tolist() == [2.0, 4.0]
    assert measured["a"].ratios("busy").tolist() == [0.5, 1.5]


def test_visits_of_one_step_count_together(tmp_path):
    again = Measured(step=(6.0,), reference=(2.0,), busy=(2.0,), reference_busy=(1.0,))
    for one in (ONE, again):
        record(tmp_path).add("a", one)
    found = record(tmp_path).measurements()["a"]
    assert found.ratios("wall").tolist() == [2.0, 4.0, 3.0]
    assert (found.visits, found.isolated) == (2, 1.5)


def test_a_line_that_was_cut_off_is_measured_again_and_no_other_is_lost(tmp_path):
    kept = record(tmp_path)
    kept.add("a", ONE)
    kept.add("b", ONE)
    content = kept.measurements_path.read_bytes()
    for length in range(content.index(b"\n") + 1, len(content)):
        kept.measurements_path.write_bytes(content[:length])
        assert set(record(tmp_path).measurements()) == {"a"}
    record(tmp_path).add("c", ONE)
    assert record(tmp_path).measurements() == {"a": ONE, "c": ONE}


def test_a_foreign_file_is_refused_by_name(tmp_path):
    kept = record(tmp_path)
    kept.predictions_path.write_text("[1]")
    with pytest.raises(TraincastError, match="is no record of an evaluation; remove it to begin anew"):
        kept.read_predictions()
    kept.measurements_path.write_text('{"key": "a"}\n')
    with pytest.raises(TraincastError, match="is no record of an evaluation"):
        kept.measurements()


def test_a_folder_that_is_gone_is_named(tmp_path):
    with pytest.raises(TraincastError, match=r"cannot write '.*measured\.jsonl': No such file or directory"):
        record(tmp_path / "gone").add("a", ONE)
