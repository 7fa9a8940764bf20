"""What every shipped model keeps to, in every kind and compute type, on chips measured and not."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

from tests.costs.kernels.model_checks import check_contract, check_monotone, check_unit
from traincast.costs.kernels.contract import COMPUTE_BYTES, COMPUTE_TYPES, Calls, Family
from traincast.costs.kernels.embedding import EMBEDDING
from traincast.costs.kernels.embedding.physics import make_uniform_tables
from traincast.costs.kernels.families import BY_NAME, load_shipped_model
from traincast.hardware import Device, load_device
from traincast.hardware.device import AMPERE

DEVICES = ("v100-pcie", "t4", "a100-80gb", "h100", "mi210", "a10", "mi300x")  # the last two were never measured
FAMILIES_WITH_A_MODEL = tuple(name for name, record in BY_NAME.items() if record.model)
# lookups of ten thousand rows, a hundred of each, as in the A100 job that was measured
HOT_LOOKUPS = {
    "tables": 1, "columns": 80, "lookups": 1e6, "distinct_rows": 1e4, "long_rows": 1e4, "long_lookups": 1e6,
    "row_bytes": 4e8, "slot_bytes": 4e8,
}  # fmt: skip
_ONES = ("stride_h", "stride_w", "dilation_h", "dilation_w", "groups", "trans_b", "causal")


def sizes(family: Family, scale: float, compute: str) -> dict[str, float]:
    """Sizes of a call that asks for more work the larger the scale."""
    if family is EMBEDDING:
        return lookup_sizes(round(16 * scale), COMPUTE_BYTES[compute])
    item = float(COMPUTE_BYTES[compute])
    elements = 1024.0 * scale**3
    named = {
        "gemm": {"batch": 2.0, "m": 24 * scale, "n": 24 * scale, "k": 24 * scale},
        "conv": {
            "batch": scale, "in_channels": 64.0, "out_channels": 64.0, "in_h": 28.0, "in_w": 28.0, "kernel_h": 3.0,
            "kernel_w": 3.0, "pad_h": 1.0, "pad_w": 1.0, "slowness": 1.0, "winograd": 1.0,
        },
        "softmax": {"rows": 16 * scale**2, "cols": 1024.0},
        "norm": {"rows": 16 * scale**2, "cols": 1024.0},
        "attention": {
            "batch": 2.0, "q_heads": 8.0, "kv_heads": 8.0, "q_len": 32 * scale, "kv_len": 32 * scale, "head_dim": 64.0,
        },
    }  # fmt: skip
    streamed = {
        "elements": elements, "outputs": elements / 64, "row_elements": 64.0, "window": 9.0, "tensors": 3.0,
        "bytes": item * elements, "bytes_read": item * elements, "bytes_written": item * elements,
    }  # fmt: skip
    chosen = named.get(family.name, streamed)
    return {field: chosen.get(field, 1.0 if field in _ONES else 0.0) for field in family.fields}


def lookup_sizes(batch: int, item_bytes: int) -> dict[str, float]:
    """Eight lookups per sample in each of four tables of a million rows."""
    tables = make_uniform_tables(
        batch=batch, lookups=32 * batch, rows=(1e6,) * 4, dims=(64.0,) * 4, index_bytes=8, row_item_bytes=item_bytes
    )
    return dict(zip(EMBEDDING.fields, tables.call("tbe_forward").values, strict=True))


def every_kind(family: Family, scale: float, computes: tuple[str, ...] = COMPUTE_TYPES) -> Calls:
    return Calls.of(
        family, [family.call(kind, c, **sizes(family, scale, c)) for c in computes for kind in family.kinds]
    )


def least_seconds(calls: Calls, device: Device) -> np.ndarray:
    """What the sheet allows: arithmetic at peak (Winograd saves up to 2.25 of it), or bytes at the DRAM's or PCIe's."""
    peak = calls.per_compute({name: device.get_peak_flops(name) for name in COMPUTE_TYPES}, 0.0)
    peak = np.maximum(peak, device.get_peak_flops("fp32_matrix"))
    name = calls.family.name
    if name == "gemm":
        return 2 * calls["batch"] * calls["m"] * calls["n"] * calls["k"] / peak
    if name == "conv":
        return 2 * calls["batch"] * 28 * 28 * 64 * 64 * 9 / 2.25 / peak
    if name == "attention":
        if device.is_capability_at_least(AMPERE):  # tensor cores multiply in fp32 as three products in TF32
            peak = np.maximum(peak, device.get_peak_flops("tf32") / 3)
        return 2 * calls["batch"] * 8 * calls["q_len"] ** 2 * 64 / peak
    if name == "memcpy":
        return calls["bytes"] / np.where(calls.is_kind("d2d", "memset"), device.dram_bandwidth, 64e9)
    if name in ("softmax", "norm"):
        return calls["rows"] * calls["cols"] * calls.item_bytes() / device.dram_bandwidth
    if name == "embedding":
        return calls["touched_bytes"] / device.dram_bandwidth
    return (calls["bytes_read"] + calls["bytes_written"]) / device.dram_bandwidth


ROOFLINES_ALONE = {"collective", "recurrent", "unmodelled", "opaque", "given"}
"""Families that no measurement was fitted on: a collective needs a topology, the others cost their roofline or what is
given."""


def test_every_measured_family_has_a_model():
    assert set(BY_NAME) - ROOFLINES_ALONE == set(FAMILIES_WITH_A_MODEL)


@pytest.mark.parametrize("key", DEVICES)
@pytest.mark.parametrize("name", FAMILIES_WITH_A_MODEL)
def test_contract_in_every_kind_and_type(name, key):
    model = load_shipped_model(name)
    assert model.family is BY_NAME[name].family
    for scale in (1.0, 16.0, 4096.0):
        check_contract(model, every_kind(model.family, scale), load_device(key))


@pytest.mark.parametrize("key", DEVICES)
@pytest.mark.parametrize("name", FAMILIES_WITH_A_MODEL)
def test_more_work_takes_longer_in_every_kind_and_type(name, key):
    model = load_shipped_model(name)
    # learned corrections waver where a kernel is all start; of a larger batch more rows are in L2 when a bag waits
    slack = {"gemm": 0.1, "conv": 0.1, "embedding": 0.05}.get(name, 0.0)
    growing = [every_kind(model.family, 4.0**step) for step in range(1, 6)]
    check_monotone(model, growing, load_device(key), slack=slack)


@pytest.mark.parametrize("key", DEVICES)
@pytest.mark.parametrize("name", FAMILIES_WITH_A_MODEL)
def test_large_calls_take_seconds_that_the_sheet_allows(name, key):
    model, device = load_shipped_model(name), load_device(key)
    calls = every_kind(model.family, 256.0, ("fp32", "tf32", "fp16", "bf16", "fp64"))
    check_unit(model, calls, least_seconds(calls, device), device)


@pytest.mark.parametrize("name", [name for name in FAMILIES_WITH_A_MODEL if name != "conv"])
def test_nothing_to_do_takes_the_start_of_a_kernel(name):
    model = load_shipped_model(name)
    empty = dict.fromkeys(model.family.fields, 0.0)
    calls = Calls.of(model.family, [model.family.call(kind, **empty) for kind in model.family.kinds])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        seconds = model.predict(calls, load_device("a100-80gb")).seconds
    assert (seconds > 1e-7).all()
    assert (seconds < 1e-4).all()


@pytest.mark.parametrize(
    ("name", "kind", "compute", "inside", "outside"),
    [
        ("elementwise", "add", "fp32", {"bytes_read": 8e8, "bytes_written": 4e8}, {"bytes_read": 8e12}),
        ("softmax", "forward", "fp32", {"rows": 4096, "cols": 1024}, {"cols": 200_000}),
        ("norm", "layer_forward", "fp32", {"rows": 4096, "cols": 1024}, {"cols": 200_000}),
        ("gemm", "mm", "bf16", {"batch": 1, "m": 4096, "n": 4096, "k": 4096}, {"m": 1e6}),
        ("embedding", "tbe_forward", "fp32", HOT_LOOKUPS, {"lookups": 1e9}),
        ("attention", "forward", "bf16", {"q_len": 1024, "kv_len": 1024, "head_dim": 128}, {"batch": 1e5}),
    ],
)
def test_sizes_and_types_never_measured_are_flagged_and_widened(name, kind, compute, inside, outside):
    model, device = load_shipped_model(name), load_device("a100-80gb")
    seen = sizes(model.family, 16.0, compute) | inside
    calls = [
        model.family.call(kind, compute, **seen),
        model.family.call(kind, compute, **(seen | outside)),
        model.family.call(kind, "fp64", **seen),
    ]
    estimate = model.predict(Calls.of(model.family, calls), device)
    assert estimate.in_domain.tolist() == [True, False, False]
    assert (estimate.sigma[1:] > estimate.sigma[0]).all()
