"""Steps of two ranks on the machine at hand: predicted from a profile, and really run."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("torch")

from tests.costs.cpu.made_up import IDENTITY, exchange_samples, samples
from traincast.app.api import predict
from traincast.app.cli.main import main
from traincast.calibration.fit import fit_profile
from traincast.calibration.measure_ranks import make_rank_step
from traincast.costs.cpu.profile import load_profile, save_profile
from traincast.simulator.scenario.scenario import Scenario
from traincast.utils.errors import TraincastError
from traincast_evaluation.zoo.build.recipes import RECIPES

STEP = """import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def make_step(batch_size, *, rank, world_size):
    model = DistributedDataParallel(nn.Linear(64, 64))
    x = torch.ones(batch_size, 64)
    return lambda: model(x).sum().backward()
"""


@pytest.fixture(scope="module")
def profile(tmp_path_factory):
    """The file of a made-up machine's profile."""
    kinds = ("all_reduce", "all_to_all_v", "broadcast")
    collectives = [one for kind in kinds for one in exchange_samples(kind)]
    fitted, errors = fit_profile([*samples(200), *collectives], IDENTITY, "wall")
    assert "collectives" in {row.group for row in errors}
    file = tmp_path_factory.mktemp("profile") / "machine.toml"
    save_profile(fitted, file)
    again = load_profile(file)
    assert set(again.exchanges.seconds) == {f"2 {kind}" for kind in kinds}
    return file


def test_a_dlrm_shards_its_tables_and_shares_its_mlps(profile, capsys):
    assert main(["predict", "dlrm-ddp", "--on", str(profile), "--gpus", "2", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["gpus"] == 2 and result["iteration_ms"] > max(rank["compute_ms"] for rank in result["ranks"]) > 0
    assert {"c10d::allreduce_", "c10d::alltoall_base_"} <= set(result["by_op"])
    assert result["per_family"]["collective"] == pytest.approx(result["exposed_comm_ms"])
    assert result["scenario"]["gpus"] == 2 and result["scenario"]["dtype"] == "fp32"
    low, high = result["interval_ms"]
    assert low < result["iteration_ms"] < high


def test_other_models_are_data_parallel(profile):
    result = predict("vgg13", on=str(profile), gpus=2, batch_size=1)
    summed = [exchange for calls in result.simulation.instructions.calls[:1] for exchange in calls.exchange]
    assert len(summed) > 1 and {one.kind for one in summed} == {"all_reduce"}
    assert sum(one.bytes for one in summed) == 4 * RECIPES["vgg13"].parameters(), "every gradient once"
    assert "on 2 x made up" in result.headline()


def test_a_function_says_what_each_rank_does(profile, tmp_path, capsys):
    (tmp_path / "step.py").write_text(STEP)
    name = f"{tmp_path / 'step.py'}:make_step"
    assert len(predict(name, on=str(profile), gpus=2).simulation.collectives.seconds) == 1
    assert main(["measure", name, "--gpus", "2", "--batch-size", "8", "--seconds", "0.1", "--json"]) == 0
    measured = json.loads(capsys.readouterr().out)
    assert measured["ranks"] == 2 and measured["low_ms"] <= measured["corrected_ms"] <= measured["high_ms"]
    (tmp_path / "alone.py").write_text("def make_step(batch_size):\n    return lambda: None\n")
    with pytest.raises(TraincastError, match="must take rank and world_size by name"):
        make_rank_step(f"{tmp_path / 'alone.py'}:make_step", Scenario(dtype="fp32"), 2)


def test_more_ranks_than_were_measured_together_are_refused(profile):
    with pytest.raises(TraincastError, match="between 4 ranks was not measured"):
        predict("dlrm-ddp", on=str(profile), gpus=4)
