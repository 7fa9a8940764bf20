import json

import pytest

from traincast.app.cli.main import main


def test_a_compiled_step_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", "bert-large", "--on", "a30", "--mode", "inference", "--compiled", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["compiled"] is True
    assert any("TorchInductor" in warning for warning in result["warnings"])


def test_a_compiled_training_step_says_what_it_stores(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", "resnet50", "--on", "a100-80gb", "--compiled", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert any("which results a compiler computes again" in warning for warning in result["warnings"])


def test_a_compiled_step_of_sharded_tables_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", "dlrm-default", "--on", "dgx-a100", "--compiled", "--gpus", "8"]) == 2
    error = capsys.readouterr().err
    assert "shards its tables" in error
    assert "Traceback" not in error
