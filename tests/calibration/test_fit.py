"""From samples to a profile to a prediction, on a machine whose speed is known."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from tests.costs.cpu.made_up import IDENTITY, REFERENCE, samples, true_seconds
from tests.costs.cpu.test_features import TINY
from traincast.calibration.fit import fit_profile
from traincast.costs.cpu.features import estimate_rough_seconds
from traincast.costs.cpu.op_costs import HOST_EVENTS, count_host_events
from traincast.costs.cpu.profile import is_profile, load_profile, make_machine_platform, save_profile
from traincast.costs.cpu.samples import Sample, select_calm_samples
from traincast.models.dlrm.program import build_dlrm_workload
from traincast.simulator.cpu.predict import predict_on_machine
from traincast.utils.errors import TraincastError


def predict_with(workload, profile):
    return predict_on_machine(workload, make_machine_platform(profile))


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
    step = build_dlrm_workload(TINY)
    assert is_profile(path)
    assert again.identity == IDENTITY
    assert predict_with(step, again).iteration == pytest.approx(predict_with(step, fitted[0]).iteration, rel=1e-3)


def test_a_profile_that_holds_more_than_is_read_still_loads(fitted, tmp_path):
    path = tmp_path / "older.toml"
    save_profile(fitted[0], path)
    path.write_text(path.read_text() + '\n[copies."in memory, pageable"]\ncoefficients = [1.0]\n')
    assert load_profile(path).samples == fitted[0].samples


def test_a_step_is_the_sum_of_its_parts(fitted):
    result = predict_with(build_dlrm_workload(TINY), fitted[0])
    assert sum(result.by_family.values()) + result.host == pytest.approx(result.iteration)
    assert sum(part.seconds for part in result.path) == pytest.approx(result.iteration)
    assert result.interval[0] < result.iteration < result.interval[1]
    assert result.estimated_ops and result.estimated_seconds > 0, "the batched lookup of the papers runs on no CPU"
    assert result.to_dict()["iteration_ms"] == pytest.approx(1e3 * result.iteration)


def test_a_machine_half_as_fast_takes_twice_as_long():
    slow = [replace(one, wall=2 * one.wall, busy=2 * one.busy) for one in samples(150)]
    step = build_dlrm_workload(TINY)
    slower, plain = (predict_with(step, fit_profile(some, IDENTITY, "wall")[0]) for some in (slow, samples(150)))
    assert slower.iteration - slower.host == pytest.approx(2 * (plain.iteration - plain.host), rel=0.02)
    assert slower.host == plain.host, "without small steps the host is what hosts are"


PRICE = np.array([50e-6, 8e-6, 2e-6, 6e-6, 3e-6, 4e-6, 20e-6, 200e-6])


def small_step_samples(number, *, kernels=lambda _: 0.0, longer=0.0, off=lambda _: 0.0):
    """What is left of small steps: their events, `longer` of their kernels, and a share of those that is just off."""
    random = np.random.default_rng(0)
    steps = []
    for _ in range(number):
        events = random.integers(1, 60, len(HOST_EVENTS)).astype(float)
        events[0], events[-1] = 1.0, random.integers(6)  # a step has few collectives
        inside = kernels(random)
        left = float(events @ PRICE) + (longer + off(random)) * inside * REFERENCE
        steps.append(
            Sample(
                signature=None, between=0, access="", wall=left, busy=left, reference_wall=REFERENCE,
                reference_busy=REFERENCE, spread=0.01, events=tuple(events), kernels=inside,
            )
        )  # fmt: skip
    return steps


def still_samples():
    return [replace(one, reference_wall=REFERENCE, reference_busy=REFERENCE) for one in samples(200)]


def test_host_time_is_found_in_small_steps():
    profile = fit_profile([*still_samples(), *small_step_samples(30)], IDENTITY, "busy")[0]
    assert list(profile.host.values()) == pytest.approx(PRICE.tolist(), rel=0.15)
    assert profile.longer == 0.0


def test_long_steps_tell_how_much_longer_kernels_take_and_short_ones_the_hosts_time(fitted):
    # Given steps of 2 to 80 ms of kernels, which take 5 % longer than their medians add up to, give or take 6 %
    steps = small_step_samples(
        90, kernels=lambda random: 2.0 * 40.0 ** random.random(), longer=0.05, off=lambda random: random.normal(0, 0.06)
    )
    assert any(step.wall < 0 for step in steps), "timed in other repetitions, kernels may add up to more than a step"
    profile = fit_profile([*still_samples(), *steps], IDENTITY, "busy")[0]
    assert profile.longer == pytest.approx(0.05, abs=0.02)
    mean = np.mean([step.events for step in steps], axis=0)
    assert mean @ list(profile.host.values()) == pytest.approx(mean @ PRICE, rel=0.3)
    # then ops of a step take as much longer
    workload = build_dlrm_workload(TINY)
    plain, longer = (predict_with(workload, replace(fitted[0], longer=share)) for share in (0.0, 0.05))
    assert longer.iteration - longer.host == pytest.approx(1.05 * (plain.iteration - plain.host))


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
    counts = dict(zip(HOST_EVENTS, count_host_events(build_dlrm_workload(TINY).programs[0]).tolist(), strict=True))
    assert counts["step"] == 1.0
    assert counts["backward"] > 5 and counts["accumulate"] >= 8 and counts["optimizer"] >= 8 and counts["view"] > 5


def test_rough_seconds_put_large_ops_first():
    small, large = (one.signature for one in samples(2)[:2])
    flops = [one.inputs[-1].numel * one.inputs[-2].shape[0] for one in (small, large)]
    assert (estimate_rough_seconds(small) < estimate_rough_seconds(large)) == (flops[0] < flops[1])


def test_one_sample_of_a_kind_is_worth_its_own_shape_and_says_little_of_others():
    # Given many GEMMs, and one lookup that takes three times as long as any bytes would
    every = samples()
    lookup = next(one for one in every if one.signature.name == "aten::_embedding_bag")
    slow = replace(lookup, wall=3 * lookup.wall, busy=3 * lookup.busy)
    products = [one for one in every if one.signature.name == "aten::mm"]
    profile = fit_profile([*products, slow], IDENTITY, "wall")[0]
    # then that lookup takes what was measured, and one of another table may take anything
    seconds, sigma, known = profile.seconds(slow.features(profile.caches))
    assert known and seconds == pytest.approx(profile.reference * slow.ratio("wall"), rel=1e-6) and sigma < 0.2
    others = [one for one in every if one.signature.name == "aten::_embedding_bag" and one is not lookup]
    assert max(profile.seconds(one.features(profile.caches))[1] for one in others) > 0.4


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


@pytest.mark.parametrize(
    ("field", "value"),
    [("l2_bytes", "0.0"), ("longer", "-1.0"), ("jitter", "-0.1"), ("host_spread", "-2")],
)
def test_a_number_that_no_machine_has_is_named(field, value, fitted, tmp_path):
    path = tmp_path / "mine.toml"
    save_profile(fitted[0], path)
    path.write_text(re.sub(rf"(?m)^{field} = .*$", f"{field} = {value}", path.read_text()))
    with pytest.raises(TraincastError, match=rf"is damaged .*{field} is"):
        load_profile(path)


def test_a_profile_of_another_form_is_to_be_fitted_again(fitted, tmp_path):
    path = tmp_path / "mine.toml"
    save_profile(fitted[0], path)
    path.write_text(path.read_text().replace("form = 4", "form = 3"))
    with pytest.raises(TraincastError, match=r"mine.toml' was fitted by another version .* fit its store again"):
        load_profile(path)


def test_what_is_measured_twice_says_how_far_measurements_lie_apart():
    once = [replace(one, reference_busy=1e-3) for one in samples(150)]
    again = [replace(one, wall=1.1 * one.wall) for one in once[::10]]
    rows = {row.group: row for row in fit_profile([*once, *again], IDENTITY, "wall")[1]}
    assert rows["measured again: gemm"].mape == pytest.approx(100 * (1 - 1 / 1.1), rel=1e-6)
    assert sum(row.n for name, row in rows.items() if name.startswith("measured again")) == 15


def test_two_visits_are_fitted_and_judged_by_their_mean():
    """Noise of single visits that their mean has not."""
    once = [replace(one, reference_busy=1e-3) for one in samples(250)]
    visited = [replace(one, wall=factor * one.wall) for one in once for factor in (1.25, 0.8)]
    rows, plain = ({row.group: row for row in fit_profile(some, IDENTITY, "wall")[1]} for some in (visited, once))
    assert rows["gemm"].n == plain["gemm"].n
    assert rows["gemm"].mape == pytest.approx(plain["gemm"].mape, rel=0.01)


def test_samples_of_a_disturbed_machine_are_not_used():
    still = [replace(one, reference_wall=1e-3, reference_busy=1e-3, wall=true_seconds(one)) for one in samples(200)]
    disturbed = [replace(one, reference_busy=1.3e-3, reference_wall=1.3e-3, wall=3 * one.wall) for one in still[::3]]
    step = build_dlrm_workload(TINY)
    alone, beside = (
        predict_with(step, fit_profile(some, IDENTITY, "wall")[0]) for some in (still, [*still, *disturbed])
    )
    assert beside.iteration == alone.iteration


def test_a_machine_that_is_never_calm_is_taken_as_it_is():
    every = [replace(one, reference_busy=1e-3 * 1.05**number) for number, one in enumerate(samples(40))]
    assert select_calm_samples(every) == every and select_calm_samples([]) == []
