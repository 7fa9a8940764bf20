"""Training scripts and loops as they are, without a function that makes their step."""

from pathlib import Path

import pytest
import torch
from torch import nn

import traincast
from traincast.errors import TraincastError
from traincast.workload.workload import Workload

SCRIPT = """
import argparse, torch
from torch import nn
parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int)
model = nn.Linear(16, parser.parse_args().width).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for number in range({updates}):
    for _ in range(2):
        model(torch.randn(8, 16, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def names(workload: Workload) -> list[str]:
    program = workload.programs[0]
    return [program.signatures[number].name for number in program.columns.op_signature.tolist()]


def test_a_script_is_captured_between_two_calls_of_its_optimizer(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT.format(updates=10**9))
    workload = traincast.capture(str(tmp_path / "train.py"), batch_size=8, arguments=["--width", "32"])
    ops = names(workload)
    assert (ops.count("aten::addmm"), ops.count("aten::_foreach_add_"), workload.name) == (2, 1, "train")
    assert [s.outputs[0].shape for s in workload.programs[0].signatures if s.name == "aten::addmm"] == [(8, 32)]


def test_a_loop_inside_a_block_ends_when_its_step_is_recorded() -> None:
    with traincast.recording(batch_size=4) as found:
        model = nn.Linear(8, 8).cuda()
        optimizer = torch.optim.Adam(model.parameters())
        while True:
            optimizer.zero_grad()
            model(torch.randn(4, 8, device="cuda")).sum().backward()
            optimizer.step()
    assert found.workload is not None
    assert names(found.workload).count("aten::addmm") == 1
    assert traincast.predict(found.workload, on="a100-80gb").iteration > 0


def test_too_few_updates_and_failing_scripts_are_named(tmp_path: Path) -> None:
    (tmp_path / "short.py").write_text(SCRIPT.format(updates=2))
    with pytest.raises(TraincastError, match="called three times"):
        traincast.capture(str(tmp_path / "short.py"), arguments=["--width", "4"])
    with pytest.raises(TraincastError, match="exit code 2"):
        traincast.capture(str(tmp_path / "short.py"), arguments=["--nothing"])
    (tmp_path / "bad.py").write_text("1 / 0")
    with pytest.raises(TraincastError, match=r"bad.py:1: the step failed: ZeroDivisionError"):
        traincast.capture(str(tmp_path / "bad.py"))
