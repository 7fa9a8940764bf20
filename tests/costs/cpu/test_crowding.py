"""What ops lose when all cores run a step: found from the same steps alone and together, used for steps of ranks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.costs.cpu.made_up import IDENTITY, samples
from traincast.calibration.fit import fit_profile
from traincast.costs.cpu.features import get_kind
from traincast.costs.cpu.op_costs import price_ops
from traincast.costs.cpu.profile import Contention, fit_crowding, load_profile, save_profile
from traincast.simulator.scenario.scenario import Scenario
from traincast.simulator.scenario.workloads import load_single_gpu_step

SLOWER = {"add": 1.5, "gemm": 1.0}


def both_ways(number=3000):
    """Adds and GEMMs inside steps, alone and on two cores."""
    inside = []
    for one in samples(number):
        if get_kind(one.signature) in SLOWER:
            tensors = len(one.signature.inputs) + len(one.signature.outputs)
            inside.append(replace(one, found=(1e6,) * (tensors + 1)))
    together = [replace(one, ranks=2, wall=one.wall * SLOWER[get_kind(one.signature)], busy=one.busy) for one in inside]
    return inside, together


def test_the_factor_of_a_kind_is_what_its_ops_take_together_over_alone():
    alone, together = both_ways()
    found = fit_crowding([*alone, *together], "wall")
    assert found.factor(2, "add") == pytest.approx(1.5, rel=0.05)
    assert found.factor(2, "gemm") == pytest.approx(1.0, abs=0.01)
    assert found.factor(2, "tanh") == found.factors["2 elementwise"] > 1.3, "a kind that was not timed is as its family"
    assert found.factor(1, "add") == 1.0


def test_steps_that_ran_only_together_say_nothing():
    _, together = both_ways(600)
    assert fit_crowding(together, "wall") == Contention()


def test_ranks_of_a_profile_pay_for_their_neighbours(tmp_path):
    alone, together = both_ways(600)
    fitted = fit_profile([*samples(200), *alone, *together], IDENTITY, "wall")[0]
    save_profile(fitted, tmp_path / "mine.toml")
    profile = load_profile(tmp_path / "mine.toml")
    program = load_single_gpu_step(Scenario(workload="dlrm-ddp", batch_size=64)).programs[0]
    one, two = ([op.seconds for op in price_ops(program, profile, ranks=ranks)] for ranks in (1, 2))
    ratios = np.array(two) / np.array(one)
    assert 1.0 <= ratios.min() < ratios.max() == pytest.approx(profile.crowding.factor(2, "add"), rel=0.1)
