"""A seeded slice of the fuzzers: no traceback, no hang, no answer that makes no sense. Long runs: `scripts/fuzz`."""

from __future__ import annotations

import pytest

from tests.fuzz.formats import FORMATS
from tests.fuzz.running import judged, run_cases

CASES = {"workload": 160, "kineto": 160, "tables": 60, "indices": 60, "plan": 120}


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_changed_files_are_answered_or_refused(form):
    findings = [str(finding) for finding in run_cases(form, range(CASES.get(form.name, 100)))]

    assert findings == []


@pytest.mark.parametrize("seed", [3_001_006])
def test_workloads_that_once_broke_it(seed):
    """Corpus: a convolution with stride 0 (no step was the slowest, since its time was not a number)."""
    workload = next(form for form in FORMATS if form.name == "workload")

    assert [str(finding) for finding in run_cases(workload, range(seed, seed + 1))] == []


def test_a_broken_promise_is_seen(monkeypatch):
    def broken(_):
        raise IndexError("nobody expected this")

    monkeypatch.setattr("traincast.questions.predict.predict_step", lambda *_, **__: broken(0))

    assert "exit code 70" in judged(["predict", "dlrm-default", "--on", "v100", "--json"])
