"""A script that is not told its batch size: where it has it is found, and it is run at other sizes."""

from pathlib import Path

import pytest

import traincast
from traincast.capturing import script
from traincast.ir.workload import Workload

LOOP = """
import argparse, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
{head}
model = nn.Linear(16, 4).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for batch in {batches}:
    model(batch.cuda()).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
PLACES = {
    "a constant": ("batch_size = 24", "(torch.randn(batch_size, 16) for _ in range(99))"),
    "a default": ("def draw(batch_size=24):\n    return torch.randn(batch_size, 16)", "(draw() for _ in range(99))"),
    "an entry": ('settings = {"batch_size": 24}', '(torch.randn(settings["batch_size"], 16) for _ in range(99))'),
    "an option": (
        'parser = argparse.ArgumentParser()\nparser.add_argument("-b", "--batch-size", type=int, default=24)\n'
        "told = parser.parse_args()",
        "(torch.randn(told.batch_size, 16) for _ in range(99))",
    ),
    "a loader": (
        "def load(data, samples):\n    return DataLoader(data, samples)",
        "(x for x, in load(TensorDataset(torch.randn(2400, 16)), 24))",
    ),
    "a dimension": ("", "(torch.randn(24, 16) for _ in range(99))"),
}  # fmt: skip


def capture(folder: Path, head: str, batches: str, **said: object) -> Workload:
    (folder / "train.py").write_text(LOOP.format(head=head, batches=batches))
    return traincast.capture(str(folder / "train.py"), **said)  # type: ignore[arg-type]


@pytest.mark.parametrize("place", PLACES)
def test_a_batch_size_is_found_where_scripts_have_it(tmp_path: Path, place: str) -> None:
    workload = capture(tmp_path, *PLACES[place])
    assert not workload.programs[0].rigid
    assert workload.batch_size == 24
    shapes = {s.outputs[0].shape for s in workload.programs[0].resized(100, 0).signatures if s.name == "aten::addmm"}
    assert shapes == {(100, 4)}
    assert any("run at other batch sizes by changing" in text for text in workload.assumptions)


def test_a_number_that_also_makes_the_model_is_no_batch_size(tmp_path: Path) -> None:
    made = LOOP.format(head="batch_size = 24", batches="(torch.randn(batch_size, batch_size) for _ in range(99))")
    (tmp_path / "train.py").write_text(made.replace("nn.Linear(16, 4)", "nn.Linear(batch_size, 4)"))
    workload = traincast.capture(str(tmp_path / "train.py"))
    assert "changes the model as well" in workload.programs[0].rigid


def test_a_script_whose_batch_size_is_nowhere_keeps_its_size(tmp_path: Path) -> None:
    workload = capture(tmp_path, "size = 4 * 6", "(torch.randn(size, 16) for _ in range(99))", batch_size=24)
    assert "where the script has its batch size was not found" in workload.programs[0].rigid


def test_a_script_prints_once_though_it_is_run_at_several_sizes(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    capture(tmp_path, 'print("built")', "(torch.randn(24, 16) for _ in range(99))")
    assert capfd.readouterr().out.count("built") == 1


def test_a_script_that_fails_after_its_first_update_gives_that_one(tmp_path: Path) -> None:
    workload = capture(tmp_path, "", "(make() for make in [lambda: torch.randn(24, 16), lambda: 1 / 0])")
    assert any("ends after 1 updates" in text for text in workload.assumptions)


def test_the_last_batch_of_an_epoch_is_no_step_where_sizes_do_not_tell(tmp_path: Path) -> None:
    head = (
        "def collate(graphs):\n    return torch.cat([torch.randn(3 + i % 5, 16) for i in graphs])\n"
        "loader = DataLoader(list(range(100)), {size}, collate_fn=collate)"
    )
    batches = "(nodes for _ in range(40) for nodes in loader)"
    workload = capture(tmp_path, head.format(size=24), batches, batch_size=24)
    assert not workload.programs[0].rigid
    rows = {s.outputs[0].shape[0] for s in workload.programs[0].signatures if s.name == "aten::addmm"}
    assert min(rows) > 24 * 4  # the last batch has 4 samples, about 20 rows


def test_evaluations_before_the_first_update_are_not_run_again_and_again(tmp_path: Path) -> None:
    head = (
        "calls = []\nclass Head(nn.Linear):\n    def forward(self, x):\n        calls.append(1)\n"
        "        return super().forward(x)"
    )
    text = (
        LOOP.format(head=head, batches="evaluate()")
        .replace("nn.Linear(16, 4)", "Head(16, 4)")
        .replace(
            "for batch in evaluate():",
            "model.eval()\nwith torch.no_grad():\n    for _ in range(50):\n        model(torch.randn(24, 16).cuda())\n"
            "assert len(calls) < 10\nmodel.train()\nfor batch in (torch.randn(24, 16) for _ in range(99)):",
        )
    )
    (tmp_path / "train.py").write_text(text)
    workload = traincast.capture(str(tmp_path / "train.py"), batch_size=24)
    assert [s.outputs[0].shape for s in workload.programs[0].signatures if s.name == "aten::addmm"] == [(24, 4)]


def test_a_script_keeps_its_own_meaning_of_annotations(tmp_path: Path) -> None:
    head = "batch_size = 24\ndef draw(size: int) -> None: ...\nassert draw.__annotations__['size'] is int"
    workload = capture(tmp_path, head, "(torch.randn(batch_size, 16) for _ in range(99))")
    assert not workload.programs[0].rigid


@pytest.mark.parametrize(
    ("limit", "value", "said"),
    [
        ("_LONG_RUN_S", 0.0, "runs took"),
        ("_LONG_RUNS_S", 0.0, "runs took"),
        ("_OF_FREE", -1e6, "at batch size 13 the script's data may not fit"),
    ],
)
def test_a_script_that_takes_long_or_much_is_not_run_at_other_sizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, value: float, said: str
) -> None:
    monkeypatch.setattr(script, limit, value)
    (tmp_path / "train.py").write_text(LOOP.format(head="", batches="(torch.randn(24, 16) for _ in range(99))"))
    workload = script.capture_script(str(tmp_path / "train.py"), [], batch_size=24)
    assert f"recorded at one size only: {said}" in workload.programs[0].rigid
