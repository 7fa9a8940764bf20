"""Embedding kernels by the memory they touch: how often rows repeat, DRAM reads and writes, L2 traffic, and what the L2
keeps.

The idea is the papers': of the rows looked up, those still in L2 cost no DRAM traffic, and time is the larger of DRAM
and L2 time. `Rates` are what `traincast fit` learns; the other constants are those that no measured row tells
(`docs/evidence/embeddings.md`). Bytes are sums over tables (`embeddings.load`), so that one kernel may hold tables of
any sizes and skews.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log

import numpy as np

from traincast.costs.kernels.contract import Calls, KernelCall, get_clock_hz, get_dram_gain, get_pinned_rate
from traincast.costs.kernels.embedding import EMBEDDING
from traincast.hardware.device import Device
from traincast.models.embeddings.access import Access, Uniform
from traincast.models.embeddings.table import CACHE_BYTES, OPTIMIZER_STATE, OptimizerState, compute_table_load
from traincast.models.embeddings.table import FIELDS as LOAD_FIELDS
from traincast.utils.arrays import BoolArray, FloatArray

_LOOKUPS, _DISTINCT = LOAD_FIELDS.index("lookups"), LOAD_FIELDS.index("distinct_rows")


@dataclass(frozen=True, slots=True)
class Tables:
    """What a lookup touches: `load` in the order of `embeddings.load.FIELDS`, `rows` of all tables together.

    `ascending` says that the indices of every bag are sorted; `host` that the rows are in host memory (1), or only
    their optimizer state (2).
    """

    batch: int
    load: tuple[float, ...]
    rows: float
    longest_bag: float
    index_bytes: int
    row_item_bytes: int
    weighted: bool = False
    ascending: bool = False
    host: int = 0

    @property
    def lookups(self) -> int:
        """Lookups over all tables and samples."""
        return round(self.load[_LOOKUPS])

    @property
    def distinct(self) -> float:
        """Different rows over all tables."""
        return self.load[_DISTINCT]

    def call(self, kind: str, compute: str = "fp32") -> KernelCall:
        """The embedding kernel of this kind over these tables."""
        sizes: dict[str, float] = dict(zip(LOAD_FIELDS, self.load, strict=True))
        sizes |= {
            "batch": self.batch,
            "longest_bag": self.longest_bag,
            "index_bytes": self.index_bytes,
            "row_item_bytes": self.row_item_bytes,
            "weighted": int(self.weighted),
            "sorted": int(self.ascending),
            "host": self.host,
        }
        return EMBEDDING.call(kind, compute, estimated=False, **sizes)


def make_uniform_tables(
    *,
    batch: int,
    lookups: int,
    rows: Sequence[float],
    dims: Sequence[float],
    index_bytes: int,
    row_item_bytes: int,
    weighted: bool = False,
    ascending: bool = False,
) -> Tables:
    """Tables of these row counts and dims, each with an equal part of the lookups, which want all its rows alike."""
    pooling = lookups / max(1, batch * len(rows))
    return make_pooled_tables(
        batch=batch,
        pooling=(pooling,) * len(rows),
        access=(Uniform(),) * len(rows),
        rows=rows,
        dims=dims,
        index_bytes=index_bytes,
        row_item_bytes=row_item_bytes,
        weighted=weighted,
        ascending=ascending,
    )


def make_pooled_tables(
    *,
    batch: int,
    pooling: Sequence[float],
    access: Sequence[Access],
    rows: Sequence[float],
    dims: Sequence[float],
    index_bytes: int,
    row_item_bytes: int,
    weighted: bool = False,
    ascending: bool = False,
) -> Tables:
    """Tables of these row counts and dims, each with its lookups per sample and the rows that those want."""
    load = np.zeros(len(LOAD_FIELDS))
    for kind, height, length, dim in zip(access, rows, pooling, dims, strict=True):
        load += compute_table_load(kind, max(1, round(height)), batch * length, dim, row_item_bytes)
    return Tables(
        batch=batch,
        load=tuple(load.tolist()),
        rows=sum(rows),
        longest_bag=max(pooling),
        index_bytes=index_bytes,
        row_item_bytes=row_item_bytes,
        weighted=weighted,
        ascending=ascending,
    )


def make_fill_call(lookups: float, fetched_bytes: float) -> KernelCall:
    """The kernels that search FBGEMM's cache for the rows of these lookups and bring those it lacks."""
    sizes = dict.fromkeys(EMBEDDING.fields, 0.0) | {"lookups": float(lookups), "row_bytes": float(fetched_bytes)}
    return EMBEDDING.call("cache_fill", "fp32", estimated=False, **sizes)


def guess_longest_bag(batch: int, tables: int, lookups: float) -> float:
    """Lookups of the longest bag where only the mean is known: lengths are taken to fall off exponentially.

    The longest of n is then the mean times the n-th harmonic number. Where every sample makes the same number of
    lookups, no bag has more than that number.
    """
    bags = max(1, batch * tables)
    mean = lookups / bags
    if mean <= 1.0:
        return float(mean > 0)
    longest = mean * (log(bags) + np.euler_gamma)
    per_sample = lookups / max(1, batch)
    return float(min(longest, per_sample)) if per_sample == round(per_sample) else float(longest)


L2_SHARE = 0.9  # of the L2 that rows can occupy
BAG_LOOKUP_SECONDS = 0.2e-6  # other kernels, at most: 8 more lookups per bag cost them 1.9 us where rows are in L2
_LOOKUPS_PER_BLOCK = 16  # warps of a block of FBGEMM's warp-per-row kernel, one lookup each
_LOOKUPS_PER_LONG_BLOCK = 1024  # that FBGEMM gives one block of its block-per-row kernel
_SECTOR = 32  # bytes: the least that NVIDIA's L2 and DRAM move
_SECTORS_PER_LINE = 4.0  # a line of NVIDIA's L2 has 128 bytes
_FP32_BYTES = 4.0
_THREADS_PER_SM = 2048  # resident at most, on all data-centre cards (CUDA programming guide)
_ROWS_IN_HOST, _STATE_IN_HOST, _ROWS_NEXT_DOOR = 1, 2, 3  # values of the field `host`
_SELECT_THREADS = 1024  # per SM, at most, that ATen's index_select launches: 8 blocks of 128, an element each at a time
# optimizer state that a fused backward reads and writes
_STATE = {f"tbe_backward_{optimizer}": state for optimizer, state in OPTIMIZER_STATE.items()}
_NO_STATE = OptimizerState()
_ATEN_DENSE = ("lookup_backward_dense", "bag_backward_dense")
_DENSE = (*_ATEN_DENSE, "tbe_backward_dense")
_FORWARD = ("bag_forward", "lookup_forward", "batched_forward", "tbe_forward", "row_gather")
_MISSING = tuple(f"missing_{int(size) >> 10}k" for size in CACHE_BYTES)
# Rows behind a link are not kept in the L2. Three tables of 8 to 268 million rows with the same law of access say how
# much is kept all the same: what an L1 holds.
_MISSING_LINK = "missing_128k"


@dataclass(frozen=True, slots=True)
class Rates:
    """What measurements tell. Without any: the figures the roofline has, set by hand."""

    start_seconds: float = 3e-6  # launch, index, then row: two trips to memory one after the other
    update_start_seconds: float = 15e-6  # FBGEMM's two update kernels with next to nothing to do
    read_share: float = 0.94  # of DRAM peak: whole rows at random places are read as fast as a stream
    scattered_write_share: float = 0.314  # rows written back where random order evicts them
    sorted_write_share: float = 0.606  # the same where neighbouring rows are evicted together
    l2_bytes_per_clock: float = 21.0  # per SM
    long_row_seconds: float = 2.6e-6  # FBGEMM's block-per-row kernel: what the warps of a block do together, per row
    long_row_l2_share: float = 0.583  # of the L2's rate, in that kernel
    empty_block_cycles: float = 185.0  # per SM: its warp-per-row kernel launches a warp per lookup, most return at once
    lookup_seconds: float = 0.6e-6  # FBGEMM's forward waits for one row before it asks for the next: from DRAM
    lookup_l2_seconds: float = 0.3e-6  # the same from L2
    select_seconds: float = 1.2e-6  # a thread of ATen's index_select: its row's number, then an element, then writes
    select_dram_seconds: float = 0.2e-6  # what an element from DRAM adds
    gather_share: float = 0.9  # of DRAM peak, where a kernel copies rows and does nothing else
    host_read_share: float = 1.0  # of a pinned copy's rate, where a lookup reads rows in host memory
    host_update_share: float = 0.86  # the same where rows, or their optimizer state, are read and written back
    peer_share: float = 0.75  # of NVLink in one direction, where a lookup reads rows of GPUs next door
    fused_write_share: float = 0.35  # of DRAM peak: rows that FBGEMM's update writes back, in order
    gradient_write_share: float = 0.07  # rows that ATen's two kernels of a dense gradient write, sums on the way too
    fill_cycles: float = 150.0  # of an SM per lookup: FBGEMM's search for rows that its cache lacks, their order by set


SHEET_RATES = Rates()


@dataclass(frozen=True, slots=True)
class _Traffic:
    """Bytes of each kind that calls move; `host_*` over PCIe, `peer_read` over NVLink."""

    dram_read: FloatArray
    streamed: FloatArray
    scattered: FloatArray
    l2: FloatArray
    host_read: FloatArray
    host_written: FloatArray
    peer_read: FloatArray


def estimate_embedding_seconds(calls: Calls, device: Device, rates: Rates = SHEET_RATES) -> FloatArray:
    """Device time of embedding calls."""
    forward = calls.is_kind(*_FORWARD)
    sums, fills = calls.is_kind("row_sums"), calls.is_kind("cache_fill")
    updates = ~(forward | sums | fills)
    seconds = np.empty(len(calls))
    for chosen, time in (
        (forward, _estimate_forward_seconds),
        (sums, _estimate_sums_seconds),
        (fills, _estimate_fill_seconds),
        (updates, _estimate_backward_seconds),
    ):
        if chosen.any():
            seconds[chosen] = time(calls.take(chosen), device, rates)
    return seconds


def sheet_seconds(calls: Calls, device: Device, start: float) -> FloatArray:
    """The roofline: the same with the rates set by hand, which hold the start of a kernel."""
    return estimate_embedding_seconds(calls, device)


def _estimate_forward_seconds(calls: Calls, device: Device, rates: Rates) -> FloatArray:
    traffic = _count_forward_traffic(calls, device)
    dram = _estimate_dram_seconds(traffic, device, rates, rates.sorted_write_share)
    dram = dram * np.where(calls.is_kind("row_gather"), rates.read_share / rates.gather_share, 1.0)
    moving = np.maximum(dram, _estimate_l2_seconds(traffic, device, rates))
    links = np.maximum(
        _estimate_host_seconds(traffic, device, rates.host_read_share), _estimate_peer_seconds(traffic, device, rates)
    )
    busy = np.maximum(np.maximum(moving, links), _estimate_waiting_seconds(calls, device, rates))
    return np.asarray(rates.start_seconds + busy)


def _estimate_waiting_seconds(calls: Calls, device: Device, rates: Rates) -> FloatArray:
    """What one thread does one after the other, however idle the memory is."""
    missing = _count_missing_bytes(calls, device) / np.maximum(calls["row_bytes"], 1.0)
    in_flight = device.num_sms * _THREADS_PER_SM
    # lookups that follow each other in one warp: those of the longest bag, or of the bags that a warp's place sees
    one_by_one = np.maximum(calls["longest_bag"], calls["lane_lookups"] / in_flight)
    row = rates.lookup_l2_seconds + missing * (rates.lookup_seconds - rates.lookup_l2_seconds)
    elements = calls["lookups"] * calls["columns"] / np.maximum(calls["tables"], 1.0)
    selected = elements / (device.num_sms * _SELECT_THREADS)
    return np.select(
        [calls.is_kind("tbe_forward"), calls.is_kind("lookup_forward"), calls.is_kind("row_gather")],
        [row * one_by_one, selected * (rates.select_seconds + missing * rates.select_dram_seconds), 0.0],
        BAG_LOOKUP_SECONDS * calls["longest_bag"],
    )


def _estimate_fill_seconds(calls: Calls, device: Device, rates: Rates) -> FloatArray:
    """The search, and then rows both ways over PCIe at once."""
    search = rates.fill_cycles * calls["lookups"] / (device.num_sms * get_clock_hz(device))
    moved = calls["row_bytes"] / (rates.host_update_share * get_pinned_rate(device))
    return np.asarray(rates.start_seconds + search + moved)


def _estimate_backward_seconds(calls: Calls, device: Device, rates: Rates) -> FloatArray:
    """Time of the update. FBGEMM gives rows with many lookups a block each, two blocks per SM, and the others a warp.

    It launches a warp per lookup, and those that find no row of their own return at once.
    """
    traffic = _count_backward_traffic(calls, device)
    fused = _select_kinds_starting(calls, "tbe_backward")
    dram = _estimate_dram_seconds(traffic, device, rates, _get_write_share(calls, rates))
    l2 = _estimate_l2_seconds(traffic, device, rates)
    lookups = np.maximum(calls["lookups"], 1.0)
    long = np.where(fused, calls["long_lookups"] / lookups, 0.0)
    blocks = np.clip(np.ceil(calls["long_lookups"] / _LOOKUPS_PER_LONG_BLOCK), 1.0, 2.0 * device.num_sms)
    together = np.where(fused, rates.long_row_seconds * calls["long_rows"] / blocks, 0.0)
    idle_warps = np.maximum(lookups - (calls["distinct_rows"] - calls["long_rows"]), 0.0)
    empty = idle_warps / _LOOKUPS_PER_BLOCK * rates.empty_block_cycles / (device.num_sms * get_clock_hz(device))
    working = together + l2 * (long / rates.long_row_l2_share + 1.0 - long)
    start = np.where(fused, rates.update_start_seconds, rates.start_seconds)
    busy = np.maximum(np.maximum(dram, working), _estimate_host_seconds(traffic, device, rates.host_update_share))
    return np.asarray(start + busy + np.where(fused, empty, 0.0))


def _get_write_share(calls: Calls, rates: Rates) -> FloatArray:
    """Of DRAM peak, where rows are written back. A cache has them in random order, however they are sorted."""
    ordered = (calls["sorted"] > 0) | calls.is_kind("tbe_backward_dense")
    fused = _select_kinds_starting(calls, "tbe_backward") & ~calls.is_kind("tbe_backward_dense")
    shuffled = np.where(calls["host"] == _STATE_IN_HOST, rates.scattered_write_share / rates.sorted_write_share, 1.0)
    return np.select(
        [fused, calls.is_kind(*_ATEN_DENSE), ordered],
        [rates.fused_write_share * shuffled, rates.gradient_write_share, rates.sorted_write_share],
        rates.scattered_write_share,
    )


def _estimate_sums_seconds(calls: Calls, device: Device, rates: Rates) -> FloatArray:
    """Rows read in order and added to sums with atomics, of which the L2 makes one sector per clock in any one line."""
    missing = _count_missing_bytes(calls, device)
    keys = calls["lookups"] * calls["index_bytes"]
    traffic = _Traffic(
        dram_read=calls["row_bytes"] + keys + missing,
        streamed=np.zeros(len(calls)),
        scattered=missing,
        l2=3.0 * calls["row_bytes"] + keys,
        host_read=np.zeros(len(calls)),
        host_written=np.zeros(len(calls)),
        peer_read=np.zeros(len(calls)),
    )
    row = calls["row_bytes"] / np.maximum(calls["lookups"], 1.0)
    hottest = calls["longest_bag"] * np.clip(np.ceil(row / _SECTOR), 1.0, _SECTORS_PER_LINE) / get_clock_hz(device)
    moving = np.maximum(
        _estimate_dram_seconds(traffic, device, rates, rates.scattered_write_share),
        _estimate_l2_seconds(traffic, device, rates),
    )
    return np.asarray(rates.start_seconds + np.maximum(moving, hottest))


def _select_kinds_starting(calls: Calls, prefix: str) -> BoolArray:
    return np.asarray(np.array([kind.startswith(prefix) for kind in calls.family.kinds])[calls.kind])


def _estimate_dram_seconds(
    traffic: _Traffic, device: Device, rates: Rates, write_share: FloatArray | float
) -> FloatArray:
    streams = (traffic.dram_read + traffic.streamed) / rates.read_share
    return np.asarray((streams + traffic.scattered / write_share) / (get_dram_gain(device) * device.dram_bandwidth))


def _estimate_l2_seconds(traffic: _Traffic, device: Device, rates: Rates) -> FloatArray:
    return np.asarray(traffic.l2 / (rates.l2_bytes_per_clock * device.num_sms * get_clock_hz(device)))


def _estimate_host_seconds(traffic: _Traffic, device: Device, share: float) -> FloatArray:
    """Both directions of PCIe at once, at this share of a pinned copy's rate."""
    return np.asarray(np.maximum(traffic.host_read, traffic.host_written) / (share * get_pinned_rate(device)))


def _estimate_peer_seconds(traffic: _Traffic, device: Device, rates: Rates) -> FloatArray:
    """All links of the GPU at once; over PCIe where it has none."""
    link = 0.5 * rates.peer_share * device.nvlink_bandwidth or rates.host_read_share * get_pinned_rate(device)
    return np.asarray(traffic.peer_read / link)


def _count_missing_bytes(calls: Calls, device: Device) -> FloatArray:
    """Row bytes that reach DRAM: first touches, and rows that left the L2 before they were accessed again.

    The tables in flight share the L2 evenly.
    """
    tables = np.maximum(calls["tables"], 1.0)
    resident = device.num_sms * _THREADS_PER_SM / np.maximum(calls["lanes"] / tables, 1.0)
    in_flight = np.clip(resident / np.maximum(calls["batch"], 1.0), 1.0, tables)
    kept = np.clip(L2_SHARE * device.l2_bytes / in_flight, CACHE_BYTES[0], CACHE_BYTES[-1])
    curve = np.stack([calls[name] for name in _MISSING], axis=1)
    place = np.log2(kept / CACHE_BYTES[0])
    below = np.minimum(place.astype(np.int64), len(CACHE_BYTES) - 2)
    rows = np.arange(len(calls))
    share = place - below
    return np.asarray(curve[rows, below] * (1.0 - share) + curve[rows, below + 1] * share)


def _count_forward_traffic(calls: Calls, device: Device) -> _Traffic:
    """Indices and offsets once, rows that miss, the pooled result."""
    keys = calls["lookups"] * (calls["index_bytes"] + 4.0 * calls["weighted"])
    keys = keys + calls["batch"] * calls["tables"] * calls["index_bytes"]
    tbe = calls.is_kind("tbe_forward")
    pooled = calls["batch"] * calls["columns"] * np.where(tbe, _FP32_BYTES, calls["row_item_bytes"])
    missing, nothing = _count_missing_bytes(calls, device), np.zeros(len(calls))
    in_host, next_door = calls["host"] == _ROWS_IN_HOST, calls["host"] == _ROWS_NEXT_DOOR
    return _Traffic(
        dram_read=np.where(in_host | next_door, 0.0, missing) + keys,
        streamed=pooled,
        scattered=nothing,
        l2=np.where(tbe, calls["slot_bytes"], calls["row_bytes"]) + keys + pooled,
        host_read=np.where(in_host, calls[_MISSING_LINK], 0.0),
        host_written=nothing,
        peer_read=np.where(next_door, calls[_MISSING_LINK], 0.0),
    )


def _count_backward_traffic(calls: Calls, device: Device) -> _Traffic:
    """Gradients of the bags, rows read and written back, optimizer state with them.

    The table-batched kernel updates a row at every lookup; the others have sorted the lookups and touch it once.
    State of every element is where the rows are, or in host memory behind a cache.
    """
    per_lookup, dense = calls.is_kind("batched_backward_sgd"), calls.is_kind(*_DENSE)
    rows = np.where(per_lookup, _count_missing_bytes(calls, device), calls["touched_bytes"])
    states = [_STATE.get(kind, _NO_STATE) for kind in calls.family.kinds]
    rows_of_state = np.array([float(state.per_weight) for state in states])[calls.kind]
    scalars = np.array([float(state.per_row) for state in states])[calls.kind]
    state = calls["touched_fp32_bytes"] * rows_of_state
    in_host, state_in_host = calls["host"] == _ROWS_IN_HOST, calls["host"] == _STATE_IN_HOST
    on_host = np.where(in_host, rows + state, np.where(state_in_host, state, 0.0))
    row_wise = calls["distinct_rows"] * _SECTOR * scalars  # FBGEMM keeps it on the device wherever the rows are
    updated = rows + state - on_host + row_wise
    pooled = calls["batch"] * calls["columns"] * _FP32_BYTES
    one_table = pooled / np.maximum(calls["tables"], 1.0)  # all rows of a table meet its gradients before the next one
    spilled = np.clip(1.0 - L2_SHARE * device.l2_bytes / np.maximum(one_table, 1.0), 0.0, 1.0)
    fetched = calls["row_bytes"] * _FP32_BYTES / np.maximum(calls["row_item_bytes"], 1.0)
    gradients = np.where(per_lookup, pooled, np.maximum(pooled, fetched * spilled))
    keys = calls["lookups"] * (calls["index_bytes"] + np.where(per_lookup, 0.0, 4.0))
    return _Traffic(
        dram_read=gradients + keys + np.where(dense, 0.0, updated),
        streamed=np.zeros(len(calls)),
        scattered=updated,
        l2=keys + np.where(per_lookup, 2.0 * calls["row_bytes"], calls["slot_bytes"]) + gradients,
        host_read=np.where(dense, 0.0, on_host),
        host_written=on_host,
        peer_read=np.zeros(len(calls)),
    )
