"""The fitted model of embedding kernels: what it learns, where it says so, and how sure it is."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from tests.costs.kernels.embedding.described import lookup_tables
from traincast.costs.kernels.contract import Calls
from traincast.costs.kernels.embedding import EMBEDDING
from traincast.costs.kernels.embedding.physics import Rates, make_uniform_tables
from traincast.costs.kernels.families import load_shipped_model
from traincast.hardware import load_device
from traincast.models.embeddings import Pooling, Table, Uniform, Zipf


def lookups(kind, *, batch=4096, tables=8, bag=32, rows=500_000, dim=128, ascending=False, item_bytes=4):
    given = make_uniform_tables(
        batch=batch, lookups=batch * tables * bag, rows=(float(rows),) * tables, dims=(float(dim),) * tables,
        index_bytes=8, row_item_bytes=item_bytes, ascending=ascending,
    )  # fmt: skip
    return given.call(kind, "fp16" if item_bytes == 2 else "fp32")


def predict(key, *calls):
    return load_shipped_model("embedding").predict(Calls.of(EMBEDDING, calls), load_device(key))


def test_the_shipped_rates_are_physical_and_near_those_set_by_hand():
    rates = load_shipped_model("embedding").parameters_.rates
    assert all(0 < getattr(rates, field.name) <= 1 for field in fields(Rates) if field.name.endswith("_share"))
    for name in ("start_seconds", "read_share", "scattered_write_share", "sorted_write_share", "l2_bytes_per_clock"):
        assert getattr(rates, name) == pytest.approx(getattr(Rates(), name), rel=0.1), name


def test_what_was_measured_is_in_domain_on_its_chip_only():
    update = lookups("batched_backward_sgd", bag=32)
    for key, inside in (("v100", True), ("v100-pcie", True), ("a100-80gb", False), ("b200", False)):
        assert predict(key, update).in_domain[0] == inside
    wide, narrow = predict("b200", update).sigma[0], predict("v100", update).sigma[0]
    assert wide > 0.3 > 0.1 > narrow


@pytest.mark.parametrize(
    "unmeasured",
    [
        lookups("batched_backward_sgd", item_bytes=2),
        lookups("batched_backward_sgd", dim=512),
        lookups("batched_backward_sgd", bag=4000),
        lookups("tbe_backward_adam"),
        lookups("bag_forward"),
    ],
    ids=["fp16", "wide rows", "long bags", "adam", "one bag"],
)
def test_types_sizes_and_kinds_never_measured_are_flagged_and_widened(unmeasured):
    measured, other = (predict("v100", call) for call in (lookups("batched_backward_sgd"), unmeasured))
    assert measured.in_domain[0] and not other.in_domain[0]
    assert other.sigma[0] > 3 * measured.sigma[0]


def test_skewed_tables_and_tables_in_host_memory_are_flagged_and_widened():
    def tables(access):
        return [
            Table(name=f"t{i}", rows=500_000, dim=128, pooling=Pooling.from_constant(32), access=access)
            for i in range(8)
        ]

    even, skewed = (lookup_tables(tables(access), 4096) for access in (Uniform(), Zipf(1.2)))
    kind = "batched_backward_sgd"
    calls = [even.call(kind), skewed.call(kind), replace(even, host=1).call(kind), replace(even, host=2).call(kind)]
    estimate = predict("v100", *calls)
    assert estimate.in_domain.tolist() == [True, False, False, False]
    assert estimate.sigma[0] < estimate.sigma[1] < estimate.sigma[2] == estimate.sigma[3]


def test_short_fbgemm_kernels_are_less_certain_than_long_ones():
    short, long = predict("v100", lookups("tbe_forward", batch=16), lookups("tbe_forward")).sigma
    assert short > 0.28 > 0.26 > long
