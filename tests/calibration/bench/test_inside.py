"""Small steps: their ops timed inside them, and the host's time as what is left."""

from __future__ import annotations

import inspect
from dataclasses import replace
from itertools import islice

import pytest

from traincast.calibration.bench.device import Reference
from traincast.calibration.bench.inside import SmallStep, draw_small_steps, measure_inside
from traincast.calibration.bench.store import open_device
from traincast.costs.cpu.features import Caches, get_kind
from traincast.costs.cpu.samples import format_sample, parse_row

STEP = SmallStep(
    name="one", batch_size=32, width=16, hidden=32, layers=1, norms=1, views=1, convolutions=1, pooled=True,
    attention=1, words=50, loss="clicks", tables=((500, 3, "uniform"), (2000, 2, "zipf:0.9")), optimizer="sgd",
)  # fmt: skip


def test_the_ops_of_a_step_are_samples_with_what_they_found(monkeypatch):
    monkeypatch.setattr("traincast.calibration.bench.inside._REPEATS", 5)
    device = open_device("cpu")
    measured = dict(measure_inside(device, Reference(device), STEP))
    host = measured.pop("one")
    # what is left of a step is a difference of two measurements, so that a busy machine can leave less than nothing
    assert host.signature is None and host.events[0] == 1.0 and host.busy < 1 and host.kernels > 0
    kinds = [get_kind(sample.signature) for sample in measured.values()]
    assert {
        "gemm",
        "conv",
        "conv_backward",
        "_embedding_bag",
        "sparse_update",
        "native_layer_norm",
        "bmm",
        "_softmax",
        "native_batch_norm",
        "gemv",
        "embedding",
    } <= set(kinds)
    tables = [sample for sample in measured.values() if get_kind(sample.signature) == "sparse_update"]
    assert {sample.access for sample in tables} == {"uniform", "zipf:0.9"}
    for sample in measured.values():
        assert len(sample.found) == len(sample.signature.inputs) + len(sample.signature.outputs) + 1
        again = parse_row(format_sample(sample))
        assert (again.found, again.busy, get_kind(again.signature)) == (
            sample.found,
            sample.busy,
            get_kind(sample.signature),
        )
        assert sample.features(Caches(1e6, 1e7)).terms[0] == 1.0


@pytest.mark.parametrize(("optimizer", "kept"), [("adam", "exp_avg_sq"), ("adagrad", "sum")])
def test_optimizers_keep_the_numbers_of_training(optimizer, kept):
    """Roots of zeros and of denormal numbers, as dead units would leave them, take many times as long."""
    deep = replace(STEP, layers=7, hidden=64, batch_size=64, tables=(), optimizer=optimizer)
    step = deep.make(deep.batch_size)
    for _ in range(5):
        step()
    (state,) = (value.state for value in inspect.getclosurevars(step).nonlocals.values() if hasattr(value, "state"))
    squares = [one[kept] for one in state.values()]
    assert len(squares) > 20 and all(one.min() > 0.9 and one.max() < 1e3 for one in squares)


def test_tables_are_as_large_as_memory_allows():
    drawn = list(islice(draw_small_steps(0), 60))
    rows = [rows for step in drawn for rows, _, _ in step.tables]
    assert max(rows) > 3e5 and min(rows) < 1e4
    assert all(4 * step.width * sum(rows for rows, _, _ in step.tables) <= 4e8 for step in drawn)
    assert {step.loss for step in drawn} == {"mean", "classes", "clicks"} and any(step.words for step in drawn)


def test_the_same_seed_draws_the_same_steps():
    first, again, other = (list(islice(draw_small_steps(seed), 20)) for seed in (0, 0, 1))
    assert first == again != other
    assert any(step.tables for step in first) and any(step.convolutions for step in first)
