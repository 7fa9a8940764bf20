"""Commands of another distribution: listed, run, and named when they are not installed."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from traincast.app.cli.main import main
from traincast.utils import plugins


@pytest.fixture
def alone(monkeypatch):
    """Traincast as its wheel installs it: no other distribution adds anything."""
    monkeypatch.setattr("importlib.metadata.entry_points", lambda *, group: [])
    plugins.find_plugins.cache_clear()
    yield
    plugins.find_plugins.cache_clear()


def test_help_lists_added_commands_where_they_are_installed(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])

    assert "accuracy tables: predicted against measured" in capsys.readouterr().out


def test_a_command_that_is_not_installed_says_in_one_line_what_to_install(alone, capsys):
    assert main(["evaluate", "dlrm"]) == 2

    said = capsys.readouterr().err
    assert said.startswith("traincast: traincast evaluate needs the distribution traincast-evaluation")
    assert said.count("\n") == 1


def test_help_does_not_list_what_is_not_installed(alone, capsys):
    with pytest.raises(SystemExit):
        main(["--help"])

    assert "evaluate" not in capsys.readouterr().out


def test_shell_completion_knows_added_commands(capsys):
    assert main(["completion", "bash"]) == 0

    assert "--max-mape" in capsys.readouterr().out


def test_fit_alone_asks_for_a_store(alone, capsys):
    assert main(["fit"]) == 2
    assert "give a --store" in capsys.readouterr().err

    assert main(["fit", "--data", "somewhere"]) == 2
    assert "unknown option '--data'" in capsys.readouterr().err


def test_a_report_of_an_evaluation_says_what_to_install(alone, capsys, tmp_path):
    file = tmp_path / "cnn.json"
    file.write_text(json.dumps({"summary": []}))

    assert main(["report", str(file), "-o", str(tmp_path / "report.html")]) == 2
    assert "the report of an evaluation needs the distribution traincast-evaluation" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "needs"),
    [
        (["predict", "dlrm-mlperf", "--on", "dgx-a100", "--gpus", "8", "--program", "hugectr"], "hugectr-dlrm"),
        (["measure", "dlrm-default"], "dlrm-default as a PyTorch model (FILE.py:FUNCTION is your own)"),
        (["measure", "resnet50", "--gpus", "2"], "resnet50 as a PyTorch model (FILE.py:FUNCTION is your own)"),
    ],
)
def test_models_of_another_distribution_say_what_to_install(alone, capsys, command, needs):
    assert main(command) == 2

    said = capsys.readouterr().err
    assert f"{needs} needs the distribution traincast-evaluation: run `pip install ./evaluation`" in said
    assert said.count("\n") == 1


def test_a_model_that_nobody_has_is_unknown(alone, capsys):
    assert main(["measure", "resnet5"]) == 2

    assert "unknown model 'resnet5'. Did you mean resnet50" in capsys.readouterr().err


def test_a_built_in_command_looks_nothing_up():
    code = (
        "import sys; from traincast.app.cli.main import main\n"
        "import importlib.metadata; importlib.metadata.entry_points = lambda **_: sys.exit(9)\n"
        "sys.exit(main(['predict', 'dlrm-default', '--on', 'v100']))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0
