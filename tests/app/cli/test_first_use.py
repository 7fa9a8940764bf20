"""What new users typed, and what they are told now."""

from __future__ import annotations

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
