"""Published peaks of memory: rows that are no test of anything are left out with a reason, whoever's they are."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from traincast_evaluation.suites.cases import LeftOut
from traincast_evaluation.suites.memory import _note_left_out_sources
from traincast_evaluation.suites.memory_litgpt import list_litgpt_outcomes
from traincast_evaluation.suites.memory_outcome import MemoryOutcome
from traincast_evaluation.suites.memory_recbole import list_recbole_outcomes

LITGPT = {
    "config": "llama-3-8b/qlora.yaml", "model": "llama-3-8b", "epochs": "2", "max_seq_len": "512", "micro_batch": "2",
    "machine": "1xA10G", "memory_gb": "17.0", "out_of_memory": "false",
}  # fmt: skip
RECBOLE = {
    "family": "Sequential", "dataset": "ml-1m", "model": "SASRec", "device": "NVIDIA TITAN V", "torch_version": "1.8.1",
    "train_batch": "4096", "embedding_size": "64", "max_seq_len": "50", "train_memory_gb": "4.0",
    "eval_memory_gb": "5.0", "dataset_numbers": "[6034, 3124, 834449]",
}  # fmt: skip


def write_table(folder: Path, name: str, rows: list[dict[str, str]]) -> Path:
    target = folder / "iterations" / name
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return folder


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, ""),
        ({"config": "falcon-40b/qlora.yaml", "model": "falcon-40b"}, "not captured"),
        ({"micro_batch": "8"}, "other sizes"),
        ({"max_seq_len": "4096"}, "other sizes"),
        ({"machine": "1xH100"}, "another GPU"),
    ],
)
def test_rows_of_litgpt_are_predicted_or_left_out(tmp_path: Path, change: dict[str, str], reason: str) -> None:
    data = write_table(tmp_path, "litgpt_memory_a10g.csv", [{**LITGPT, **change}])
    (found,) = list_litgpt_outcomes(data)
    if reason:
        assert isinstance(found, LeftOut) and reason in found.reason
    else:
        assert isinstance(found, MemoryOutcome) and found.predicted > 10e9


BOOKS = {"dataset": "Amazon-Books", "dataset_numbers": "[40550, 31094, 1181294]"}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, ""),
        ({"model": "FPMC", "train_memory_gb": "0.04"}, "rounded"),
        ({"train_memory_gb": "20.2"}, "more than the one GPU has"),
        ({"model": "NewRec"}, "not captured"),
        ({"device": "NVIDIA A100"}, "another GPU"),
        ({"train_batch": "2048"}, "another batch"),
        ({**BOOKS, "train_memory_gb": "1.3"}, "scores of all items"),
        ({**BOOKS, "train_memory_gb": "2.0"}, "fewer items"),
        ({"eval_memory_gb": "4.0"}, "evaluation"),
    ],
)
def test_rows_of_recbole_are_predicted_or_left_out(tmp_path: Path, change: dict[str, str], reason: str) -> None:
    data = write_table(tmp_path, "recbole_titanv.csv", [RECBOLE, {**RECBOLE, **change}])
    _, found = list_recbole_outcomes(data)
    if reason:
        assert isinstance(found, LeftOut) and reason in found.reason
    else:
        # before PyTorch 2 the workspaces of cuBLAS are not the allocator's
        assert isinstance(found, MemoryOutcome)
        newer = write_table(tmp_path, "recbole_titanv.csv", [{**RECBOLE, "torch_version": "2.1.0"}])
        (other,) = list_recbole_outcomes(newer)
        assert isinstance(other, MemoryOutcome) and other.predicted > found.predicted


def test_intervals_are_set_by_the_other_sources() -> None:
    def make(source: str, measured: float) -> MemoryOutcome:
        return MemoryOutcome(
            name="x", source=source, kind="allocated", measured=measured, predicted=100.0, interval=(90.0, 110.0),
            fits=True, held_back=False,
        )  # fmt: skip

    outcomes = [*(make("one", 104.0) for _ in range(10)), *(make("two", value) for value in (101.0, 103.0, 109.0))]
    (note,) = _note_left_out_sources(outcomes)
    # those of "two" reach 109, which holds all of "one"; those of "one" reach 104, which holds two of three
    assert "one 10 of 10, two 2 of 3" in note and "92%" in note


def test_cases_have_the_keys_of_every_suite_and_their_own_in_gb(tmp_path: Path) -> None:
    out = {**LITGPT, "memory_gb": "", "out_of_memory": "true"}
    rows = [
        one.to_dict() for one in list_litgpt_outcomes(write_table(tmp_path, "litgpt_memory_a10g.csv", [LITGPT, out]))
    ]
    ran, failed = rows
    for row in rows:
        assert {"device", "case", "measured_ms", "predicted_ms", "interval_ms", "covered"} <= row.keys()
        assert row["measured_ms"] is None and row["predicted_ms"] is None
        assert row["interval_gb"][0] < row["predicted_gb"] < row["interval_gb"][1]
    assert ran["measured_gb"] == 17.0 and not ran["out_of_memory"]
    low, high = ran["interval_gb"]
    assert ran["covered"] == (low <= 17.0 <= high)
    assert failed["measured_gb"] is None and failed["out_of_memory"] and failed["covered"] is None
