"""A seeded slice of the fuzzers: no traceback, no hang, no answer that makes no sense. Long runs: `scripts/fuzz`."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace

import pytest

from tests.fuzz.formats import FORMATS
from tests.fuzz.running import format_named, judged, run_cases

CASES = {"workload": 40, "kineto": 40, "dense yaml": 3, "machine profile": 3, "tables": 8, "parquet": 5}
LEAST_SOUND = 1  # of three files of a format that are not changed: else its changed ones are refused for nothing


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_changed_files_are_answered_or_refused(form):
    findings = [str(finding) for finding in run_cases(form, range(CASES.get(form.name, 15)))]

    assert findings == []


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_a_file_that_is_not_changed_is_answered(form):
    if form.name in ("command line", "indices", "index columns", "platform"):
        pytest.skip("its changes are made with it")
    codes: Counter[int] = Counter()

    assert [str(finding) for finding in run_cases(form, range(3), codes, changed=False)] == []
    assert codes[0] >= LEAST_SOUND


# format and seed of cases that once broke the promise
CORPUS = {
    ("workload", 3_001_006): "a convolution with stride 0: no step was the slowest, since its time was not a number",
    ("chakra", 52): "a header that is no UTF-8",
    ("recommender yaml", 1_700_000_037): "a kind of storage that is a mapping",
    ("tool call", 1_700_000_021): "a price of 3,000 characters, told in full",
}


@pytest.mark.parametrize(("name", "seed"), CORPUS)
def test_what_once_broke_it(name, seed):
    assert [str(finding) for finding in run_cases(format_named(name), range(seed, seed + 1))] == []


def test_a_broken_promise_is_seen(monkeypatch):
    def broken(_):
        raise IndexError("nobody expected this")

    monkeypatch.setattr("traincast.simulator.scenario.predict.predict_step", lambda *_, **__: broken(0))

    assert "exit code 70" in judged(["predict", "dlrm-default", "--on", "v100", "--json"])


@pytest.mark.parametrize(
    ("code", "patience", "says"), [("while True: pass", 300, "takes longer"), ("time.sleep(60)", 1, "of waiting")]
)
def test_a_hang_is_seen_by_its_cpu_time_or_by_its_silence(monkeypatch, code, patience, says):
    def hang(_):
        exec(code, {"time": time})

    monkeypatch.setattr("tests.fuzz.running.judge", hang)
    monkeypatch.setattr("tests.fuzz.running.SECONDS", 0.3)
    monkeypatch.setattr("tests.fuzz.running._PATIENCE", patience)
    (finding,) = run_cases(replace(FORMATS[4], name="hanging"), range(1))

    assert says in finding.problem
