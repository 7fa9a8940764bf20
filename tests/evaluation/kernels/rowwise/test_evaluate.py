"""Softmax and layer norm against measurements that took no part in fitting."""

from __future__ import annotations

import pytest

from traincast_evaluation.kernels.rowwise import evaluate


@pytest.mark.parametrize(("name", "inside", "outside"), [("softmax", 19.3, 13.9), ("norm", 20.1, 56.7)])
def test_accuracy_on_shapes_splits_and_devices_not_fitted(shared_data, name, inside, outside):
    rows = getattr(evaluate, f"evaluate_{name}")(shared_data)
    for row in rows:
        if "shapes never seen" in row.suite:
            assert row.gmae < 4.0, row
    by_group = {row.group: row for row in rows if "test split" in row.suite}
    assert by_group["in distribution"].mape < inside
    assert by_group["out of distribution"].mape < outside
