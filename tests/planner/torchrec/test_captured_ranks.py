"""TorchRec's sharded tables against two real processes with gloo: op by op, what is exchanged, the most memory held.

All set-ups of `sharded_steps` are compared by `python -m tests.planner.torchrec.compare`; here one of them.
"""

from __future__ import annotations

import pytest

from tests.planner.torchrec.conftest import NEEDS_TORCHREC

pytest.importorskip("torch")

from tests.capturing.oracle import peak_bytes

pytestmark = NEEDS_TORCHREC
RUNS = 8


@pytest.fixture(scope="module")
def found():
    from tests.planner.torchrec.compare import compare

    return compare("sharded", runs=RUNS)


def test_a_rank_runs_the_ops_of_a_real_run(found):
    assert found.missing == []
    assert [one for place, one in enumerate(found.ops) if place not in found.seen] == []
    assert [name for name, _ in found.ops].count("lookup") == 2


def test_ranks_exchange_the_ids_and_rows_of_a_real_run(found):
    """Tables whole and in rows; ranks with bags of other lengths know how many ids the other one sends."""
    assert [one for place, one in enumerate(found.told) if place not in found.met] == [] and len(found.told) == 11
    assert found.workload.assumptions == ()


def test_a_rank_holds_the_memory_of_a_real_run(found):
    held = peak_bytes(found.workload.programs[found.workload.ranks[0]])
    # what FBGEMM's ops take and keep until they return is not told from what they give: up to 4 % of the peak here
    peak = found.runs[-1].peak
    assert held == pytest.approx(peak.peak_bytes - peak.scratch_bytes, rel=0.05)
