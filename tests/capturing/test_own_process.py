"""A captured file runs in a process of its own: what it does natively changes nothing, and its crash loses no step."""

import os
import sys
from pathlib import Path

import pytest

import traincast
from traincast.ir.workload import KEPT_BACK
from traincast.utils.errors import TraincastError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="what holds a process back is Linux's")
_LOOP = """
import ctypes, faulthandler, os, sys, time
import torch
from torch import nn

faulthandler.disable()
{before}
model = nn.Linear(8, 8).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for i in range(40):
    optimizer.zero_grad()
    model(torch.rand(4, 8, device="cuda")).sum().backward()
    optimizer.step()
    {inside}
"""


def _write_script(folder: Path, before: str = "", inside: str = "") -> str:
    script = folder / "train.py"
    script.write_text(_LOOP.format(before=before, inside=inside))
    return str(script)


def test_a_read_only_home_is_enough_and_stays_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    home = tmp_path / "home"
    home.mkdir()
    (home / "model.pt").write_text("precious")
    deeds = 'torch.save(model, "model.pt"); open(os.path.expanduser("~/.cache_of_mine"), "w").close()'
    native = 'ctypes.CDLL(None).unlink(b"model.pt"); os.system("rm -f model.pt 2> /dev/null; touch new 2> /dev/null")'
    script = _write_script(home, native, deeds)
    home.chmod(0o555)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(home)
    states = {path: path.stat().st_mtime_ns for path in [home, *home.iterdir()]}
    workload = traincast.capture(script)
    assert {path: path.stat().st_mtime_ns for path in [home, *home.iterdir()]} == states
    assert workload.meta[KEPT_BACK] == "wrote model.pt, .cache_of_mine"


def test_a_crash_after_the_first_step_keeps_that(tmp_path: Path):
    script = _write_script(tmp_path, inside="i < 6 or ctypes.string_at(0)")
    workload = traincast.capture(script, batch_size=4)
    assert workload.programs[0].num_ops > 10 and workload.batch_size == 4
    assert "SIGSEGV" in workload.programs[0].rigid and "SIGSEGV" in workload.assumptions[-1]


@pytest.mark.parametrize(("before", "limit", "told"), [("ctypes.string_at(0)", 60.0, "SIGSEGV.*before a step"),
                                                       ("time.sleep(60)", 0.5, "not done after 0.5 s")])  # fmt: skip
def test_a_process_that_ends_before_its_step_is_told_in_one_line(before: str, limit: float, told: str, tmp_path: Path):
    with pytest.raises(TraincastError, match=told):
        traincast.capture(_write_script(tmp_path, before), time_limit_s=limit)


def test_what_the_file_changes_in_its_process_is_gone_with_it(tmp_path: Path):
    script = _write_script(tmp_path, 'import builtins; builtins.print = None; os.environ["OF_THE_SCRIPT"] = "1"')
    traincast.capture(script)
    assert print is not None and "OF_THE_SCRIPT" not in os.environ
