"""Streaming kernels against measurements that took no part in fitting."""

from __future__ import annotations


def test_the_held_out_fifth_is_within_the_issue_s_limits(shared_data):
    from traincast_evaluation.kernels.streaming.evaluate import evaluate_elementwise

    rows = evaluate_elementwise(shared_data)
    for row in rows:
        if "shapes never seen" in row.suite:
            assert row.gmae < 4.0, row
    by_group = {row.group: row for row in rows if "test split" in row.suite}
    assert by_group["in distribution"].mape < 14.0
    assert by_group["out of distribution"].mape < 19.3
