"""Scripts that start the processes of their ranks themselves."""

from pathlib import Path

import pytest

import traincast
from traincast.utils.errors import TraincastError

SCRIPT = """
import multiprocessing, os, sys
import torch
import torch.distributed as dist
from torch import nn


def train(rank, world_size=2):
    dist.init_process_group("nccl", rank=rank, world_size=world_size)
    model = nn.Linear(16, 4 + rank).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.rand(8, 16, device="cuda")).sum().backward()
        dist.all_reduce(torch.ones(1, device="cuda"))
        optimizer.step()


if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    {start}
"""
STARTS = {
    "map": "with context.Pool(processes=2) as pool: pool.map(train, [0, 1])",
    "apply": "with multiprocessing.Pool(2) as pool: [r.get() for r in [pool.apply_async(train, (i,)) for i in (0, 1)]]",
    "process": "ps = [context.Process(target=train, kwargs=dict(rank=i)) for i in (0, 1)]; [p.start() for p in ps]",
}


@pytest.mark.parametrize("start", STARTS)
def test_every_rank_runs_its_own_call(tmp_path: Path, start: str) -> None:
    (tmp_path / "train.py").write_text(SCRIPT.format(start=STARTS[start]))
    workload = traincast.capture(str(tmp_path / "train.py"), batch_size=8, gpus=2)
    widths = [
        [s.outputs[0].shape for s in program.signatures if s.name == "aten::addmm"] for program in workload.programs
    ]
    assert widths == [[(8, 4)], [(8, 5)]]
    assert workload.ranks == (0, 1)


def test_a_pool_of_another_size_is_left_alone(tmp_path: Path) -> None:
    other = (
        "print(multiprocessing.get_context('fork').Pool(3).map(abs, [-1, -2, -3])[2]); train(int(os.environ['RANK']))"
    )
    (tmp_path / "train.py").write_text(SCRIPT.format(start=other))
    assert traincast.capture(str(tmp_path / "train.py"), batch_size=8, gpus=2, ranks=[0]).ranks == (0, 0)


def test_ranks_in_a_pool_of_another_size_are_told_so(tmp_path: Path) -> None:
    start = "import operator; context.Pool(3).map(operator.neg, ['', '', ''])"
    (tmp_path / "train.py").write_text(SCRIPT.format(start=start))
    with pytest.raises(TraincastError, match=r"in a pool of the script's own.* as many processes as the capture GPUs"):
        traincast.capture(str(tmp_path / "train.py"), batch_size=8, gpus=2)


def test_globals_that_one_rank_has_set_are_as_before_for_the_next(tmp_path: Path) -> None:
    (tmp_path / "once_only.py").write_text(
        "import torch\nSTARTED: bool = False\n"
        "def start():\n    global STARTED\n    first, STARTED = not STARTED, True\n    return first\n"
    )
    begun = "import once_only; assert once_only.start(); train(int(os.environ['RANK']))"
    package = tmp_path / "other"
    package.mkdir()
    (package / "train.py").write_text(
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n" + SCRIPT.format(start=begun)
    )
    assert len(traincast.capture(str(package / "train.py"), batch_size=8, gpus=2).programs) == 2
