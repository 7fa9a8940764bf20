"""Streams, signals and the user's own code: a command says one line, cleans up, and leaves stdout to its result."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from traincast.app.cli.main import main

TRAINCAST = [sys.executable, "-m", "traincast"]
STEP = """
import sys
import torch

def prints(batch_size):
    print("hello")
    layer = torch.nn.Linear(4, 4).to("cuda")
    x = torch.randn(batch_size, 4, device="cuda")
    return lambda: layer(x).sum().backward()

def exits(batch_size):
    sys.exit(5)

def exits_in_the_step(batch_size):
    return lambda: sys.exit(5)

def fails(batch_size):
    raise ValueError("two\\nlines")
"""


@pytest.fixture
def step(tmp_path):
    pytest.importorskip("torch")
    path = tmp_path / "step.py"
    path.write_text(STEP)
    return path


@pytest.mark.parametrize("command", ["capture STEP --out OUT --json", "predict STEP --on v100 --json"])
def test_what_the_users_code_prints_is_no_part_of_the_answer(step, tmp_path, capsys, command):
    words = {"STEP": f"{step}:prints", "OUT": str(tmp_path / "a.tc")}
    assert main([words.get(word, word) for word in command.split()]) == 0
    captured = capsys.readouterr()
    assert "prints" in str(json.loads(captured.out))
    assert "hello" not in captured.out


@pytest.mark.parametrize(
    ("function", "line", "words"),
    [("exits", 12, "sys.exit(5)"), ("exits_in_the_step", 15, "sys.exit(5)"), ("fails", 18, "two lines")],
)
def test_what_the_users_code_raises_is_one_line_that_names_it(step, tmp_path, capsys, function, line, words):
    assert main(["capture", f"{step}:{function}", "-o", str(tmp_path / "a.tc")]) == 2
    error = capsys.readouterr().err
    assert f"step.py:{line}: " in error
    assert words in error
    assert error.count("\n") == 1
    assert not (tmp_path / "a.tc").exists()


WRITING = [
    "predict dlrm-ddp --on v100 --trace-out OUT",
    "export dlrm-ddp --out OUT",
    "capture step.py:prints --out OUT",
    "trace trace.json --trace-out OUT",
    "trace trace.json --workload-out OUT",
    "shard mlperf-dlrm --on dgx1-v100 --gpus 2 --out OUT",
    "shard mlperf-dlrm --on dgx1-v100 --gpus 2 --torchrec-out OUT",
]


@pytest.mark.parametrize("command", WRITING)
def test_outputs_that_are_no_regular_files_are_refused_before_the_work(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "link").symlink_to(victim)
    os.mkfifo(tmp_path / "pipe")
    for output in ("", ".", "/dev/null", "pipe", "link", "no/folder/x"):
        words = [output if word == "OUT" else word for word in command.split()]
        start = time.process_time()
        assert main(words) == 2, output
        assert not output or time.process_time() - start < 5  # the first one imports what the command needs
        assert capsys.readouterr().err.count("\n") == 1
    assert victim.read_text() == "precious"


def test_an_output_over_an_input_and_one_name_twice_are_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tables.yaml").write_text("tables: [{name: a, rows: 10, dim: 4}]")
    words = ["shard", "tables.yaml", "--on", "dgx1-v100", "--gpus", "2"]
    assert main([*words, "--out", "tables.yaml"]) == 2
    assert "also read" in capsys.readouterr().err
    assert main([*words, "--out", "x", "--torchrec-out", "x"]) == 2
    assert "twice" in capsys.readouterr().err


def run(*words, **options):
    return subprocess.run([*TRAINCAST, *words], capture_output=True, text=True, timeout=300, check=False, **options)


def test_stdout_that_takes_ascii_only():
    done = run("platforms", env=os.environ | {"PYTHONIOENCODING": "ascii"})
    assert (done.returncode, done.stderr) == (0, "")
    assert "dgx-a100" in done.stdout


@pytest.mark.parametrize(("end", "code", "says"), [(">&-", 2, "stdout is closed"), (">/dev/full", 2, "stdout")])
def test_stdout_that_takes_nothing(end, code, says):
    words = f"{sys.executable} -m traincast platforms {end}"
    done = subprocess.run(["sh", "-c", words], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == code
    assert says in done.stderr
    assert done.stderr.count("\n") == 1


def test_closed_stderr():
    words = f"{sys.executable} -m traincast predict nonsense --on v100 2>&-"
    done = subprocess.run(["sh", "-c", words], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout) == (2, "")


# (command and options, what it writes); each takes about a second, most of it start-up
KILLED = ["predict dlrm-ddp --on v100 --trace-out out", "export dlrm-ddp -o out", "export dlrm-ddp --to chakra -o out"]
MOMENTS = [(command, number) for command in KILLED for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)]


def wait_for_handlers(process):
    """Until Python itself has started and the command line catches SIGTERM; before that the system ends it."""
    status = Path(f"/proc/{process.pid}/status")
    if not status.exists():
        pytest.skip("needs /proc")
    terminate = 1 << (signal.SIGTERM - 1)
    while process.poll() is None:
        caught = next(line for line in status.read_text().splitlines() if line.startswith("SigCgt:"))
        if int(caught.split()[1], 16) & terminate:
            return
        time.sleep(0.005)


@pytest.mark.parametrize(("command", "number"), MOMENTS)
def test_a_signal_at_a_random_moment_leaves_the_file_whole(command, number, tmp_path):
    whole = tmp_path / "whole"
    assert run(*command.split()[:-1], str(whole)).returncode == 0
    target = tmp_path / "out"
    target.write_text("what was there before")
    process = subprocess.Popen(
        [*TRAINCAST, *command.split()], cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    wait_for_handlers(process)
    time.sleep(random.Random(f"{command} {number}").uniform(0.0, 0.6))
    process.send_signal(number)
    _, error = process.communicate(timeout=300)

    assert target.read_bytes() in (b"what was there before", whole.read_bytes())
    if number != signal.SIGKILL:
        assert process.returncode in (0, 128 + number, -number)  # the last: when Python itself was ending
        assert error.count("\n") <= 1
        assert "Traceback" not in error
        assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize("command", KILLED)
def test_a_full_disk_leaves_the_file_whole(command, tmp_path):
    """The system rejects to write more than a few bytes of any file."""
    target = tmp_path / "out"
    target.write_text("what was there before")
    code = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100));"
        f"from traincast.app.cli.main import main; sys.exit(main({command.split()!r}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 2
    assert "cannot write" in done.stderr
    assert done.stderr.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert target.read_text() == "what was there before"
