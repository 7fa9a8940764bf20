"""Training scripts and loops as they are, without a function that makes their step."""

from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from torch import nn

import traincast
from traincast.ir.workload import Workload
from traincast.utils.errors import TraincastError

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


class _Wrapper(torch.optim.Optimizer):
    """As TorchRec's `KeyedOptimizer`: an optimizer by its methods, which has not been made as one."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.param_groups, self.state = inner, inner.param_groups, inner.state
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
        self._patch_step_function()

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        self.inner.step()


def test_the_step_of_an_optimizer_that_another_wraps_may_begin_inside_it() -> None:
    with traincast.recording(batch_size=4) as found:
        model = nn.Linear(8, 8).cuda()
        optimizer = _Wrapper(torch.optim.SGD(model.parameters(), lr=0.1))
        while True:
            model(torch.randn(4, 8, device="cuda")).sum().backward()
            optimizer.step()
    assert found.workload is not None and "aten::_foreach_add_" in names(found.workload)


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


def test_loops_without_updates_and_failing_scripts_are_named(tmp_path: Path) -> None:
    (tmp_path / "short.py").write_text(SCRIPT.format(updates=0))
    with pytest.raises(TraincastError, match=r"no optimizer of torch\.optim was called inside"):
        traincast.capture(str(tmp_path / "short.py"), arguments=["--width", "4"])
    with pytest.raises(TraincastError, match="exit code 2"):
        traincast.capture(str(tmp_path / "short.py"), arguments=["--nothing"])
    (tmp_path / "bad.py").write_text("1 / 0")
    with pytest.raises(TraincastError, match=r"bad.py:1: the run failed before its first update: Zero.*'s own$"):
        traincast.capture(str(tmp_path / "bad.py"))


SIZED = """
import argparse, torch
from torch import nn
from widths import WIDTH
WIDTH.append(4)
parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int)
parser.add_argument("--length", type=int, default=6)
told = parser.parse_args()
model = nn.Linear(sum(WIDTH), 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
while True:
    model(torch.randn({batch}, told.length, sum(WIDTH))).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def products(workload: Workload) -> list[tuple[int, ...]]:
    return [s.outputs[0].shape for s in workload.programs[0].signatures if s.name == "aten::addmm"]


def test_a_script_is_run_at_several_sizes_where_its_arguments_name_them(tmp_path: Path) -> None:
    (tmp_path / "widths.py").write_text("WIDTH = []")  # imported anew in each run, and so never longer than one
    (tmp_path / "train.py").write_text(SIZED.format(batch="told.batch_size"))
    train, sized = str(tmp_path / "train.py"), ["--batch-size", "{batch_size}"]
    by_batch = traincast.capture(train, batch_size=8, arguments=sized)
    assert products(by_batch.resized(batch_size=1000)) == [(6000, 3)]
    labelled = traincast.capture(train, batch_size=8, seq_len=6, arguments=sized)
    assert products(labelled.resized(batch_size=100)) == [(600, 3)]
    both = traincast.capture(train, batch_size=8, seq_len=16, arguments=[*sized, "--length={seq_len}"])
    assert products(both.resized(batch_size=100, seq_len=50)) == [(5000, 3)]
    with pytest.raises(TraincastError, match=r"give a sequence length as well \(`seq_len`\)"):
        traincast.capture(train, arguments=[*sized, "--length={seq_len}"])


def test_a_script_that_its_batch_size_does_not_reach_is_refused(tmp_path: Path) -> None:
    (tmp_path / "widths.py").write_text("WIDTH = []")
    (tmp_path / "train.py").write_text(SIZED.format(batch="32"))
    with pytest.raises(TraincastError, match="the same at batch sizes 8 and 5"):
        traincast.capture(str(tmp_path / "train.py"), batch_size=8, arguments=["--batch-size", "{batch_size}"])
    (tmp_path / "train.py").write_text(SIZED.format(batch="4 * 8"))
    one = traincast.capture(str(tmp_path / "train.py"), batch_size=32)
    with pytest.raises(TraincastError, match=r"write \{batch_size\} among its own arguments"):
        one.resized(batch_size=64)


def test_a_loop_is_recorded_at_several_sizes() -> None:
    def train(batch_size: int) -> None:
        model = nn.Linear(8, 8).cuda()
        optimizer = torch.optim.Adam(model.parameters())
        while True:
            optimizer.zero_grad()
            model(torch.randn(batch_size, 8, device="cuda")).sum().backward()
            optimizer.step()

    workload = traincast.record(train, batch_size=4)
    assert workload.name == "train" and products(workload.resized(batch_size=512)) == [(512, 8)]


RANKS = """
import argparse, os, torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

def main(rank, size, args):
    dist.init_process_group("nccl", rank=rank, world_size=size)
    model = DistributedDataParallel(nn.Linear(8, 8).to(rank), device_ids=[rank])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    while True:
        model(torch.randn(args.batch, 8).to(rank)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int)
    {start}
"""
STARTS = {
    "torchrun": 'main(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), parser.parse_args())',
    "spawn": "mp.spawn(main, args=(torch.cuda.device_count(), parser.parse_args()), nprocs=torch.cuda.device_count())",
}


@pytest.mark.parametrize("start", STARTS)
def test_a_script_of_several_processes_is_captured_rank_by_rank(tmp_path: Path, start: str) -> None:
    (tmp_path / "train.py").write_text(RANKS.replace("{start}", STARTS[start]))
    arguments = ["--batch", "{batch_size}"]
    workload = traincast.capture(str(tmp_path / "train.py"), batch_size=4, gpus=2, arguments=arguments)
    assert workload.ranks == (0, 0)
    assert names(workload).count("c10d::allreduce_") == 1
    resized = workload.resized(batch_size=64).programs[0]
    assert [s.outputs[0].shape for s in resized.signatures if s.name == "aten::addmm"] == [(64, 8)]


def test_a_script_of_several_processes_says_how_many_it_needs(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(RANKS.replace("{start}", "main(0, 2, parser.parse_args())"))
    with pytest.raises(TraincastError, match=r"train.py:9: init_process_group needs other processes.*`gpus`"):
        traincast.capture(str(tmp_path / "train.py"), batch_size=4, arguments=["--batch", "4"])
    with pytest.raises(TraincastError, match="say how many with `gpus`"):
        traincast.capture(str(tmp_path / "train.py"), batch_size=4, ranks=[0], arguments=["--batch", "4"])
    (tmp_path / "train.py").write_text(RANKS.replace("{start}", "mp.spawn(main, args=(3, None), nprocs=3)"))
    with pytest.raises(TraincastError, match="spawn starts 3 processes, but the capture has 2 GPUs"):
        traincast.capture(str(tmp_path / "train.py"), batch_size=4, gpus=2)


GRAPH = """
import torch
from torch import nn
model, x = nn.Linear(8, 8).cuda(), torch.randn(4, 8, device="cuda")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    optimizer.zero_grad()
    model(x).sum().backward()
    optimizer.step()
graph = torch.cuda.CUDAGraph()
"""


def test_a_script_that_warms_up_for_a_graph_says_that_the_step_has_none(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(GRAPH)
    workload = traincast.capture(str(tmp_path / "train.py"), batch_size=4)
    assert "recorded is a step before them" in workload.assumptions[-1]
