"""Embedding kernels by the memory they touch: DRAM reads and writes, L2 traffic, and what the L2 keeps.

The idea is the papers': of the rows looked up, those still in L2 cost no DRAM traffic, and time is the larger of
DRAM and L2 time. Rates are shares of the data sheet's, fitted as `docs/lowering.md` says.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from traincast.embeddings.zipf import zipf_like
from traincast.kernels.call import Calls, FloatArray
from traincast.platform.device import Device

START_SECONDS = 3e-6  # launch, index, then row: two trips to memory one after the other
UPDATE_START_SECONDS = 15e-6  # FBGEMM's two update kernels: 12 us and 3 us with next to nothing to do
READ_SHARE = 0.94  # of DRAM peak: whole rows at random places are read as fast as a stream
SCATTERED_WRITE_SHARE = 0.314  # rows written back where random order evicts them
SORTED_WRITE_SHARE = 0.606  # the same where neighbouring rows are evicted together
L2_BYTES_PER_CLOCK = 21.0  # per SM
L2_SHARE = 0.9  # of the L2 that rows can occupy
LOOKUP_SECONDS = 0.6e-6  # FBGEMM's forward waits for one row before it asks for the next
LONG_ROW_SECONDS = 2.6e-6  # FBGEMM's block-per-row kernel: what the warps of a block do together, per row
LONG_ROW_L2_SHARE = 0.583
EMPTY_BLOCK_CYCLES = 185.0  # per SM: its warp-per-row kernel launches a warp a lookup, most return at once
_LONG_RUN = 32  # lookups of one row from which FBGEMM gives it a block
_LOOKUPS_PER_BLOCK = 16
_LOOKUPS_PER_LONG_BLOCK = 1024
_SECTOR = 32
_THREADS_PER_SM = 2048
_SKEWED = 0.99  # distinct rows over those of uniform lookups, below which lookups count as skewed

# rows of optimizer state per row of weights that a fused backward reads and writes
_STATE_ROWS = {"tbe_backward_adagrad": 1.0, "tbe_backward_adam": 2.0}
_STATE_SCALARS = {"tbe_backward_rowwise_adagrad": 1.0}


@dataclass(frozen=True, slots=True)
class _Traffic:
    """Bytes of each kind that calls move."""

    dram_read: FloatArray
    streamed: FloatArray
    scattered: FloatArray
    l2: FloatArray


def embedding_seconds(calls: Calls, device: Device) -> FloatArray:
    """Device time of embedding calls."""
    forward = calls.is_kind("bag_forward", "lookup_forward", "batched_forward", "tbe_forward")
    return np.asarray(np.where(forward, _forward_seconds(calls, device), _backward_seconds(calls, device)))


def _forward_seconds(calls: Calls, device: Device) -> FloatArray:
    traffic = _forward(calls, device)
    moving = np.maximum(_dram_seconds(traffic, device, SORTED_WRITE_SHARE), _l2_seconds(traffic, device))
    bags = np.maximum(calls["batch"] * calls["tables"], 1.0)
    waves = np.maximum(bags * _lanes(calls) / (device.num_sms * _THREADS_PER_SM), 1.0)
    waiting = np.where(calls.is_kind("tbe_forward"), LOOKUP_SECONDS * calls["lookups"] / bags * waves, 0.0)
    return np.asarray(START_SECONDS + np.maximum(moving, waiting))


def _backward_seconds(calls: Calls, device: Device) -> FloatArray:
    traffic = _backward(calls, device)
    fused = np.array([kind.startswith("tbe_backward") for kind in calls.family.kinds])[calls.kind]
    ordered = fused | (calls["sorted"] > 0) | calls.is_kind("lookup_backward_dense", "bag_backward_dense")
    dram = _dram_seconds(traffic, device, np.where(ordered, SORTED_WRITE_SHARE, SCATTERED_WRITE_SHARE))
    l2 = _l2_seconds(traffic, device)
    long = fused & (calls["lookups"] > _LONG_RUN * calls["distinct_rows"])
    plain = np.where(fused, UPDATE_START_SECONDS, START_SECONDS) + np.maximum(dram, l2)
    return np.asarray(np.where(long, _long_rows(calls, device, dram, l2), plain))


def _long_rows(calls: Calls, device: Device, dram: FloatArray, l2: FloatArray) -> FloatArray:
    """Rows with many lookups: a block each, two blocks an SM; the warps launched for short runs find nothing."""
    blocks = np.clip(np.ceil(calls["lookups"] / _LOOKUPS_PER_LONG_BLOCK), 1.0, 2.0 * device.num_sms)
    together = LONG_ROW_SECONDS * calls["distinct_rows"] / blocks
    empty = calls["lookups"] / _LOOKUPS_PER_BLOCK * EMPTY_BLOCK_CYCLES / (device.num_sms * _clock(device))
    return np.asarray(UPDATE_START_SECONDS + np.maximum(dram, together + l2 / LONG_ROW_L2_SHARE) + empty)


def _clock(device: Device) -> float:
    return 1e6 * (device.clock_mhz or device.boost_clock_mhz)


def _dram_seconds(traffic: _Traffic, device: Device, write_share: FloatArray | float) -> FloatArray:
    streams = (traffic.dram_read + traffic.streamed) / READ_SHARE
    return np.asarray((streams + traffic.scattered / write_share) / device.dram_bandwidth)


def _l2_seconds(traffic: _Traffic, device: Device) -> FloatArray:
    return np.asarray(traffic.l2 / (L2_BYTES_PER_CLOCK * device.num_sms * _clock(device)))


def _row_bytes(calls: Calls) -> FloatArray:
    return np.asarray(np.ceil(calls["dim"] * calls["row_item_bytes"] / _SECTOR) * _SECTOR)


def _lanes(calls: Calls) -> FloatArray:
    """Threads that share a bag: one a four elements, as a power of two from 8 to a warp."""
    quads = np.maximum(calls["dim"] / 4.0, 8.0)
    return np.asarray(np.minimum(2.0 ** np.ceil(np.log2(quads)), 32.0))


def _missing_lookups(calls: Calls, device: Device) -> FloatArray:
    """Lookups that reach DRAM: first touches, and rows that left the L2 before they were wanted again.

    The tables in flight share the L2. While they fill it every repeat hits; then a lookup hits with the share of
    the table that is kept. Where fewer rows are distinct than uniform lookups would touch, some are hot, and stay.
    """
    tables, height = np.maximum(calls["tables"], 1.0), np.maximum(calls["rows"], 1.0)
    resident = device.num_sms * _THREADS_PER_SM / _lanes(calls)
    in_flight = np.clip(resident / np.maximum(calls["batch"], 1.0), 1.0, tables)
    kept = L2_SHARE * device.l2_bytes / (in_flight * _row_bytes(calls))
    lookups, distinct = calls["lookups"] / tables, calls["distinct_rows"] / tables
    share = np.minimum(kept / height, 1.0 - 1e-9)
    until_full = -height * np.log1p(-share)
    later = kept + (lookups - until_full) * (1.0 - share)
    missing = np.where(kept >= distinct, distinct, np.clip(later, distinct, lookups))
    uniform = -height * np.expm1(lookups * np.log1p(-1.0 / np.maximum(height, 2.0)))
    for i in np.flatnonzero((kept < distinct) & (distinct < _SKEWED * uniform)):
        hot = zipf_like(int(height[i]), float(lookups[i]), float(distinct[i]))
        missing[i] = np.clip(lookups[i] - hot.hits(float(kept[i]), float(lookups[i])), distinct[i], lookups[i])
    return np.asarray(missing * tables)


def _forward(calls: Calls, device: Device) -> _Traffic:
    """Indices and offsets once, rows that miss, the pooled result."""
    lookups, row = calls["lookups"], _row_bytes(calls)
    bags = calls["batch"] * calls["tables"]
    keys = lookups * (calls["index_bytes"] + 4.0 * calls["weighted"]) + bags * calls["index_bytes"]
    pooled = bags * row
    slot = np.where(calls.is_kind("tbe_forward"), np.maximum(row, 16.0 * _lanes(calls)), row)
    return _Traffic(
        dram_read=_missing_lookups(calls, device) * row + keys,
        streamed=pooled,
        scattered=np.zeros(len(calls)),
        l2=lookups * slot + keys + pooled,
    )


def _backward(calls: Calls, device: Device) -> _Traffic:
    """Gradients of the bags, rows read and written back, optimizer state with them.

    The table-batched kernel updates a row at every lookup; the others have sorted the lookups and touch it once.
    """
    lookups, row, distinct = calls["lookups"], _row_bytes(calls), calls["distinct_rows"]
    bags = calls["batch"] * calls["tables"]
    each = calls.is_kind("batched_backward_sgd")
    dense = calls.is_kind("lookup_backward_dense", "bag_backward_dense")
    touched = np.where(each, _missing_lookups(calls, device), distinct)
    rows_of_state = np.array([_STATE_ROWS.get(kind, 0.0) for kind in calls.family.kinds])[calls.kind]
    scalars = np.array([_STATE_SCALARS.get(kind, 0.0) for kind in calls.family.kinds])[calls.kind]
    updated = touched * (row * (1.0 + rows_of_state) + _SECTOR * scalars)
    one_table = calls["batch"] * row  # gradients of one table: all its rows meet them before the next table
    spilled = np.clip(1.0 - L2_SHARE * device.l2_bytes / np.maximum(one_table, 1.0), 0.0, 1.0)
    gradients = np.where(each, bags * row, np.maximum(bags, lookups * spilled) * row)
    keys = lookups * (calls["index_bytes"] + np.where(each, 0.0, 4.0))
    slot = np.maximum(row, 16.0 * _lanes(calls))
    return _Traffic(
        dram_read=gradients + keys + np.where(dense, 0.0, updated),
        streamed=np.zeros(len(calls)),
        scattered=updated,
        l2=keys + np.where(each, 2.0 * lookups * row, lookups * slot) + gradients,
    )
