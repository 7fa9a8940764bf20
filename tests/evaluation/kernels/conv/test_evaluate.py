"""Convolutions against measurements that took no part in fitting."""

from __future__ import annotations

from traincast.costs.kernels.conv import CONV
from traincast.costs.kernels.families import PROFILES


def test_accuracy_on_shapes_not_fitted(shared_data):
    from traincast_evaluation.kernels.conv.evaluate import evaluate_conv

    rows = {(row.suite, row.group): row for row in evaluate_conv(shared_data)}
    suite = "conv 3x3 forward: shapes never seen"
    assert rows[suite, "all devices, above 1.5 ms"].gmae < 5.5
    assert rows[suite, "all devices"].gmae < 8.3
    for kind in CONV.kinds:
        assert rows["conv DeepBench: shapes never seen", f"{kind} fp32"].gmae < 11.0
    assert (PROFILES / "conv.npz").stat().st_size < 1_500_000
