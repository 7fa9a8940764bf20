"""The slow-down of kernels alongside transfers: fitted on one half of the kernels, better on the other."""

from __future__ import annotations

import json
import shutil
from importlib.resources import files

import pytest

from traincast.traces.slowdowns import Pair
from traincast.utils.errors import TraincastError
from traincast_evaluation.fitting.overlap import TRACE, compute_overlap_errors, find_best_start, fit_overlap


def test_it_finds_what_was_added():
    pairs = [Pair("gemm", group, group * 1e-6, group * 1e-6 + 2.5e-6) for group in range(1, 50)]

    assert find_best_start(pairs) == pytest.approx(2.5e-6)
    assert compute_overlap_errors(pairs, 2.5e-6)["worst"] == 0


def test_the_shipped_profile_is_what_the_trace_gives(shared_data, tmp_path):
    profile = fit_overlap(shared_data, tmp_path, lambda what, share: None)

    shipped = files("traincast.simulator") / "data" / "overlap.json"
    dated = json.loads(shipped.read_text(encoding="utf-8"))
    assert dated["provenance"].pop("date")  # `traincast fit` adds it
    assert dated == profile
    held_out = profile["provenance"]["held_out"]
    assert held_out["pairs"] > 500
    assert held_out["with"]["gmae"] < 0.6 * held_out["without"]["gmae"]
    assert abs(held_out["with"]["bias"]) < abs(held_out["without"]["bias"])


def test_a_trace_without_transfers_is_refused_by_name(shared_data, tmp_path):
    target = tmp_path / "traces" / TRACE
    target.parent.mkdir(parents=True)
    shutil.copy(shared_data / "traces" / "kineto_resnet50_v100" / "num_workers_4.json.gz", target)
    with pytest.raises(TraincastError, match=r"kineto_rank3.*too few kernels"):
        fit_overlap(tmp_path, tmp_path, lambda what, share: None)
