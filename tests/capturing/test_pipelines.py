"""Ranks that talk to each other while they are captured one by one: pipelines, objects, plans, agreed numbers."""

from __future__ import annotations

import os
import sys
from types import ModuleType

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining

import traincast
from traincast.capturing import capture_distributed
from traincast.capturing.from_file import capture_function
from traincast.utils.errors import TraincastError


def captured(make_step, world_size=2, **how):
    return capture_distributed(make_step, world_size=world_size, batch_size=4, name="x", **how)


@pytest.mark.parametrize(("schedule", "ranks"), [("ScheduleGPipe", 2), ("Schedule1F1B", 3)])
def test_stages_of_a_pipeline_agree_and_send_to_each_other(schedule, ranks):
    # Given PyTorch's own schedule over stages that differ in width
    def make_step(batch, *, rank, world_size):
        stage = pipelining.PipelineStage(
            nn.Linear(8 * (rank + 1), 8 * (rank + 2)).cuda(), rank, world_size, torch.device("cuda")
        )
        run = getattr(pipelining, schedule)(stage, n_microbatches=4, loss_fn=lambda y, t: (y - t).square().mean())
        x = torch.zeros(4 * batch, 8, device="cuda")
        target = torch.zeros(4 * batch, 8 * (world_size + 1), device="cuda")
        last = {"target": target} if rank == world_size - 1 else {}
        return lambda: run.step(*([x] if rank == 0 else []), **last)

    # When every rank is captured
    workload = captured(make_step, ranks)

    # Then each micro-batch goes to the next stage and its gradient comes back, with the bytes of that boundary
    messages = [
        [(op.signature.scalar("source"), op.signature.scalar("target"), op.signature.scalar("bytes"))
         for op in workload.programs[number].ops if op.signature.scalar("collective") == "send_recv"]
        for number in workload.ranks
    ]  # fmt: skip
    for rank in range(ranks - 1):
        size = 4 * 8 * (rank + 2) * 4
        assert messages[rank].count((rank, rank + 1, size)) == messages[rank + 1].count((rank, rank + 1, size)) == 4
        assert messages[rank].count((rank + 1, rank, size)) == 4
    assert traincast.predict(workload, on="a100-80gb").iteration > 0
    assert not workload.programs[0].rigid


def test_objects_reach_the_ranks_they_are_sent_to():
    seen = {}

    def make_step(batch, *, rank, world_size):
        everyone = [None] * world_size
        dist.all_gather_object(everyone, f"from {rank}")
        told = [10 * rank]
        dist.broadcast_object_list(told, src=1)
        mine = [None]
        dist.scatter_object_list(mine, ["a", "b", "c"] if rank == 0 else None, src=0)
        gathered = [None] * world_size if rank == 2 else None
        dist.gather_object(rank**2, gathered, dst=2)
        seen[rank] = (everyone, told, mine, gathered)
        x = torch.zeros(batch, 4, device="cuda")
        return lambda: x + 1

    captured(make_step, 3)
    everyone = ["from 0", "from 1", "from 2"]
    assert seen == {0: (everyone, [10], ["a"], None), 1: (everyone, [10], ["b"], None),
                    2: (everyone, [10], ["c"], [0, 1, 4])}  # fmt: skip


def test_an_object_that_nobody_sends_is_refused():
    def make_step(batch, *, rank, world_size):
        if rank == 1:
            dist.recv_object_list([None], src=0)
        x = torch.zeros(batch, 4, device="cuda")
        return lambda: x + 1

    with pytest.raises(TraincastError, match="rank 1 waits for an object that no other rank sends"):
        captured(make_step)


@pytest.mark.parametrize(
    ("exchange", "expected"),
    [
        (lambda x, r: dist.all_gather_into_tensor(r, x), [3, 5, 3, 5]),
        (lambda x, r: dist.all_to_all_single(r[:2], x), [3, 3]),
        (lambda x, r: (r[:2].copy_(x), dist.all_reduce(r[:2])), [6, 10]),
        (lambda x, r: (r[:2].copy_(x), dist.all_reduce(r[:2], op=dist.ReduceOp.MAX)), [3, 5]),
    ],
)
def test_known_numbers_stay_known_in_a_collective_as_if_all_ranks_had_the_same(exchange, expected):
    seen = []

    def make_step(batch, *, rank, world_size):
        x, room = torch.tensor([3, 5], device="cuda"), torch.zeros(4, dtype=torch.long, device="cuda")

        def step():
            exchange(x, room)
            seen.append(room.tolist()[: len(expected)])

        return step

    captured(make_step, ranks=[0])
    assert seen[-1] == expected


def test_numbers_of_a_model_are_not_known_after_a_collective():
    def make_step(batch, *, rank, world_size):
        x = torch.randn(2, device="cuda").long()

        def step():
            dist.all_reduce(x)
            x.tolist()

        return step

    with pytest.raises(TraincastError, match="needs the values"):
        captured(make_step)


def test_a_rank_knows_its_device_and_how_many_there_are():
    seen = {}

    def make_step(batch, *, rank, world_size):
        x = torch.zeros(batch, device="cuda")
        seen[rank] = (x.device, torch.cuda.current_device(), torch.cuda.device_count(), x.get_device())
        return lambda: x + 1

    captured(make_step)
    assert seen == {rank: (torch.device("cuda", rank), rank, 2, rank) for rank in range(2)}


def test_names_imported_from_the_module_and_modules_imported_in_a_step(tmp_path):
    # Given a script that imports by name, and a module alongside it that does so only while it is captured
    (tmp_path / "named_here.py").write_text(
        "from torch.distributed import all_reduce, init_process_group\nfrom torch.cuda import Stream\n"
    )
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\n"
        "from torch.distributed import destroy_process_group, init_process_group\n"
        "def make_step(batch, *, rank, world_size):\n"
        "    import named_here\n"
        "    init_process_group('nccl', rank=rank, world_size=world_size)\n"
        "    named_here.init_process_group('nccl', rank=rank, world_size=world_size)\n"
        "    side, x = named_here.Stream(), torch.zeros(batch, device='cuda')\n"
        "    def step():\n"
        "        with torch.cuda.stream(side):\n"
        "            named_here.all_reduce(x)\n"
        "    return step\n"
    )
    before = dist.init_process_group

    # When two ranks are captured in this process, one after the other
    workload = capture_function(f"{script}:make_step", batch_size=2, gpus=2)

    # Then each had stubs of its own, and PyTorch's own are back
    assert workload.ranks == (0, 0)
    assert sys.modules["named_here"].init_process_group is before is dist.init_process_group
    assert sys.modules["named_here"].Stream is torch.cuda.Stream
    del sys.modules["named_here"]


def test_ranks_are_told_what_torchrun_tells_them():
    seen = {}

    def make_step(batch, *, rank, world_size):
        x = torch.zeros(batch, device="cuda")
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
        seen[rank] = ([os.environ[name] for name in names], x.device, torch.cuda.device_count())
        assert os.environ["MASTER_ADDR"] and os.environ["MASTER_PORT"]
        return lambda: x + 1

    captured(make_step, 16, ranks=[0, 9], rebatch=False)
    assert seen[9] == (["9", "16", "1", "8", "1"], torch.device("cuda", 1), 8)
    captured(make_step, 12, ranks=[0, 9], rebatch=False)  # no nodes of eight
    assert seen[9] == (["9", "12", "9", "12", "0"], torch.device("cuda", 9), 12)


def test_groups_say_they_are_what_was_asked_for():
    seen = []

    def make_step(batch, *, rank, world_size):
        before = dist.get_backend()
        dist.init_process_group("cpu:gloo,cuda:nccl")
        host = dist.new_group([0, 1], backend="gloo")
        seen.append((before, dist.get_backend(), dist.get_backend(host)))
        x = torch.zeros(batch, device="cuda")
        return lambda: x + 1

    captured(make_step, 2, rebatch=False)
    assert seen == [("nccl", "cpu:gloo,cuda:nccl", "gloo")] * 2


def test_nothing_that_libraries_keep_for_a_process_reaches_the_next_rank(monkeypatch):
    # Given libraries that keep groups and states from their first use on, and one of before the capture
    comm, state = ModuleType("comm"), ModuleType("state")
    comm._INTRA_PG = "of before"
    late = ModuleType("late")
    state.PartialState = type("PartialState", (), {"_shared_state": {"of": "before"}})
    monkeypatch.setitem(sys.modules, "torchrec.distributed.comm", comm)
    monkeypatch.setitem(sys.modules, "accelerate.state", state)
    found = []

    def make_step(batch, *, rank, world_size):
        found.append((comm._INTRA_PG, dict(state.PartialState._shared_state), os.environ.get("SOME_PLUGIN")))
        comm._INTRA_PG, os.environ["SOME_PLUGIN"] = dist.new_group([rank]), "on"
        if not rank:
            exec("def reduce(x, group=world): return group", vars(late) | {"world": dist.group.WORLD}, vars(late))
            monkeypatch.setitem(sys.modules, "late", late)
        state.PartialState._shared_state["rank"] = rank
        x = torch.zeros(batch, device="cuda")
        return lambda: x + 1

    # When two ranks are captured, then each starts anew and what was there comes back
    captured(make_step, 2, rebatch=False)
    assert found == [(None, {}, None)] * 2
    assert (comm._INTRA_PG, state.PartialState._shared_state) == ("of before", {"of": "before"})
    assert "SOME_PLUGIN" not in os.environ
    assert late.reduce(1) is None  # a default of a module that was imported in the middle
