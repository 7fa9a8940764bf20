"""Absurd values of every option and positional of every command: rejected in one line, or answered; never worse."""

from __future__ import annotations

import argparse
import json
import signal

import pytest

from tests.traces.timelines import rank_events
from traincast.app.cli.main import main
from traincast.app.cli.registry import build_parsers, list_commands

ABSURD = (
    "", " ", "-1", "0", "0.5", "1e999", "-1e308", "nan", "-inf", "inf", str(10**30), "9" * 5000, "x" * 5000, "a\nb",
    "\x1b[2J", "/", ".", "..", "/dev/null", "/dev/full", "no/such/folder/x", "\u202e", "\U0001f600", "\udcff", "\ud800",
    "a\0b", "--", ",", "1,,2", "1,-1", "None", "{}", "%s%n", "../../x.yaml", "x.tc", "x.toml", "x.json", "x.parquet",
)  # fmt: skip
ABSURD_NAMES = (
    "",
    " ",
    "x" * 5000,
    "a\nb",
    "/",
    ".",
    "..",
    "/dev/null",
    "no/such/folder/x",
    "\udcff",
    "\ud800",
    "a\0b",
    "--",
)
NAMES = {"out", "trace_out", "workload_out", "torchrec_out", "name"}
"""Where any name is fine, so that a value which is absurd elsewhere costs a whole answer."""
_PREDICTING = ("compare", "fits", "report", "whatif", "sweep")  # commands that take the options of predict
SECONDS = 20  # of CPU time for one command; all of them take far less than one
_PATIENCE = 300  # seconds by the clock until a command that computes nothing counts as a hang

TABLES = "tables:\n- {name: a, rows: 1000, dim: 16}\n- {name: b, rows: 2000, dim: 8}\n"
STEP = """
import torch

def make_step(batch_size):
    layer = torch.nn.Linear(4, 4).to("cuda")
    x = torch.randn(batch_size, 4, device="cuda")
    return lambda: layer(x).sum().backward()
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder, with one sound input of each kind in it."""
    tmp_path = tmp_path / "outer" / "inner"  # where ../.. is still ours
    tmp_path.mkdir(parents=True)
    (tmp_path / "tables.yaml").write_text(TABLES)
    (tmp_path / "step.py").write_text(STEP)
    (tmp_path / "here.py").write_text(STEP.replace('"cuda"', '"cpu"'))
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": rank_events(300)}))
    (tmp_path / "data").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("uvicorn.Server.run", lambda *_, **__: None)  # a server would never end
    monkeypatch.setenv("TRAINCAST_DATA", str(tmp_path / "data"))
    return tmp_path


SOUND = {
    "predict": [
        "dlrm-ddp --on v100 --batch-size 64",
        "dlrm-ddp --on dgx1-v100 --gpus 2 --skew-ms 1 --jitter 0.1",
        "mpt-125m --on dgx-h100 --gpus 2 --tp 2",
    ],
    "fits": ["dlrm-ddp --on v100"],
    "compare": ["dlrm-ddp --on v100"],
    "check": ["--baseline baseline.json"],
    "mcp": ["--nothing"],
    "plan": ["mpt-125m --on dgx-h100 --gpus 2 --global-batch 4"],
    "shard": ["tables.yaml --on dgx1-v100 --gpus 2 --no-torchrec --time-limit 0"],
    "whatif": ["dlrm-ddp --on v100 --set batch-size=64"],
    "sweep": ["dlrm-ddp --on v100 --vary batch-size=64 --processes 1"],
    "report": ["trace.json -o out.html"],
    "serve": ["--port 0"],
    "models": [""],
    "platforms": [""],
    "capture": ["step.py:make_step -o step.tc"],
    "export": ["dlrm-ddp -o out.json"],
    "fit": ["host"],
    "trace": ["trace.json"],
    "evaluate": ["dlrm"],
    "bench": ["--budget 1s --dry-run"],
    "measure": ["here.py:make_step --repeats 3 --seconds 0.1"],
    "completion": ["bash"],
}
"""For each command, arguments that are fine (or fail for want of measurements); one of them is then made absurd."""


def absurd_commands(verb: str, sound: str) -> list[list[str]]:
    """The sound command with one option or positional at a time set to each absurd value."""
    _, made = build_parsers({verb, "predict"})
    words = sound.split()
    commands = []
    # those of a prediction are tried with predict, where a result costs least
    known = {action.dest for action in made["predict"]._actions} - {"on"} if verb in _PREDICTING else set()
    for action in made[verb]._actions:
        if isinstance(action, argparse._HelpAction) or (action.option_strings and action.nargs == 0):
            continue
        if action.dest in known:
            continue
        values = ABSURD_NAMES if action.dest in NAMES else ABSURD
        if verb == "capture" and action.dest in {*NAMES, "assume"}:
            values = values[::3]  # each of which starts torch
        for value in values:
            if action.option_strings:
                commands.append([verb, *words, f"{max(action.option_strings, key=len)}={value}"])
            else:
                commands.append([verb, value, *words[1:]])
    return commands


class TooSlow(BaseException):
    """A command that computes or waits for too long."""


def too_slow(*_):
    raise TooSlow


def trouble(arguments, capsys):
    """What is wrong with how a command ended, or None."""
    for number in (signal.SIGALRM, signal.SIGPROF):
        signal.signal(number, too_slow)
    signal.alarm(_PATIENCE)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        code = main(arguments)
    except BaseException as error:
        return f"raised {type(error).__name__}: {error}"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.alarm(0)
        captured = capsys.readouterr()
    lines = captured.err.splitlines()
    if code not in (0, 1, 2):
        return f"exit code {code}: {captured.err}"
    if code == 2 and (len(lines) != 1 or not lines[0].startswith("traincast: ") or len(lines[0]) > 2000):
        return f"not one line: {captured.err}"
    none_said = "'None':" in "".join(lines) and not any(word.endswith("None") for word in arguments)
    if code == 2 and (captured.out or not lines[0].isprintable() or none_said):
        return f"a strange rejection: {captured.out[:100]!r} {lines[0]!r}"
    return None if code == 2 or captured.out else "no answer"


@pytest.mark.parametrize("verb", list_commands())
def test_absurd_values_are_refused_in_one_line_or_answered(verb, folder, capsys):
    if verb in ("capture", "measure"):
        pytest.importorskip("torch")
    wrong = {}
    grids = [absurd_commands(verb, sound) for sound in SOUND[verb]]
    for place, commands in enumerate(zip(*grids, strict=True)):
        command = commands[place % len(commands)]  # each value once, with the sound commands in turn
        if problem := trouble(command, capsys):
            wrong[str(command)[:300]] = problem
    assert wrong == {}
    assert list(folder.rglob("*.tmp")) == []


@pytest.mark.parametrize("verb", list_commands())
def test_unknown_options_are_one_line(verb, folder, capsys):
    for sound in SOUND[verb]:
        assert main([verb, *sound.split(), "--nonsense\u202e=1"]) == 2
        error = capsys.readouterr().err
        assert error.startswith("traincast: ")
        assert error.count("\n") == 1
