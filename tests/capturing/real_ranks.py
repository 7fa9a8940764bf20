"""What really happens with two processes and gloo: events of PyTorch's profiler, and the buckets it reports.

Run as a module, `python -m tests.capturing.real_ranks FOLDER`: writes FOLDER/result.json.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

WORLD = 2
BATCH = 4
SEEN = ("aten::mm", "aten::addmm", "aten::mul", "aten::copy_", "aten::_foreach_copy_", "aten::div_", "c10d::")
FSDP_SEEN = ("aten::mm", "aten::addmm", "c10d::", "fsdp::")
DDP_OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "small buckets": {"bucket_cap_mb": 0.8},
    "views": {"bucket_cap_mb": 0.8, "gradient_as_bucket_view": True},
    "batched": {"bucket_cap_mb": 0.8, "batched_grad_copy": True},
    "no buffers": {"forward_sync_buffers": False},
    "finds unused": {"find_unused_parameters": True},
    "finds a spare layer": {"find_unused_parameters": True, "spare": True},
    "static": {"static_graph": True},
    "static with a spare layer": {"static_graph": True, "spare": True},
}
_KNOWN = {*signature(DistributedDataParallel).parameters, "spare"}  # 2.12 has no option for buffers
DDP_OPTIONS = {name: options for name, options in DDP_OPTIONS.items() if options.keys() <= _KNOWN}


class Net(nn.Module):
    """Layers are registered in another order than they are used, and one of them is used twice."""

    def __init__(self, *, spare: bool = False) -> None:
        super().__init__()
        if spare:
            self.spare = nn.Linear(30, 20)
        self.last = nn.Linear(500, 10)
        self.twice = nn.Linear(300, 300)
        self.first = nn.Linear(400, 600)
        self.norm = nn.BatchNorm1d(600)
        self.middle = nn.Linear(600, 300)
        self.wide = nn.Linear(300, 500)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.middle(self.norm(self.first(x)).relu())
        return self.last(self.wide(self.twice(self.twice(x).relu())))


def ddp_step(device: str, options: dict[str, Any], *, accumulate: bool = False) -> Callable[[], object]:
    spare = options.get("spare", False)
    model = DistributedDataParallel(
        Net(spare=spare).to(device), **{name: value for name, value in options.items() if name != "spare"}
    )
    inputs = torch.randn(BATCH, 400, device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)

    def step() -> object:
        optimizer.zero_grad()
        if accumulate:
            with model.no_sync():
                model(inputs).sum().backward()
        model(inputs).sum().backward()
        optimizer.step()
        return model

    return step


def fsdp_step(device: str) -> Callable[[], object]:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 130), nn.ReLU(), nn.Linear(130, 64)) for _ in range(3)))
    model.to(device)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    inputs = torch.randn(BATCH, 64, device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)

    def step() -> None:
        optimizer.zero_grad()
        model(inputs).sum().backward()
        optimizer.step()

    return step


def _events(step: Callable[[], object], wanted: tuple[str, ...]) -> list[str]:
    """Names of the wanted events of the fourth run, in order; what is inside one of them is not looked at.

    A static graph builds its buckets anew at the start of the third."""
    for _ in range(3):
        step()
    with torch.autograd.profiler.profile() as profiler:
        step()
    found: list[str] = []
    todo = sorted(profiler.kineto_results.experimental_event_tree(), key=lambda e: -e.start_time_ns)
    while todo:
        event = todo.pop()
        if event.name.startswith(wanted):
            found.append(event.name)
        else:
            todo.extend(sorted(event.children, key=lambda e: -e.start_time_ns))
    return found


def _worker(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=WORLD)
    result: dict[str, Any] = {"ddp": {}, "buckets": {}}
    for name, options in DDP_OPTIONS.items():
        step = ddp_step("cpu", options)
        result["ddp"][name] = _events(step, SEEN)
        data = step()._get_ddp_logging_data()  # type: ignore[attr-defined]
        result["buckets"][name] = [data.get(f"rebuilt_{what}") for what in ("per_bucket_param_indices", "bucket_sizes")]
    result["ddp"]["accumulate"] = _events(ddp_step("cpu", {}, accumulate=True), SEEN)
    result["fsdp"] = _events(fsdp_step("cpu"), FSDP_SEEN)
    if rank == 0:
        (Path(folder) / "result.json").write_text(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.multiprocessing.spawn(_worker, (sys.argv[1],), nprocs=WORLD)
