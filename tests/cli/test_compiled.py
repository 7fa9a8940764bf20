import json

import pytest

from traincast.cli.main import main


def test_a_compiled_step_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", "bert-large", "--on", "a30", "--mode", "inference", "--compiled", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["compiled"] is True
    assert any("TorchInductor" in warning for warning in answer["warnings"])


@pytest.mark.parametrize("gpus", [[], ["--gpus", "8"]])
def test_a_compiled_training_step_is_refused(gpus: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", "dlrm-default", "--on", "dgx-a100", "--compiled", *gpus]) == 2
    error = capsys.readouterr().err
    assert "inference only" in error
    assert "Traceback" not in error
