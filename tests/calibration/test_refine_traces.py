"""Traces of one's own runs correct a built-in GPU, checked on steps that took no part in it."""

from __future__ import annotations

import re
import tomllib

import pytest

from tests.traces.timelines import event, kernel, launch, op, write_trace
from traincast.app.cli.main import main
from traincast.calibration.refine import refine_from_traces
from traincast.hardware.platform import load_platform
from traincast.traces.kineto import read_kineto
from traincast.traces.link import link_trace
from traincast.traces.replay.kernels import predict_kernels
from traincast.traces.signatures import SignatureReader
from traincast.utils.errors import TraincastError


def write_steps(path, kernel_us, *, shapes=True, steps=4):
    events, number = [], 0
    for index in range(steps):
        begin = index * 20_000
        events.append(event("user_annotation", f"ProfilerStep#{index}", begin, 20_000))
        for place in range(8):
            at, number = begin + 100 + 2_000 * place, number + 1
            dims = [[1024, 1024], [1024, 1024]] if shapes else []
            events += [
                op("aten::mm", at, 60, dims), launch(number, at + 20), kernel(number, at + 40, kernel_us, name="sgemm"),
            ]  # fmt: skip
    return write_trace(path, events)


@pytest.fixture
def predicted_us(tmp_path):
    tied = link_trace(read_kineto(write_steps(tmp_path / "probe.json", 100.0)))
    return 1e6 * float(predict_kernels(tied, SignatureReader(tied), load_platform("v100").device).predicted[0])


def test_kernels_that_take_longer_correct_their_family(tmp_path, predicted_us):
    path = write_steps(tmp_path / "t.json", 1.5 * predicted_us)
    found = refine_from_traces([path], "v100", tmp_path / "mine.toml")
    (gemm,) = [row for row in found.corrections if row.family == "gemm"]
    assert gemm.measured == pytest.approx(1.5, rel=0.02)
    assert 1.2 < gemm.factor < 1.5  # 16 kernels were fitted to, and the shipped model counts as ten
    assert gemm.error_after < 0.6 * gemm.error_before
    assert any("2 steps that were not fitted to" in note for note in found.notes)
    assert tomllib.loads((tmp_path / "mine.toml").read_text())["refines"] == "v100"


def test_a_refined_platform_predicts_the_trace_closer(tmp_path, predicted_us):
    path = write_steps(tmp_path / "t.json", 1.5 * predicted_us)
    refine_from_traces([path], "v100", tmp_path / "mine.toml")
    tied = link_trace(read_kineto(path))
    refined = predict_kernels(tied, SignatureReader(tied), load_platform(str(tmp_path / "mine.toml")).device)
    assert 1e6 * refined.predicted[0] > 1.2 * predicted_us


def test_one_step_has_nothing_to_check_it_on(tmp_path):
    found = refine_from_traces([write_steps(tmp_path / "t.json", 200.0, steps=1)], "v100", tmp_path / "m.toml")
    assert "one step only" in found.notes[-1]


def test_traces_need_the_name_of_a_gpu(tmp_path, capsys):
    path = write_steps(tmp_path / "t.json", 200.0, steps=1)
    assert main(["fit", "--from-trace", str(path)]) == 2
    assert "name it with --refine" in capsys.readouterr().err


def test_traces_of_no_known_kernel_are_rejected(tmp_path):
    path = write_trace(tmp_path / "t.json", [event("user_annotation", "ProfilerStep#1", 0, 1000)])
    with pytest.raises(TraincastError, match=r"record shapes|no kernel|no launches"):
        refine_from_traces([path], "v100", tmp_path / "m.toml")


def test_a_real_run_is_predicted_closer_in_the_step_that_was_not_fitted_to(shared_data, tmp_path):
    """Its host is a third slower than the shipped one; scaling that by launch calls must not take it back."""
    path = shared_data / "traces" / "public_mixed" / "transformer_h100_1.json.gz"
    if not path.exists():
        pytest.skip(f"no trace at {path}")
    (note,) = refine_from_traces([path], "h100", tmp_path / "mine.toml").notes
    before, after = (float(number) for number in re.findall(r"([\d.]+) %", note))
    assert after < 0.3 * before, note
