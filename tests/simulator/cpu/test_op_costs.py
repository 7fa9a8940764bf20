"""The ops of a program with their share of the host's time add up to the step of one process."""

from __future__ import annotations

import pytest

from tests.costs.cpu.made_up import IDENTITY, samples
from traincast.calibration.fit import fit_profile
from traincast.costs.cpu.cpu_ops import cpu_ops
from traincast.ir.ops import Signature
from traincast.simulator.cpu.op_costs import op_costs
from traincast.simulator.cpu.step import predict_serial
from traincast.simulator.scenario.scenario import Scenario
from traincast.simulator.scenario.workloads import load


@pytest.fixture(scope="module")
def profile():
    return fit_profile(samples(200), IDENTITY, "wall")[0]


def test_op_costs_add_up_to_the_step(profile):
    workload = load(Scenario(workload="dlrm-ddp", batch_size=64))
    costs, answer = op_costs(workload.programs[0], profile), predict_serial(workload, profile)
    assert len(costs.seconds) == workload.programs[0].num_ops
    assert costs.seconds.sum() == pytest.approx(answer.iteration)
    assert 0 < costs.deviation < answer.iteration


@pytest.mark.parametrize("name", ["c10d::allreduce_", "_c10d_functional::all_reduce", "cuda::event_record"])
def test_collectives_and_waits_are_nothing_that_the_host_thread_computes(name):
    assert cpu_ops(Signature(name, (), ())) == ()


@pytest.mark.parametrize("name", ["_indices", "_values", "_sparse_coo_tensor_with_dims_and_tensors"])
def test_a_sparse_gradient_is_handed_on_without_touching_it(name):
    assert cpu_ops(Signature(f"aten::{name}", (), ())) == ()
