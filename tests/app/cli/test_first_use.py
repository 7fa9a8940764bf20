"""What new users typed, and what they are told now."""

from __future__ import annotations

import re
import sys

import pytest

import traincast
from traincast.app.cli.main import main


def test_tables_of_a_csv_need_no_names(tmp_path):
    file = tmp_path / "tables.csv"
    file.write_text("num_embeddings,embedding_dim\n1000,16\n2000,16\n")

    result = traincast.shard(file, on="dgx1-v100", gpus=2, batch_size=64, torchrec=False, time_limit=0.1)

    assert [table.name for table in result.task.tables] == ["t1", "t2"]


@pytest.mark.parametrize(("typed", "said"), [
    (["shard", "train.py", "--on", "dgx-a100", "--gpus", "2"], "list them in a .yaml, .json or .csv file"),
    (["fit"], "give --store DIR"),
])  # fmt: skip
def test_what_cannot_be_done_says_how(typed, said, capsys, monkeypatch):
    monkeypatch.delenv("TRAINCAST_DATA", raising=False)

    assert main(typed) == 2
    assert said in capsys.readouterr().err


def test_a_capture_is_written_beside_where_it_was_asked_for(tmp_path, monkeypatch, capsys):
    pytest.importorskip("torch")
    (tmp_path / "step.py").write_text(
        "import torch\n\ndef make_step(batch_size):\n    model = torch.nn.Linear(8, 8)\n"
        "    data = torch.randn(batch_size, 8)\n    return lambda: model(data).sum().backward()\n"
    )
    monkeypatch.chdir(tmp_path)

    assert main(["capture", "step.py:make_step"]) == 0

    assert (tmp_path / "step.tc").is_file()
    assert capsys.readouterr().out.startswith("step.tc: ")


def test_a_sweep_over_platforms_needs_no_other():
    result = traincast.sweep("dlrm-default", vary={"on": ["v100", "h100"]}, batch_size=64, processes=1)

    assert [row["on"] for row in result.rows] == ["v100", "h100"]


def test_a_sweep_takes_the_names_of_keywords():
    result = traincast.sweep("dlrm-default", on="v100", vary={"batch_size": [64, 128]}, processes=1)

    assert [row["batch-size"] for row in result.rows] == [64, 128]


def test_prices_of_the_list_are_asked_for_by_its_name():
    result = traincast.compare("dlrm-default", on=["v100", "h100"], price="list")

    assert result.cheapest is not None and "list price" in result.priced


def test_a_misspelt_platform_among_several_is_no_shorter_table(capsys):
    assert main(["compare", "dlrm-default", "--on", "v100,h1000,h100"]) == 2

    said = capsys.readouterr()
    assert "unknown platform 'h1000'" in said.err and not said.out


@pytest.mark.parametrize("asked", [("bert-large", 512), ("config.json", 1024), ("rotary.json", None)])
def test_more_tokens_than_a_model_has_positions_for_are_said(asked, tmp_path, monkeypatch):
    sizes = '"n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 100'
    (tmp_path / "config.json").write_text(f'{{"model_type": "gpt2", "n_positions": 1024, {sizes}}}')
    (tmp_path / "rotary.json").write_text(f'{{"model_type": "llama", "max_position_embeddings": 1024, {sizes}}}')
    monkeypatch.chdir(tmp_path)
    model, rows = asked

    long, short = (traincast.predict(model, on="h100", batch_size=1, seq_len=tokens) for tokens in (2048, 512))

    said = [warning for warning in long.warnings if "learned positions" in warning]
    assert [f"has {rows} learned positions" in warning for warning in said] == [True] * (rows is not None)
    assert not any("learned positions" in warning for warning in short.warnings)


SCRIPT = """
import torch
from torch.utils.data import DataLoader, TensorDataset

model = torch.nn.Linear(16, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(torch.randn(512, 16), torch.randn(512, 4))
for x, y in DataLoader(data, batch_size=64):
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
    print("a line of the script")
"""


def test_a_script_is_predicted_at_its_own_batch_size_or_the_one_given_and_its_prints_are_left_out(tmp_path, capsys):
    pytest.importorskip("torch")
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)

    assert main(["predict", str(script), "--on", "v100"]) == 0
    own = capsys.readouterr()
    assert main(["predict", str(script), "--on", "v100", "--batch-size", "4096"]) == 0
    given = capsys.readouterr()

    assert own.out.startswith("train (training) on Tesla V100-SXM2-16GB, batch 64\n")
    assert given.out.startswith("train (training) on Tesla V100-SXM2-16GB, batch 4096\n")
    assert own.out.split("\n")[1] != given.out.split("\n")[1]
    assert "a line of the script" not in own.out + own.err


def test_what_a_script_printed_is_shown_where_its_capture_fails(tmp_path, capsys):
    pytest.importorskip("torch")
    script = tmp_path / "train.py"
    script.write_text("print('a line of the script')\nraise ValueError('no data')\n")

    assert main(["predict", str(script), "--on", "v100"]) == 2

    said = capsys.readouterr()
    assert said.err.startswith("a line of the script\n") and "no data" in said.err


def test_text_is_as_wide_as_its_terminal(capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")

    assert main(["compare", "resnet50", "--on", "v100,a100-80gb,h100", "--batch-size", "128"]) == 0
    shown = capsys.readouterr().out.splitlines()

    assert max(map(len, shown)) <= 80
    assert any(re.match(r"a100-80gb  \d+ ms", line) for line in shown)


def test_a_launch_file_without_a_batch_is_not_guessed_for(tmp_path, capsys):
    file = tmp_path / "job.yaml"
    file.write_text("num_processes: 8\ndistributed_type: FSDP\n")

    assert main(["predict", "llama3-8b", "--on", "dgx-h100", "--from", str(file)]) == 2
    assert "does not state the batch" in capsys.readouterr().err
