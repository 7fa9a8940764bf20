"""Promise: the same question has the same answer, to the last digit, whatever Python's hashes are."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

COMMANDS = ("whatif dlrm-ddp --on v100 --advise --json", "predict mpt-125m --on dgx-a100 --gpus 4 --seq-len 128 --json")
SEEDS = ("1", "2")
TRIES = len(COMMANDS) * len(SEEDS)
"""Processes; `tests/app/test_one_answer.py` asks by command line, Python, server, sweep and what-if."""


@pytest.mark.parametrize("command", COMMANDS)
def test_hash_seeds_change_nothing(command):
    answers = {
        subprocess.run(
            [sys.executable, "-m", "traincast", *command.split()],
            env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True,
        ).stdout
        for seed in SEEDS
    }  # fmt: skip
    assert len(answers) == 1
