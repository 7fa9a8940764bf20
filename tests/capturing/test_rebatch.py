"""Steps whose sizes used to be good for one batch size only."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from traincast.capturing import capture_distributed, capture_step
from traincast.capturing.from_file import capture_function
from traincast.ir.memory import compute_peak_memory
from traincast.ir.workload import CAPTURED_AT


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


def test_fractions_may_change_with_the_batch_size() -> None:
    def make_step(batch_size: int):
        model, x = nn.Linear(8, 4).cuda(), torch.randn(batch_size, 8, device="cuda")
        return lambda: model(x).sum().mul(100.0 / batch_size).backward()

    workload = capture_step(make_step, batch_size=8, name="share").resized(batch_size=100)
    assert not workload.programs[0].rigid and not workload.assumptions


def test_a_batch_that_is_divided_can_be_used_at_multiples() -> None:
    def make_step(batch_size: int):
        model, x = nn.Linear(8, 4).cuda(), torch.randn(batch_size, 8, device="cuda")
        return lambda: model(x).square().mean(1).topk(batch_size // 4)[0].mean().backward()

    workload = capture_step(make_step, batch_size=16, name="hard")
    assert "multiples of batch 16" in workload.assumptions[0]
    shapes = [s.outputs[0].shape for s in workload.resized(batch_size=40).programs[0].signatures if "topk" in s.name]
    assert shapes == [(10,)]


def test_sizes_drawn_at_random_grow_with_the_batch_and_are_said() -> None:
    def make_step(batch_size: int):
        table = nn.EmbeddingBag(100, 8, mode="sum").cuda()

        def step():
            lengths = torch.randint(1, 8, (batch_size,))
            starts = lengths.cumsum(0) - lengths
            table(torch.randint(0, 100, (int(lengths.sum()),)).cuda(), starts.cuda()).sum().backward()

        return step

    workload = capture_step(make_step, batch_size=64, name="bags")
    assert "sizes that differ from draw to draw are those drawn at batch 64" in workload.assumptions[0]
    small, large = (_looked_up(workload.resized(batch_size=batch)) for batch in (64, 640))
    assert 192 < small < 320 and large == 10 * small


def _looked_up(workload) -> int:
    found = next(s for s in workload.programs[0].signatures if s.name == "aten::_embedding_bag")
    return found.inputs[1].shape[0]


def test_samples_that_only_lie_there_are_no_part_of_what_must_agree() -> None:
    def make_step(batch_size: int):
        model, x = nn.Linear(8, 4).cuda(), torch.randn(batch_size, 8, device="cuda")
        kept = [(torch.randn(8, device="cuda"), torch.randn(8)) for _ in range(3 * batch_size)]

        def step():
            assert kept
            model(x).sum().backward()

        return step

    workload = capture_step(make_step, batch_size=8, name="replay")
    assert not workload.programs[0].rigid
    small, large = (
        compute_peak_memory(workload.resized(batch_size=batch).programs[0]).peak_bytes for batch in (8, 108)
    )
    assert large - small >= 100 * (3 * 32 + 32)


def test_a_batch_far_above_the_captured_one_is_told():
    def make_step(batch):
        model = torch.nn.Linear(8, 8).cuda()
        x = torch.rand(batch, 8, device="cuda")
        return lambda: model(model(x)[: min(batch, 512)]).sum().backward()

    workload = capture_function(make_step, batch_size=64)
    assert workload.resized(batch_size=256).assumptions == ()
    (told,) = workload.resized(batch_size=8192).assumptions
    assert told.startswith("batch 8192 is 128 times the one captured (64)")


def test_data_on_the_device_that_a_batch_is_cut_out_of_may_have_any_length() -> None:
    def make_step(batch_size: int):
        text = torch.arange(2000, device="cuda")
        rows = len(text) // batch_size  # 100 of 20, 181 of 11: of no polynomial
        folded = text[: rows * batch_size].view(batch_size, rows).t().contiguous()
        table = nn.Embedding(2000, 8).cuda()
        return lambda: table(folded[8:16]).sum().backward()

    workload = capture_step(make_step, batch_size=20, name="folded").resized(batch_size=50)
    (looked_up,) = [s.outputs[0].shape for s in workload.programs[0].signatures if s.name == "aten::embedding"]
    assert looked_up == (8, 50, 8)


def test_a_size_that_work_is_done_with_still_has_to_be_a_polynomial() -> None:
    def make_step(batch_size: int):
        text = torch.rand(2000 // batch_size, 8, device="cuda")
        model = nn.Linear(8, 8).cuda()
        return lambda: (model(text).sum() + model(torch.rand(batch_size, 8, device="cuda")).sum()).backward()

    assert capture_step(make_step, batch_size=20, name="folded").programs[0].rigid


def test_ops_of_the_host_that_grow_in_number_with_the_batch_stay_those_of_the_first_size() -> None:
    # Given a loop that reads its samples one by one, as nanoGPT does, then works on all of them
    texts = torch.arange(400)

    def make_step(batch):
        model = nn.Embedding(400, 8).cuda()

        def step():
            tokens = torch.stack([texts[int(start) : int(start) + 16] for start in torch.randint(100, (batch,))])
            model(tokens.pin_memory().to("cuda")).sum().backward()

        return step

    # When it is captured
    workload = capture_step(make_step, batch_size=12, name="x")
    program = workload.programs[0]

    # Then it has any size: what the device does grows with the batch, the ops of the host stay, and that is said
    (lookup,) = [op for op in program.resized(40, 0).ops if op.name == "aten::embedding"]
    assert lookup.outputs[0].spec.shape == (40, 16, 8) and not program.rigid
    assert sum(op.name == "aten::slice" for op in program.ops) == 12
    assert any("grow in number with the batch" in text for text in workload.assumptions)
    # And away from that size the interval is wider
    captured = replace(workload, meta={**workload.meta, CAPTURED_AT: "12"})
    assert captured.measure_distance(12) == 0 < captured.measure_distance(14) < captured.measure_distance(6)


def test_a_step_that_prints_does_so_once(capfd: pytest.CaptureFixture[str]) -> None:
    def make_step(batch: int):
        print("made")
        model = nn.Linear(8, 8).cuda()

        def step() -> None:
            print("run")
            model(torch.rand(batch, 8, device="cuda")).sum().backward()

        return step

    capture_step(make_step, batch_size=8, name="x")
    assert capfd.readouterr().out == "made\nrun\n"
