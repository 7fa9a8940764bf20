"""The suite over traced steps, on made-up traces."""

from __future__ import annotations

import gzip
import json
import shutil

import pytest

from tests.traces.timelines import small_events
from traincast.utils.errors import TraincastError
from traincast_evaluation.suites.registry import evaluate


def write(folder, device, slower=1):
    folder.mkdir(parents=True)
    events = [{**entry, "ts": slower * entry["ts"], "dur": slower * entry["dur"]} for entry in small_events()]
    document = {"traceEvents": events, "deviceProperties": [{"id": 0, "name": device}]}
    (folder / "kineto.json.gz").write_bytes(gzip.compress(json.dumps(document).encode()))


def test_steps_are_replayed_and_predicted_with_every_host(tmp_path):
    write(tmp_path / "traces" / "made_up", "Tesla V100-SXM2-16GB")
    groups = {row.group: row for row in evaluate("traces", tmp_path).summary}
    assert groups["replay, all steps"].n == 1
    assert groups["replay, all steps"].mape < 1
    assert {f"predicted, {host}, all steps" for host in ("host left out", "own host times", "own host profile")} <= set(
        groups
    )
    assert any(name.startswith("kernels, v100") for name in groups)


def test_every_trace_is_a_case_with_its_interval(tmp_path):
    write(tmp_path / "traces" / "made_up", "Tesla V100-SXM2-16GB")
    cases = {case["case"]: case for case in evaluate("traces", tmp_path).to_dict()["cases"]}
    assert cases.keys() >= {
        f"predicted, {host}, by trace: made_up/kineto" for host in ("own host times", "host left out")
    }
    for case in cases.values():
        low, high = case["interval_ms"]
        assert case["device"] == "v100"
        assert low < case["predicted_ms"] < high
        assert case["covered"] is (low <= case["measured_ms"] <= high)


def test_steps_whose_host_runs_ahead_are_compared_by_the_device(shared_data, tmp_path):
    folder = tmp_path / "traces" / "public_mixed"
    folder.mkdir(parents=True)
    shutil.copy(shared_data / "traces" / "public_mixed" / "luatil_3060_06.json.gz", folder)
    cases = {case["case"]: case for case in evaluate("traces", tmp_path).to_dict()["cases"]}
    case = cases["predicted, own host times, by trace: public_mixed/luatil_3060_06"]
    assert case["measured_ms"] == pytest.approx(169.6, rel=0.001), "markers are 2 ms apart"
    assert case["predicted_ms"] == pytest.approx(case["measured_ms"], rel=0.02)


def test_profiles_of_other_sources_and_gpus_are_tried(tmp_path):
    write(tmp_path / "traces" / "one_run", "Tesla V100-SXM2-16GB")
    write(tmp_path / "traces" / "two_run", "NVIDIA A100-SXM4-80GB")
    groups = {row.group: row for row in evaluate("traces", tmp_path).summary}
    assert groups["predicted, source left out, all steps"].n == 2
    assert groups["predicted, kind of GPU left out, one_run"].n == 1


def test_launch_calls_of_the_trace_scale_a_profile_that_knows_nothing_of_it(tmp_path):
    """The second run is the first one at half its speed, which its calls show."""
    write(tmp_path / "traces" / "one_run", "Tesla V100-SXM2-16GB")
    write(tmp_path / "traces" / "two_run", "Tesla V100-SXM2-16GB", slower=2)
    groups = {row.group: row for row in evaluate("traces", tmp_path).summary}
    plain, scaled = (groups[f"predicted, host left out{how}, two_run"] for how in (", as shipped", ""))
    assert plain.bias < 0
    assert scaled.bias > plain.bias + 5


def test_a_device_that_nobody_knows_is_left_out(tmp_path):
    write(tmp_path / "traces" / "made_up", "Some Other Device")
    with pytest.raises(TraincastError, match="no trace with steps of a device that we know"):
        evaluate("traces", tmp_path)


def test_data_without_traces_are_refused(tmp_path):
    with pytest.raises(TraincastError, match="there is no folder"):
        evaluate("traces", tmp_path)
