"""The ops of a captured step as a CPU runs them, and what its host thread does besides."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.costs.cpu.made_up import IDENTITY, samples
from traincast.calibration.fit import fit_profile
from traincast.costs.cpu.op_costs import (
    HOST_EVENTS,
    collect_op_deviations,
    count_host_events,
    make_cpu_ops,
    price_ops,
    sum_host_seconds_by_op,
)
from traincast.ir.ops import Signature
from traincast.simulator.scenario.scenario import Scenario
from traincast.simulator.scenario.workloads import load_single_gpu_step


@pytest.fixture(scope="module")
def profile():
    return fit_profile(samples(200), IDENTITY, "wall")[0]


@pytest.fixture(scope="module")
def program():
    return load_single_gpu_step(Scenario(workload="dlrm-ddp", batch_size=64)).programs[0]


def test_host_seconds_of_ops_are_those_of_all_events(profile, program):
    by_op = sum_host_seconds_by_op(program, profile)

    assert len(by_op) == program.num_ops
    assert by_op.sum() == pytest.approx(count_host_events(program) @ [profile.host[name] for name in HOST_EVENTS])
    assert by_op[0] >= profile.host["step"], "the step begins with its first op"


def test_events_that_a_profile_does_not_price_cost_nothing(profile, program):
    assert sum_host_seconds_by_op(program, replace(profile, host={})).sum() == 0.0


def test_products_are_counted_and_copies_are_not(profile, program):
    flops = {one.kind: one.flops for one in price_ops(program, profile)}

    assert flops["gemm"] > 0
    assert flops["add"] == 0


def test_kinds_err_apart_and_the_host_on_its_own(profile, program):
    priced = price_ops(program, profile)

    deviations = collect_op_deviations(priced, 1e-3, profile)

    assert deviations["host"] == pytest.approx(profile.host_spread * 1e-3)
    assert 0 < deviations["kernels"] < sum(one.sigma * one.seconds for one in priced)
    assert deviations["sum_of_parts"] == pytest.approx(0.03 * (1e-3 + sum(one.seconds for one in priced)))


@pytest.mark.parametrize("name", ["c10d::allreduce_", "_c10d_functional::all_reduce", "cuda::event_record"])
def test_collectives_and_waits_are_nothing_that_the_host_thread_computes(name):
    assert make_cpu_ops(Signature(name, (), ())) == ()


@pytest.mark.parametrize("name", ["_indices", "_values", "_sparse_coo_tensor_with_dims_and_tensors"])
def test_a_sparse_gradient_is_handed_on_without_touching_it(name):
    assert make_cpu_ops(Signature(f"aten::{name}", (), ())) == ()
