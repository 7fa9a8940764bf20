"""Steps whose sizes used to be good for one batch size only."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from traincast.capturing import capture_distributed, capture_step


def test_scores_of_all_samples_against_all_grow_with_the_square_of_the_batch() -> None:
    def make_step(batch_size: int):
        model, x = nn.Linear(8, 4).cuda(), torch.randn(batch_size, 8, device="cuda")
        return lambda: F.cross_entropy(model(x) @ model(x).t(), torch.arange(batch_size, device="cuda")).backward()

    workload = capture_step(make_step, batch_size=8, name="clip").resized(batch_size=100)
    shapes = [s.outputs[0].shape for s in workload.programs[0].signatures if s.name == "aten::_log_softmax"]
    assert shapes == [(100, 100)]


def test_a_batch_of_one_takes_the_ops_of_larger_ones_and_says_so() -> None:
    def make_step(batch_size: int):
        model, x = (
            nn.Sequential(*(nn.Linear(8, 8) for _ in range(40))).cuda(),
            torch.randn(batch_size, 8, device="cuda"),
        )

        def step():
            y = model(x)
            (y if batch_size == 1 else y.clone()).sum().backward()

        return step

    workload = capture_step(make_step, batch_size=1, name="one")
    assert workload.resized(batch_size=64).batch_size == 64
    assert "taken are the" in workload.assumptions[0]


def test_a_length_that_no_polynomial_fits_leaves_the_batch_size_free() -> None:
    def make_step(batch_size: int, seq_len: int):
        model, x = nn.Linear(8, 8).cuda(), torch.randn(batch_size, seq_len // 3 * 7, 8, device="cuda")
        return lambda: model(x).sum().backward()

    workload = capture_step(make_step, batch_size=4, seq_len=128, name="odd")
    assert workload.resized(batch_size=32).batch_size == 32
    assert "128 tokens only" in workload.contents()


def test_what_a_data_loader_does_is_no_part_of_the_step() -> None:
    def make_step(batch_size: int):
        samples = TensorDataset(torch.randn(50_000, 8), torch.zeros(50_000, dtype=torch.long))
        batches = iter(DataLoader(samples, batch_size=batch_size, shuffle=True, num_workers=2, pin_memory=True))
        model = nn.Linear(8, 4).cuda()

        def step():
            x, y = next(batches)
            F.cross_entropy(model(x.cuda(non_blocking=True)), y.cuda()).backward()

        return step

    workload = capture_step(make_step, batch_size=8, name="loaded")
    program = workload.resized(batch_size=64).programs[0]
    assert [s.inputs[0].device for s in program.signatures if s.name == "aten::_to_copy"] == ["cpu:pinned"] * 2


def test_ranks_that_score_the_samples_of_all_against_all() -> None:
    # Given two towers under DDP: every rank gathers the items of all ranks as negatives
    def make_step(batch_size: int, *, rank: int, world_size: int):
        model = DistributedDataParallel(nn.Linear(8, 4).cuda())
        x = torch.randn(batch_size, 8, device="cuda")
        labels = torch.arange(batch_size, device="cuda") + rank * batch_size

        def step():
            users, items = model(x), model(x).detach()
            everyone = torch.empty(world_size * batch_size, 4, device="cuda")
            dist.all_gather_into_tensor(everyone, items)
            F.cross_entropy(users @ everyone.t(), labels).backward()

        return step

    # Then it can be used at any batch size
    workload = capture_distributed(make_step, world_size=2, batch_size=8, name="towers").resized(batch_size=100)
    for program in workload.programs:
        assert [s.outputs[0].shape for s in program.signatures if s.name == "aten::_log_softmax"] == [(100, 200)]


def test_ranks_with_a_length_that_no_polynomial_fits_leave_the_batch_size_free() -> None:
    def make_step(batch_size: int, seq_len: int, *, rank: int, world_size: int):
        model = DistributedDataParallel(nn.Linear(8, 8 * (rank + 1)).cuda())
        x = torch.randn(batch_size, seq_len // 3 * 7, 8, device="cuda")
        return lambda: model(x).sum().backward()

    workload = capture_distributed(make_step, world_size=2, batch_size=4, seq_len=128, name="odd")
    assert workload.resized(batch_size=32).batch_size == 32
    assert "128 tokens only" in workload.contents()
    one, other = workload.programs
    assert one.columns is other.columns
