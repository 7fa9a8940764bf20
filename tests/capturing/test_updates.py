"""Which updates of a loop are its step, and how many samples they have."""

from fractions import Fraction
from pathlib import Path

import pytest

from traincast.capturing.from_file import capture_function
from traincast.capturing.updates import Update, choose_updates, compare_batch, find_cycle
from traincast.ir.workload import Workload

_HEAD = """
import random, sys, time
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)).cuda()
other = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
second = torch.optim.SGD(other.parameters(), lr=0.1)

def train(x):
    optimizer.zero_grad()
    model(x).sum().backward()
    optimizer.step()
"""


def _capture(folder: Path, loop: str, *arguments: str, **how: int) -> Workload:
    script = folder / "train.py"
    script.write_text(_HEAD + loop)
    return capture_function(str(script), arguments=arguments, **how)


@pytest.mark.parametrize(
    ("kinds", "found"),
    [
        ([1, 1, 1], (0, 1)), ([2, 1, 1, 1], (1, 1)), ([1, 2, 1, 2], (0, 2)), ([1, 1, 2, 1, 1, 2], (0, 3)),
        ([1, 2, 3, 4], None), ([1, 1, 1, 2], None), ([5], (0, 1)),
    ],
)  # fmt: skip
def test_the_shortest_cycle_is_found(kinds: list[int], found: tuple[int, int] | None):
    assert find_cycle(kinds) == found


def test_samples_of_other_lengths_are_one_step_and_other_ops_are_not():
    lengths = [Update(names=1, forms=form, ops=5, elements=1000 + form) for form in range(6)]
    chosen = choose_updates(lengths)
    assert (len(chosen.names), chosen.accepts(lengths[:1], sizes=True)) == (1, True)
    assert "sizes by 0.5%" in chosen.notes[0]
    ragged = [
        Update(names=1, forms=form, ops=5, elements=1000 + form, batches={0: {0: ((900 + form,),)}})
        for form in range(3)
    ]
    assert choose_updates(ragged).notes == ("samples differ from one update to the next (sizes by 0.2%): one is taken",)
    assert len(choose_updates([Update(names=n, forms=n, ops=5, elements=1000) for n in range(6)]).names) == 6


def test_an_unusual_update_is_left_out_and_named():
    usual = [Update(names=1, forms=1, ops=10) for _ in range(7)]
    choice = choose_updates([*usual, Update(names=2, forms=2, ops=90), *usual[:2]])
    assert choice.forms == (1,)
    assert "1 of 10 updates watched run other work (90 device ops instead of 10)" in choice.notes[0]


@pytest.mark.parametrize(
    ("shapes", "passes", "asked", "expected"),
    [
        (((32, 8),), 1, 32, (32, 1)), (((32, 8),), 4, 32, (32, 4)), (((8, 5),), 4, 32, (32, 1)),
        (((22, 8),), 1, 64, (64, Fraction(22, 64))), (((4096, 8),), 1, 0, (4096, 1)), ((), 1, 0, (1, 1)),
        (((100, 7), (2, 500)), 1, 32, (32, 1)), (((10, 32), (32,)), 1, 32, (32, 1)),
    ],
)  # fmt: skip
def test_samples_are_those_that_reach_the_model(shapes, passes, asked, expected):
    update = Update(passes=passes, batches={1: dict.fromkeys(range(passes), shapes)})
    assert compare_batch(update, asked)[:2] == expected


def test_accumulated_batches_are_counted(tmp_path: Path):
    loop = """
for i in range(400):
    model(torch.rand(32, 8, device="cuda")).sum().backward()
    if i % 8 == 7:
        optimizer.step(); optimizer.zero_grad()
"""
    step = _capture(tmp_path, loop, batch_size=32)
    assert (step.batch_size, step.samples) == (32, 256)
    assert "an update adds up gradients of 8 batches of 32 samples" in step.assumptions


def test_two_losses_of_one_batch_are_no_accumulation(tmp_path: Path):
    loop = """
for i in range(40):
    optimizer.zero_grad()
    real, fake = torch.rand(32, 8, device="cuda"), other(torch.rand(32, 8, device="cuda")).detach()
    model(real).sum().backward()
    model(fake).sum().backward()
    optimizer.step()
"""
    assert _capture(tmp_path, loop, batch_size=32).samples == 32


@pytest.mark.parametrize("shift", [0, 1, 3])
def test_a_cycle_of_updates_is_taken_whole_wherever_it_begins(shift: int, tmp_path: Path):
    loop = f"""
for i in range({shift}, 100):
    train(torch.rand(32, 8, device="cuda"))
    if i % 5 == 4:
        second.zero_grad(); other(torch.rand(32, 8, device="cuda")).sum().backward(); second.step()
"""
    step = _capture(tmp_path, loop, batch_size=32)
    assert (step.updates, step.samples) == (5, 160)
    names = [step.programs[0].symbolic[number].name for number in step.programs[0].columns.op_signature.tolist()]
    assert names.count("aten::addmm") == 5 * 2 + 4
    assert any("a cycle of 5 updates" in text for text in step.assumptions)


def test_an_evaluation_is_not_in_the_step(tmp_path: Path):
    loop = """
for epoch in range(30):
    for _ in range(2):
        train(torch.rand(32, 8, device="cuda"))
    model.eval()
    with torch.no_grad():
        for _ in range(20):
            model(torch.rand(32, 8, device="cuda"))
    model.train()
"""
    step = _capture(tmp_path, loop, batch_size=32)
    assert step.programs[0].num_ops < 40
    assert any("have an evaluation before them (20 forward passes" in text for text in step.assumptions)


def test_a_smaller_last_batch_is_not_the_step(tmp_path: Path):
    loop = """
data = TensorDataset(torch.rand(400, 8))
for epoch in range(20):
    for x, in DataLoader(data, batch_size=int(sys.argv[1])):
        train(x.cuda())
"""
    step = _capture(tmp_path, loop, "{batch_size}", batch_size=64)
    assert (step.samples, step.programs[0].rigid) == (64, "")
    assert any("have fewer samples (16 instead of 64" in text for text in step.assumptions)
    assert {s.inputs[1].shape[0] for s in step.programs[0].signatures if s.name == "aten::addmm"} == {64}


def test_the_batch_size_is_seen_where_none_is_stated(tmp_path: Path):
    step = _capture(tmp_path, "\nfor _ in range(30): train(torch.rand(4096, 8, device='cuda'))\n")
    assert step.samples == 4096
    assert "batch size 4096: the first dimension of what the model is given; none was stated" in step.assumptions


def test_random_depths_are_averaged(tmp_path: Path):
    loop = """
random.seed(1)
for _ in range(80):
    x = torch.rand(32, 8, device="cuda")
    for _ in range(random.randint(1, 30)):
        x = x.sin()
    train(x)
"""
    step = _capture(tmp_path, loop, batch_size=32)
    assert (step.updates, step.samples) == (8, 256)
    assert any("updates differ from one to the next" in text for text in step.assumptions)


def test_work_of_the_host_is_timed_and_told(tmp_path: Path):
    step = _capture(tmp_path, "\nfor _ in range(9): time.sleep(0.02); train(torch.rand(4, 8, device='cuda'))\n")
    assert any("are work of the host outside PyTorch" in text and "loader_ms" in text for text in step.assumptions)


def test_an_error_after_the_recorded_step_does_not_lose_it(tmp_path: Path):
    loop = (
        "\nfor i in range(9):\n    train(torch.rand(4, 8, device='cuda'))\n    if i == 4: raise ValueError('no data')\n"
    )
    step = _capture(tmp_path, loop, batch_size=4)
    assert any("ValueError: no data" in text for text in step.assumptions)
