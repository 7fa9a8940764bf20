"""From samples to a profile to a prediction, on a machine whose speed is known."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.calibration.made_up import IDENTITY, samples
from tests.calibration.test_features import TINY
from traincast.calibration.fit import fit_profile
from traincast.calibration.profile import is_profile, load_profile, save_profile
from traincast.calibration.samples import Sample
from traincast.calibration.step import HOST_EVENTS, host_events, predict_serial, rough_seconds
from traincast.errors import TraincastError
from traincast.programs.dlrm.program import dlrm_workload


@pytest.fixture(scope="module")
def fitted():
    return fit_profile(samples(), IDENTITY, "wall")


def test_drift_divides_out_and_what_is_held_out_is_predicted(fitted):
    profile, errors = fitted
    assert profile.reference == pytest.approx(1.13e-3, rel=0.1)
    assert {row.group for row in errors} >= {"gemm", "conv", "elementwise", "embedding forward"}
    assert max(row.gmae for row in errors) < 5.0
    assert sum(row.n for row in errors) > 60


def test_a_profile_survives_being_written_down(fitted, tmp_path):
    path = tmp_path / "mine.toml"
    save_profile(fitted[0], path)
    again = load_profile(path)
    step = dlrm_workload(TINY)
    assert is_profile(path)
    assert again.identity == IDENTITY
    assert predict_serial(step, again).iteration == pytest.approx(predict_serial(step, fitted[0]).iteration, rel=1e-3)


def test_a_step_is_the_sum_of_its_parts(fitted):
    answer = predict_serial(dlrm_workload(TINY), fitted[0])
    assert answer.iteration == pytest.approx(sum(answer.by_family.values()))
    assert sum(answer.by_kind.values()) + answer.host == pytest.approx(answer.iteration)
    assert answer.interval[0] < answer.iteration < answer.interval[1]
    assert "not measured: " in answer.headline(), "the batched lookup of the papers runs on no CPU"
    assert len(answer.records()["ops"]) == len(answer.ops)
    assert answer.to_dict()["iteration_ms"] == pytest.approx(1e3 * answer.iteration)


def test_a_machine_half_as_fast_takes_twice_as_long():
    slow = [replace(one, wall=2 * one.wall, busy=2 * one.busy) for one in samples(150)]
    step = dlrm_workload(TINY)
    slower, plain = (predict_serial(step, fit_profile(some, IDENTITY, "wall")[0]) for some in (slow, samples(150)))
    assert slower.iteration - slower.host == pytest.approx(2 * (plain.iteration - plain.host), rel=0.02)
    assert slower.host == plain.host, "without small steps the host is what hosts are"


def test_host_time_is_found_in_small_steps():
    random = np.random.default_rng(0)
    price = np.array([50e-6, 8e-6, 2e-6, 6e-6, 3e-6, 4e-6])
    steps = []
    for _ in range(30):
        events = random.integers(1, 60, len(HOST_EVENTS)).astype(float)
        events[0] = 1.0
        seconds = float(events @ price)
        steps.append(
            Sample(
                signature=None, between=0, access="", wall=seconds, busy=seconds, reference_wall=1e-3,
                reference_busy=1e-3, spread=0.01, events=tuple(events),
            )
        )  # fmt: skip
    still = [replace(one, reference_wall=1e-3, reference_busy=1e-3) for one in samples(200)]
    profile = fit_profile([*still, *steps], IDENTITY, "busy")[0]
    assert list(profile.host.values()) == pytest.approx(price.tolist(), rel=0.15)


def test_what_takes_longer_inside_steps_is_priced_so(fitted):
    alone = samples()
    away = 1e9  # bytes since anything was touched
    inside = []
    for one in alone:
        found = (away,) * (len(one.signature.inputs) + len(one.signature.outputs) + 1)
        far = replace(one, found=found, between=0)
        ratio = fitted[0].seconds(far.features(fitted[0].caches))[0] / fitted[0].reference
        inside.append(replace(far, wall=1.3 * ratio * one.reference_wall))
    profile, errors = fit_profile([*alone, *inside], IDENTITY, "wall")
    added = next(one for one in inside if one.signature.name == "aten::_embedding_bag")
    features = added.features(profile.caches)
    assert 1.1 < profile.seconds(features)[0] / fitted[0].seconds(features)[0] <= 1.31
    assert any(row.group.startswith("in steps: ") for row in errors)


def test_the_events_of_a_step_are_counted():
    counts = dict(zip(HOST_EVENTS, host_events(dlrm_workload(TINY).programs[0]).tolist(), strict=True))
    assert counts["step"] == 1.0
    assert counts["backward"] > 5 and counts["accumulate"] >= 8 and counts["optimizer"] >= 8 and counts["view"] > 5


def test_rough_seconds_put_large_ops_first():
    small, large = (one.signature for one in samples(2)[:2])
    flops = [one.inputs[-1].numel * one.inputs[-2].shape[0] for one in (small, large)]
    assert (rough_seconds(small) < rough_seconds(large)) == (flops[0] < flops[1])


def test_too_few_samples_are_refused():
    with pytest.raises(TraincastError, match="holds 5 steady samples; measure for longer"):
        fit_profile(samples(5), IDENTITY, "wall")
    disturbed = [replace(one, spread=0.5) for one in samples(50)]
    with pytest.raises(TraincastError, match="holds 0 steady samples"):
        fit_profile(disturbed, IDENTITY, "wall")


def test_a_damaged_profile_is_one_line(fitted, tmp_path):
    path = tmp_path / "mine.toml"
    save_profile(fitted[0], path)
    path.write_text(path.read_text().replace("reference_seconds", "reference_second"))
    with pytest.raises(TraincastError, match=r"profile .*mine.toml' is damaged .*reference_seconds"):
        load_profile(path)
    assert not is_profile(tmp_path / "none.toml")
