"""A seeded slice of the corpus: captured, predicted, compared with a real run. `scripts/try_corpus.py` runs it all."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from importlib.util import find_spec

import pytest

pytest.importorskip("torch")

from tests.conftest import ROOT
from tests.corpus.against_cpu import op_differences, peaks
from tests.corpus.running import Outcome, load, run

SETUPS = load()
OWN = [name for name, setup in SETUPS.items() if not setup.needs and not setup.refused]
COMPARED = [name for name in OWN if SETUPS[name].like_cpu and not SETUPS[name].gpus and not SETUPS[name].beside]
ALWAYS = ["DDP tutorial as printed", "facebookresearch/dlrm", "TorchRec DistributedModelParallel"]


def chosen(names, count):
    return random.Random(15).sample(names, count)


def run_apart(name: str) -> Outcome:
    """In a process of its own: FBGEMM's ops may not be defined twice, and capturing a DLRM defines them."""
    code = (
        "import json, sys; from dataclasses import asdict; from tests.corpus.running import load, run\n"
        "print(json.dumps(asdict(run(load()[sys.argv[1]], rebatch=False))))"
    )
    done = subprocess.run([sys.executable, "-c", code, name], capture_output=True, text=True, cwd=ROOT, check=True)
    return Outcome(**json.loads(done.stdout.splitlines()[-1]))


def test_the_corpus_is_large_enough():
    assert len(SETUPS) >= 60
    assert len([name for name, setup in SETUPS.items() if setup.like_cpu and not setup.gpus]) >= 20
    assert all(setup.like_cpu or setup.beside for setup in SETUPS.values())


@pytest.mark.parametrize("name", [*chosen(OWN, 6), *ALWAYS])
def test_set_ups_are_captured_and_predicted(name):
    setup = SETUPS[name]
    if any(find_spec(package) is None for package in setup.needs):
        pytest.skip(f"{setup.needs} are not installed")
    outcome = run_apart(name) if "torchrec" in setup.needs else run(setup, rebatch=False)
    assert outcome.state == "works", outcome.why
    assert outcome.ops > 0 and outcome.milliseconds > 0


def test_a_set_up_that_needs_values_is_refused_on_one_line():
    outcome = run(SETUPS["LBFGS"], rebatch=False)
    assert outcome.state == "refused" and SETUPS["LBFGS"].refused in outcome.why and "\n" not in outcome.why


@pytest.mark.parametrize("name", chosen(COMPARED, 3))
def test_set_ups_run_the_ops_of_a_real_run(name, tmp_path):
    assert op_differences(SETUPS[name], tmp_path) == []


@pytest.mark.parametrize("name", chosen(COMPARED, 12))
def test_set_ups_hold_the_bytes_of_a_real_run(name):
    assert abs(peaks(SETUPS[name]).unexplained) <= 8  # bytes: a number more or less
