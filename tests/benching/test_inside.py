"""Small steps: their ops timed inside them, and the host's time as what is left."""

from __future__ import annotations

from itertools import islice

from traincast.benching.inside import measure_inside
from traincast.benching.opening import open_device
from traincast.benching.small_steps import SmallStep, small_steps
from traincast.benching.timing import Reference
from traincast.calibration.features import Caches, kind_of
from traincast.calibration.samples import parse_row, sample_row

STEP = SmallStep(
    name="one", batch_size=32, width=16, layers=1, norms=1, views=1, convolutions=1,
    tables=((500, 3, "uniform"), (2000, 2, "zipf:0.9")), optimizer="sgd",
)  # fmt: skip


def test_the_ops_of_a_step_are_samples_with_what_they_found(monkeypatch):
    monkeypatch.setattr("traincast.benching.inside._REPEATS", 5)
    device = open_device("cpu")
    measured = dict(measure_inside(device, Reference(device), STEP))
    host = measured.pop("one")
    assert host.signature is None and host.events[0] == 1.0 and 0 < host.busy < 1
    kinds = [kind_of(sample.signature) for sample in measured.values()]
    assert {"gemm", "conv", "conv_backward", "_embedding_bag", "sparse_update", "native_layer_norm"} <= set(kinds)
    tables = [sample for sample in measured.values() if kind_of(sample.signature) == "sparse_update"]
    assert {sample.access for sample in tables} == {"uniform", "zipf:0.9"}
    for sample in measured.values():
        assert len(sample.found) == len(sample.signature.inputs) + len(sample.signature.outputs) + 1
        again = parse_row(sample_row(sample))
        assert (again.found, again.busy, kind_of(again.signature)) == (
            sample.found,
            sample.busy,
            kind_of(sample.signature),
        )
        assert sample.features(Caches(1e6, 1e7)).terms[0] == 1.0


def test_the_same_seed_draws_the_same_steps():
    first, again, other = (list(islice(small_steps(seed), 20)) for seed in (0, 0, 1))
    assert first == again != other
    assert any(step.tables for step in first) and any(step.convolutions for step in first)
