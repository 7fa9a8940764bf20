"""Code that reads values of tensors, with what its user states of them."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from traincast.capturing import capture_step
from traincast.capturing.assumptions import Assumptions
from traincast.costs.kernels.registry import make_lowering_context
from traincast.ir.file import load_workload, save_workload
from traincast.ir.workload import Workload
from traincast.utils.errors import TraincastError


def masked_loss(batch_size: int):
    model = nn.Linear(8, 10).cuda()
    x = torch.randn(batch_size, 16, 8, device="cuda")
    labels = torch.zeros(batch_size, 16, dtype=torch.long, device="cuda")

    def step():
        mask = model(x).sum(-1) > 0
        loss = F.cross_entropy(model(x[mask]), labels[mask])
        if loss > 100:
            raise AssertionError("taken the wrong way")
        loss.backward()

    return step


def experts(batch_size: int):
    gate, layers = nn.Linear(8, 4).cuda(), nn.ModuleList(nn.Linear(8, 8) for _ in range(4)).cuda()
    x = torch.randn(batch_size, 8, device="cuda")

    def step():
        chosen = gate(x).argmax(-1)
        counts = torch.bincount(chosen, minlength=4).tolist()
        parts = x[chosen.argsort()].split(counts)
        torch.cat([layer(part) for layer, part in zip(layers, parts, strict=True)]).sum().backward()

    return step


def graph(batch_size: int):
    layer = nn.Linear(8, 8).cuda()
    x, edges = torch.randn(100, 8, device="cuda"), torch.zeros(2, 50 * batch_size, dtype=torch.long, device="cuda")

    def step():
        kept = edges[:, edges[0] != edges[1]]
        nodes = int(kept.max()) + 1
        torch.zeros(nodes, 8, device="cuda").index_add(0, kept[1], layer(x)[kept[0]]).sum().backward()

    return step


def rows_of(workload: Workload, name: str) -> list[int]:
    return [s.outputs[0].shape[0] for s in workload.programs[0].signatures if s.name == name]


def test_a_stated_mask_and_branch_let_a_masked_loss_be_captured() -> None:
    workload = capture_step(
        masked_loss, batch_size=20, name="loss", assume={"mask": 0.15, "branch": False}
    )  # 15 % of 20 x 16 elements
    assert rows_of(workload, "aten::index") == [48, 48]
    assert [text.split(": ", 1)[1] for text in workload.assumptions] == [
        "a mask keeps 0.15 of its elements", "the decision on a tensor is False",
    ]  # fmt: skip
    assert rows_of(workload.resized(batch_size=100), "aten::index") == [240, 240]


def test_without_a_statement_the_message_says_which_one_would_do() -> None:
    with pytest.raises(TraincastError, match=r"test_assumptions.py:\d+: aten::index needs .* `assume` mask=SHARE"):
        capture_step(masked_loss, batch_size=20, name="loss")


def test_experts_share_the_tokens_equally_or_as_stated() -> None:
    def tokens(how: str) -> list[int]:
        workload = capture_step(experts, batch_size=64, name="moe", assume=[f"experts={how}"], rebatch=False)
        signatures = [s for s in workload.programs[0].signatures if s.name == "aten::addmm"]
        return sorted({s.outputs[0].shape[0] for s in signatures if s.outputs[0].shape[1] == 8})

    assert tokens("4") == [16]
    assert tokens("4:1.5") == [8, 13, 19, 24]


def test_edges_and_the_number_of_nodes_can_be_stated_by_line() -> None:
    line = graph.__code__.co_firstlineno + 6
    workload = capture_step(graph, batch_size=4, name="gcn", assume=["mask=0.5", f"item@test_assumptions.py:{line}=99"])
    assert rows_of(workload, "aten::index_add") == [100]
    assert workload.resized(batch_size=8).batch_size == 8


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mask", "must be KIND"), ("mask=2", "a share from 0 to 1"), ("masks=1", "Did you mean mask"),
        ("branch@x=true", "FILE:LINE"), ("experts=8:9", "how many there are"), ("lengths=", "integers"),
    ],
)  # fmt: skip
def test_a_statement_that_means_nothing_is_named(text: str, message: str) -> None:
    with pytest.raises(TraincastError, match=message):
        capture_step(masked_loss, batch_size=4, name="loss", assume=[text])


@pytest.mark.parametrize(("assume", "expected"), [({"lengths": "2,0"}, [2, 0, 2, 0]), ({"item": 1}, [1, 1, 1, 1])])
def test_an_environment_on_the_host_reads_stated_actions(assume, expected):
    taken = []

    def make_step(batch):
        scores = torch.randn(batch, 3, device="cuda")
        return lambda: taken.append(torch.distributions.Categorical(logits=scores).sample().cpu().numpy())

    capture_step(make_step, batch_size=4, name="x", rebatch=False, assume=assume)
    assert taken[-1].tolist() == expected
    with pytest.raises(TraincastError, match=r"tensor.numpy\(\) needs the values .* item=NUMBER for all of them"):
        capture_step(make_step, batch_size=4, name="x", rebatch=False)


def test_a_step_of_many_modules_can_be_kept(tmp_path: Path) -> None:
    """Given more modules than a note of a workload holds lines for, when the step is saved, then the largest are in."""
    assumptions = Assumptions()
    for number in range(300):
        assumptions.places[f"Net.stage.block{number}.conv"] = (number, f"train.py:{number}")
    program = capture_step(lambda batch: lambda: torch.ones(batch, device="cuda").relu(), batch_size=4, name="one")

    save_workload(replace(program, meta=assumptions.list_meta()), tmp_path / "many.tc")

    lines = load_workload(tmp_path / "many.tc").lines
    assert lines["Net.stage.block299.conv"] == "train.py:299"
    assert 20 < len(lines) < 300


def test_a_step_that_lets_cudnn_search_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given `cudnn.benchmark`, when a step is captured, then its convolutions are searched for."""
    plain = capture_step(lambda batch: lambda: torch.ones(batch, device="cuda").relu(), batch_size=4, name="one")
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    found = capture_step(lambda batch: lambda: torch.ones(batch, device="cuda").relu(), batch_size=4, name="one")
    assert (make_lowering_context(plain).searched, make_lowering_context(found).searched) == (False, True)
