"""A step on a measured machine is a prediction like every other: timeline, path, families, interval, memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.costs.cpu.made_up import IDENTITY, exchange_samples, samples
from tests.simulator.rank_programs import MB, RankProgram, workload
from traincast.app.pages.page import render_page
from traincast.app.pages.writing import add_what_ifs, make_page
from traincast.app.report.chrome import make_chrome_trace
from traincast.app.report.prediction import format_prediction
from traincast.calibration.fit import fit_profile
from traincast.costs.cpu.op_costs import price_ops, sum_host_seconds_by_op
from traincast.costs.cpu.profile import Contention, is_here, load_machine, make_machine_platform, save_profile
from traincast.simulator.cpu.instructions import compute_step_seconds, lower_step
from traincast.simulator.cpu.predict import predict_on_machine
from traincast.simulator.prediction.prediction import predict_step
from traincast.simulator.prediction.step import Unevenness
from traincast.simulator.scenario.scenario import Scenario
from traincast.simulator.scenario.workloads import load_single_gpu_step
from traincast.utils.errors import TraincastError


@pytest.fixture(scope="module")
def profile():
    return fit_profile([*samples(200), *exchange_samples("all_reduce")], IDENTITY, "wall")[0]


@pytest.fixture(scope="module")
def dlrm():
    return load_single_gpu_step(Scenario(workload="dlrm-ddp", batch_size=64))


def ranks_of(*sizes, wait=True):
    """Ranks that each compute, sum, compute and wait: GEMMs of these sizes."""
    return workload(
        *(RankProgram().compute(size, 3).collective(wait=wait).compute(size).collective() for size in sizes)
    )


def seconds_of(program, profile, ranks=1):
    kernels = sum(one.seconds for one in price_ops(program, profile, ranks=ranks))
    return kernels + float(sum_host_seconds_by_op(program, profile).sum())


def test_one_process_takes_the_sum_of_its_ops_and_its_host(profile, dlrm):
    result = predict_step(dlrm, make_machine_platform(profile))

    assert result.iteration == pytest.approx(seconds_of(dlrm.programs[0], profile))
    assert result.device_idle == pytest.approx(result.host), "host and device are one core"
    assert sum(result.by_family.values()) == pytest.approx(result.device_active)
    assert sum(result.by_phase.values()) == pytest.approx(result.device_active)


def test_the_path_is_the_step_and_names_families_and_the_host(profile, dlrm):
    result = predict_step(dlrm, make_machine_platform(profile))

    assert sum(part.seconds for part in result.path) == pytest.approx(result.iteration)
    assert {"host", "gemm", "elementwise"} <= {part.what for part in result.path}


def test_it_reports_like_every_platform(profile, dlrm):
    result = predict_step(dlrm, make_machine_platform(profile, "mine"))
    document = result.to_dict()

    assert (document["platform"], document["device"]) == ("mine", "made up")
    assert document["mfu"] is None and document["flops"] > 0, "a CPU has no data sheet to take a peak from"
    assert document["interval_ms"][0] < document["iteration_ms"] < document["interval_ms"][1]
    assert document["memory_gb"]["peak"] > 0
    assert "made up" in format_prediction(result, by="module")
    page = render_page(add_what_ifs(make_page(result), result, None))
    assert "inf GB" not in page, "a memory that is not known is not shown"
    assert {event["tid"] for event in make_chrome_trace(result)["traceEvents"] if event.get("cat") == "backward"} == {0}


def test_ranks_pay_for_collectives_and_wait_for_the_last(profile):
    # given a rank that computes longer than the other
    given = workload(*(RankProgram().compute(size, 3).collective().compute(64) for size in (64, 512)))

    result = predict_on_machine(given, make_machine_platform(profile))

    # then the step is the slow rank's ops, and the sum, which nothing hides
    plan, slow = lower_step(given, profile).programs[1].plan, given.programs[1]
    summed = profile.exchanges.in_step(list(plan.exchanges) * 2)
    assert result.iteration == pytest.approx(seconds_of(slow, profile, 2) + summed)
    assert result.exposed_comm == pytest.approx(summed)
    first, last = sorted(result.ranks, key=lambda rank: rank.compute)
    assert first.waiting > 0.5 * last.compute and last.waiting == 0.0
    assert first.exposed_comm == pytest.approx(summed + first.waiting)


@pytest.mark.parametrize("wait", [True, False])
def test_the_step_is_that_of_the_plans_whatever_ranks_wait_for(profile, wait):
    given = ranks_of(128, 300, wait=wait)

    step = lower_step(given, profile)
    plans = [step.programs[number].plan for number in step.instructions.ranks]

    result = predict_on_machine(given, make_machine_platform(profile))
    assert result.iteration == pytest.approx(compute_step_seconds(plans, profile.exchanges.in_step))
    assert len(result.simulation.collectives.seconds) == 2


def test_jitter_makes_ranks_wait_for_each_other(profile):
    given, varying = ranks_of(300, 300), replace(profile, jitter=0.1)
    steady, varied = (predict_on_machine(given, make_machine_platform(one)) for one in (profile, varying))

    plans = [lower_step(given, profile).programs[0].plan] * 2
    assert varied.iteration == pytest.approx(compute_step_seconds(plans, profile.exchanges.in_step, 0.1))
    assert varied.iteration > 1.03 * steady.iteration
    assert varied.interval_terms["step_to_step"] == 0.1 and "step_to_step" not in steady.interval_terms


def test_neighbours_slow_ranks_down(profile):
    crowded = replace(profile, crowding=Contention({"2 gemm": 2.0}))
    plain, slower = (predict_on_machine(ranks_of(300, 300), make_machine_platform(one)) for one in (profile, crowded))

    assert slower.by_family["gemm"] == pytest.approx(2 * plain.by_family["gemm"])


def test_what_if_ops_ran_faster_or_steps_began_late(profile, dlrm):
    machine = make_machine_platform(profile)
    plain = predict_step(dlrm, machine)

    faster = predict_step(dlrm, machine, op_speed={"aten::addmm": 2.0})
    late = predict_step(dlrm, machine, late=1e-3)

    assert plain.iteration - faster.iteration == pytest.approx(0.5 * plain.by_op["aten::addmm"])
    assert late.iteration == pytest.approx(plain.iteration + 1e-3)


def test_what_is_of_gpus_is_refused(profile, dlrm):
    for options in ({"tf32": True}, {"roofline_only": True}, {"uneven": Unevenness(jitter=0.1)}):
        with pytest.raises(TraincastError, match="are for GPUs"):
            predict_step(dlrm, make_machine_platform(profile), **options)


def test_more_than_the_machine_holds_is_warned_of(profile, dlrm):
    small = replace(profile, identity={**IDENTITY, "memory_bytes": MB})

    (warning,) = predict_step(dlrm, make_machine_platform(small)).warnings

    assert "made up has 0 GB" in warning


def test_a_machine_is_found_by_its_profile(profile, tmp_path, monkeypatch):
    monkeypatch.setenv("TRAINCAST_HOME", str(tmp_path))
    with pytest.raises(TraincastError, match="measure this machine with 'traincast bench'"):
        load_machine("here")

    save_profile(profile, tmp_path / "here.toml")

    assert load_machine("here").key == "here" and load_machine(str(tmp_path / "here.toml")).device.is_cpu
    assert is_here("here") and is_here(str(tmp_path / "here.toml")) and not is_here("v100")
