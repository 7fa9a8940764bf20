"""`traincast capture --gpus`: a step on several GPUs from a file."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("torch")

from tests.app.cli.test_bad_input import refusal
from traincast.app.cli.main import main
from traincast.ir.file import load_workload

SCRIPT = """
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

def ddp(batch_size, *, rank, world_size):
    model = DistributedDataParallel(nn.Linear(64, 64).to(f"cuda:{rank}"), device_ids=[rank])
    x = torch.zeros(batch_size, 64, device=f"cuda:{rank}")
    return lambda: model(x).sum().backward()

def alone(batch_size):
    model = nn.Linear(64, 64).cuda()
    x = torch.zeros(batch_size, 64, device="cuda")
    return lambda: model(x).sum().backward()
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def test_a_step_on_several_gpus_is_captured_and_predicted(capsys, script, tmp_path):
    out = tmp_path / "ddp.tc"
    assert main(["capture", f"{script}:ddp", "-o", str(out), "--gpus", "4", "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert (summary["gpus"], summary["programs"]) == (4, 1)
    assert load_workload(out).ranks == (0, 0, 0, 0)
    assert main(["predict", str(out), "--on", "dgx-a100", "--batch-size", "64", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["gpus"] == 4


def test_the_summary_says_how_many_ranks(capsys, script, tmp_path):
    out = tmp_path / "ddp.tc"
    assert main(["capture", f"{script}:ddp", "-o", str(out), "--gpus", "1024", "--ranks", "0"]) == 0
    assert "1024 ranks with 1 program, the first with" in capsys.readouterr().out


def test_a_function_for_one_gpu_is_refused(capsys, script, tmp_path):
    message = refusal(capsys, "capture", f"{script}:alone", "-o", tmp_path / "x.tc", "--gpus", 2)
    assert "rank and world_size" in message


def test_ranks_without_gpus_are_refused(capsys, script, tmp_path):
    assert "--gpus" in refusal(capsys, "capture", f"{script}:alone", "-o", tmp_path / "x.tc", "--ranks", "0")


@pytest.mark.parametrize("gpus", [0, -1, 10**9])
def test_impossible_numbers_are_refused(capsys, script, tmp_path, gpus):
    assert str(gpus) in refusal(capsys, "capture", f"{script}:ddp", "-o", tmp_path / "x.tc", "--gpus", gpus)


def test_a_step_for_one_gpu_becomes_data_parallel(capsys, script, tmp_path):
    out = tmp_path / "alone.tc"
    assert main(["capture", f"{script}:alone", "-o", str(out)]) == 0
    capsys.readouterr()
    assert main(["predict", str(out), "--on", "dgx-a100", "--gpus", "4", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["gpus"] == 4
    assert "collective" in result["per_family"]
