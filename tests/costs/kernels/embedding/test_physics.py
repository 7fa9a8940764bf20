from __future__ import annotations

import csv
from dataclasses import replace

import pytest

from tests.costs.kernels.embedding.described import distinct_rows, lookup_tables, tbe_backward_calls, tbe_forward_calls
from traincast.costs.kernels.contract import Calls
from traincast.costs.kernels.cost import price_calls
from traincast.costs.kernels.embedding import EMBEDDING
from traincast.costs.kernels.embedding.physics import _count_missing_bytes
from traincast.hardware import load_device
from traincast.models.embeddings import Pooling, Table, Uniform, Zipf
from traincast.utils.metrics import compute_error_row

DEVICES = ("v100", "a100-80gb")


def _tables(access, count=8):
    return [
        Table(name=f"t{i}", rows=1_000_000, dim=64, pooling=Pooling.from_constant(50), access=access)
        for i in range(count)
    ]


def _seconds(tables, kind, key):
    calls = Calls.of(EMBEDDING, [lookup_tables(tables, 2048).call(kind)])
    return float(price_calls(calls, load_device(key))[0].seconds[0])


def test_uniform_tables_lower_as_ops_do():
    lowered = lookup_tables(_tables(Uniform()), 2048)
    assert (lowered.batch, lowered.lookups, lowered.rows, lowered.longest_bag) == (2048, 819_200, 8e6, 50)
    assert lowered.distinct == pytest.approx(8 * distinct_rows(1e6, 2048 * 50))


def test_fbgemm_calls_of_a_group():
    tables = [replace(table, dtype="fp16", weighted=True, optimizer="adam") for table in _tables(Zipf(1.0))]
    (forward,) = tbe_forward_calls(tables, 64)
    *_, backward = tbe_backward_calls(tables, 64)
    assert (forward.kind, forward.compute) == ("tbe_forward", "fp16")
    assert backward.kind == "tbe_backward_adam"
    assert forward.values[EMBEDDING.fields.index("row_item_bytes")] == 2
    assert forward.values[EMBEDDING.fields.index("weighted")] == 1


@pytest.mark.parametrize("key", DEVICES)
@pytest.mark.parametrize("kind", ["tbe_forward", "tbe_backward_sgd", "batched_forward", "batched_backward_sgd"])
def test_hot_rows_are_never_slower_and_strong_skew_is_faster(key, kind):
    """FBGEMM's update gives hot rows a block each, which costs some of what their fewer bytes save."""
    seconds = [_seconds(_tables(Zipf(exponent)), kind, key) for exponent in (0.0, 0.4, 0.8, 1.0, 1.2)]
    assert all(skewed <= seconds[0] * 1.001 for skewed in seconds)
    if kind != "tbe_backward_sgd":
        assert all(later <= earlier * 1.001 for earlier, later in zip(seconds, seconds[1:], strict=False))
    assert seconds[-1] < 0.7 * seconds[0]


@pytest.mark.parametrize("key", DEVICES)
@pytest.mark.parametrize("exponent", [0.0, 0.6, 0.8, 1.05, 1.2])
def test_misses_are_those_of_the_distribution(key, exponent):
    """The call says what misses caches of a few sizes; between them it is interpolated."""
    device, tables = load_device(key), _tables(Zipf(exponent))
    calls = Calls.of(EMBEDDING, [lookup_tables(tables, 2048).call("tbe_forward")])
    in_flight = min(max(device.num_sms * 2048 / 16 / 2048, 1.0), 8.0)
    kept = 0.9 * device.l2_bytes / (in_flight * 256)
    expected = sum(256 * table.count_lookups(2048) * (1.0 - table.compute_hit_rate(kept, 2048)) for table in tables)
    assert _count_missing_bytes(calls, device)[0] == pytest.approx(expected, rel=0.02)


def test_described_tables_predict_the_measured_kernels_of_v100(shared_data):
    """Uniform tables built as data score as those lowered from ops do (tests/evaluate/test_kernels_embedding.py)."""
    device = load_device("v100").with_clock(1297)
    predicted, measured = [], []
    with (shared_data / "kernels" / "embedding_v100.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            pooling, micro = int(row["lookups_per_table"]), row["context"] == "microbenchmark"
            backward = row["direction"] == "backward_sgd"
            fitted = pooling in (16, 38) if micro else backward and pooling == 100
            if fitted or float(row["latency_us"]) < 50 or not row["rows_per_table"]:
                continue
            tables = [
                Table(
                    name=f"t{i}", rows=int(row["rows_per_table"]), dim=int(row["embedding_dim"]),
                    pooling=Pooling.from_constant(pooling),
                )
                for i in range(int(row["num_tables"]))
            ]  # fmt: skip
            lowered = lookup_tables(tables, int(row["batch"]), index_bytes=4, ascending=not micro)
            call = lowered.call("batched_backward_sgd" if backward else "batched_forward")
            predicted.append(float(price_calls(Calls.of(EMBEDDING, [call]), device)[0].seconds[0]))
            measured.append(1e-6 * float(row["latency_us"]))
    errors = compute_error_row("kernels", "embedding", predicted, measured)
    assert errors.n == 8
    assert errors.gmae < 5
