"""What shells complete: the script for bash is run, the others are compared line by line."""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys

import pytest

from traincast.app.cli.commands.completion import describe_command, write_script
from traincast.app.cli.main import main
from traincast.app.cli.registry import list_commands


@pytest.fixture(scope="module")
def command():
    parser = argparse.ArgumentParser()
    parser.add_argument("workload", metavar="WORKLOAD")
    parser.add_argument("-o", "--out", help="where it's written")
    parser.add_argument("--dtype", choices=("fp32", "bf16"))
    parser.add_argument("--compiled", action="store_true", help="as a compiler runs it")
    return describe_command("predict", "how long a step takes", parser, {"WORKLOAD": ["resnet50", "vgg13"]})


def test_a_verb_is_described_by_its_parser(command):
    names = [option.names for option in command.options]
    assert names == [("-h", "--help"), ("-o", "--out"), ("--dtype",), ("--compiled",)]
    assert [option.takes_value for option in command.options] == [False, True, True, False]
    assert command.options[2].values == ("fp32", "bf16")
    assert command.words == ("resnet50", "vgg13")


def test_fish_has_a_line_for_everything(command):
    seen = "complete -c traincast -n '__fish_seen_subcommand_from predict'"
    assert write_script("fish", [command]).splitlines() == [
        "complete -c traincast -n __fish_use_subcommand -f -a predict -d 'how long a step takes'",
        f"{seen} -a 'resnet50 vgg13'",
        f"{seen} -s h -l help -d 'show this help message and exit'",
        f"{seen} -s o -l out -r -d 'where it\\'s written'",
        f"{seen} -l dtype -x -a 'fp32 bf16' -d ''",
        f"{seen} -l compiled -d 'as a compiler runs it'",
    ]


def test_zsh_runs_the_script_of_bash(command):
    assert write_script("zsh", [command]).endswith(write_script("bash", [command]))
    assert "bashcompinit" in write_script("zsh", [command])


@pytest.fixture(scope="module")
def completed():
    """What bash completes after words, by the script that the command prints."""
    if shutil.which("bash") is None:
        pytest.skip("no bash here")

    def complete(capsys, *words):
        assert main(["completion", "bash"]) == 0
        ask = (
            f"{capsys.readouterr().out}\nCOMP_WORDS=({' '.join(repr(word) for word in words)})\n"
            f'COMP_CWORD={len(words) - 1}\n_traincast\nprintf "%s\\n" "${{COMPREPLY[@]}}"'
        )
        return subprocess.run(["bash", "-c", ask], capture_output=True, text=True, check=True).stdout.split()

    return complete


def test_bash_completes_verbs(capsys, completed):
    assert completed(capsys, "traincast", "") == list(list_commands())
    assert completed(capsys, "traincast", "p") == ["predict", "plan", "platforms"]


def test_bash_completes_values_of_an_option(capsys, completed):
    assert completed(capsys, "traincast", "predict", "--dtype", "") == ["fp32", "tf32", "fp16", "bf16", "fp8", "fp4"]
    assert completed(capsys, "traincast", "predict", "--on", "dgx1") == ["dgx1-v100"]


def test_bash_leaves_files_to_the_shell(capsys, completed):
    assert completed(capsys, "traincast", "export", "-o", "") == []


def test_bash_completes_options_and_names(capsys, completed):
    assert completed(capsys, "traincast", "predict", "resnet50", "--cl") == ["--clock-mhz"]
    assert completed(capsys, "traincast", "predict", "resn") == ["resnet50"]
    assert completed(capsys, "traincast", "evaluate", "mul") == ["multi-gpu"]


def test_json_has_shell_and_script(capsys):
    assert main(["completion", "fish", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["shell"] == "fish"
    assert document["script"].startswith("complete -c traincast")


def test_an_unknown_shell_is_refused(capsys):
    assert main(["completion", "tcsh"]) == 2
    assert "invalid choice: 'tcsh'" in capsys.readouterr().err


def test_every_command_is_declared_without_torch():
    """Who only predicts has no torch: help and completion of all commands must not need it."""
    code = (
        "import sys; sys.modules['torch'] = None; from traincast.app.cli.main import main; main(['completion', 'bash'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout and not done.stderr
