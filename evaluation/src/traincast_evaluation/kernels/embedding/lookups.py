"""Whole lookups of public benchmarks: launches that were timed together, read from their tables."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from traincast.costs.kernels.contract import Calls, KernelCall
from traincast.costs.kernels.cost import price_calls
from traincast.costs.kernels.embedding import EMBEDDING
from traincast.costs.kernels.embedding.lowering.inputs import make_moved_elements, make_populate_items
from traincast.costs.kernels.embedding.lowering.lookups import lower_tbe_preparation, make_dense_backward
from traincast.costs.kernels.embedding.model import Watches
from traincast.costs.kernels.embedding.physics import (
    Rates,
    Tables,
    estimate_embedding_seconds,
    make_pooled_tables,
    make_uniform_tables,
)
from traincast.costs.kernels.registry import Control, Item
from traincast.costs.kernels.streaming.launches import make_elementwise_call
from traincast.costs.kernels.streaming.lowering.index import count_index_bits
from traincast.hardware import Device, find_device_by_name
from traincast.ir.ops import TensorSpec
from traincast.models.embeddings.access import Power, Uniform, make_row_classes
from traincast.utils.arrays import BoolArray, FloatArray, IntArray
from traincast_evaluation.measured_tables import MeasuredTable, read_table

HELD_OUT_SHARE = 1 / 3
"""Of the configurations of the public lookup tables: what no fit may see. They are few, so more than a fifth."""
_SEED = "embedding_lookups 2026"
FOLDER = "embedding_lookups"
FBGEMM_FILE = f"{FOLDER}/dynamicemb_fbgemm_h100.csv"
UGACHE_FILE = f"{FOLDER}/ugache_v100_a100.csv"
ATEN_FILE = f"{FOLDER}/liger_nn_embedding_a100.csv"
FILES = (FBGEMM_FILE, UGACHE_FILE, ATEN_FILE)
_BATCHES = 100  # different batches of NVIDIA's benchmark: caches are sized by their different rows
# an update is launched while the lookup before it runs
_FBGEMM_WATCH = {"tbe_nobag_forward": "training", "tbe_nobag_forward_eval": "inference", "tbe_nobag_backward": ""}
_OPTIMIZERS = {"exact_sgd": "sgd", "sgd": "sgd", "adam": "adam"}
_HOST = {"device": 0, "managed": 1, "managed_caching": 2}
_PLACES = {"device": "HBM", "managed": "UVM", "managed_caching": "cached UVM"}
_SHARED_LINK = {8: 2}  # DGX-1 and DGX A100: two GPUs share a link to the host, and all gather at once
_FAR_APART = 1 << 33  # rows: drawn from this many, none is wanted twice
_ATEN_OPS = {"nn_embedding_forward": False, "nn_embedding_forward_backward": True}
_CONFIGURATION = {
    FBGEMM_FILE: (
        "device", "num_gpus", "batch", "num_tables", "rows_per_table", "embedding_dim", "pooling", "num_indices",
        "alpha", "optimizer", "placement", "cache_settings",
    ),
    UGACHE_FILE: (
        "device", "num_gpus", "batch", "embedding_dim", "rows_per_table", "num_tables", "alpha", "distribution",
        "platform", "model", "dataset", "policy", "cache_rate",
    ),
    ATEN_FILE: ("device", "batch", "rows_per_table", "embedding_dim", "num_indices", "weights_dtype"),
}  # fmt: skip
"""The columns that a seeded hash holds rows back by, set down before any measured value was looked at."""


@dataclass(frozen=True, slots=True)
class WholeLookup:
    """Launches that were timed together. Those `beside` run at the same time as the others, on a link of their own;
    `known_seconds` were measured apart and `watch` is one of `WATCHES`."""

    device: Device
    items: tuple[Item, ...]
    seconds: float
    held_out: bool
    group: str
    name: str
    beside: tuple[Item, ...] = ()
    known_seconds: float = 0.0
    watch: str = ""


def uses_links(lookup: WholeLookup) -> bool:
    """Whether rows or their state come over PCIe or NVLink."""
    calls = [item for item in (*lookup.items, *lookup.beside) if isinstance(item, KernelCall)]
    host = EMBEDDING.fields.index("host")
    return any(call.family is EMBEDDING and (call.values[host] > 0 or call.kind == "cache_fill") for call in calls)


def is_held_back(configuration: Sequence[object]) -> bool:
    """Whether no fit may see the rows of this configuration: a seeded hash of its columns decides."""
    text = "|".join([_SEED, *("" if part is None or part != part else str(part) for part in configuration)])
    first = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
    return first / 2.0**64 < HELD_OUT_SHARE


class WholeLookups:
    """Many of them, costed at once for any rates of the embedding family; other families are costed as shipped."""

    def __init__(self, lookups: Sequence[WholeLookup]) -> None:
        self.lookups = tuple(lookups)
        self._main = _Launches([lookup.items for lookup in lookups], self.lookups)
        self._beside = _Launches([lookup.beside for lookup in lookups], self.lookups)
        self.known = np.array([lookup.known_seconds for lookup in lookups])
        self.measured = np.array([lookup.seconds for lookup in lookups])
        self.held_out: BoolArray = np.array([lookup.held_out for lookup in lookups], dtype=np.bool_)

    def seconds(self, rates: Rates, watches: Watches) -> FloatArray:
        """What the stopwatch should have shown."""
        busy = np.maximum(self._main.seconds(rates), self._beside.seconds(rates))
        return np.asarray(self.known + busy + np.array([watches.of(lookup.watch) for lookup in self.lookups]))

    def measurements(self) -> Iterator[tuple[Device, Calls]]:
        """The embedding kernels in them, by device: what was measured, if not each by itself."""
        for launches in (self._main, self._beside):
            yield from ((device, calls) for device, calls, _ in launches.parts)


class _Launches:
    """The launches of many lookups, one after the other within each."""

    def __init__(self, launches: Sequence[tuple[Item, ...]], lookups: Sequence[WholeLookup]) -> None:
        self.others = np.zeros(len(launches))
        costed: dict[tuple[str, KernelCall], float] = {}
        by_device: dict[str, tuple[Device, list[KernelCall], list[int]]] = {}
        for number, (items, lookup) in enumerate(zip(launches, lookups, strict=True)):
            _, own, which = by_device.setdefault(lookup.device.key, (lookup.device, [], []))
            for item in items:
                if isinstance(item, Control):
                    continue
                if item.family is EMBEDDING:
                    own.append(item)
                    which.append(number)
                else:
                    key = (lookup.device.key, item)
                    costed[key] = costed.get(key) or _shipped_seconds(item, lookup.device)
                    self.others[number] += costed[key]
        self.parts: list[tuple[Device, Calls, IntArray]] = [
            (device, Calls.of(EMBEDDING, own), np.array(which, dtype=np.int64))
            for device, own, which in by_device.values()
            if own
        ]

    def seconds(self, rates: Rates) -> FloatArray:
        total = self.others.copy()
        for device, calls, which in self.parts:
            total += np.bincount(which, estimate_embedding_seconds(calls, device, rates), minlength=len(total))
        return total


def _shipped_seconds(call: KernelCall, device: Device) -> float:
    return float(price_calls(Calls.of(call.family, [call]), device)[0].seconds[0])


def read_whole_lookups(data: Path) -> list[WholeLookup]:
    """All rows that are lookups of FBGEMM, UGache or ATen with a complete configuration.

    NVIDIA's own hash tables, HugeCTR's and the all-to-all of SOK are other programs and are left out.
    """
    return [*_fbgemm_rows(data), *_ugache_rows(data), *_aten_rows(data)]


def _held_back(data: Path, file: str) -> BoolArray:
    """Which rows of a file no fit may see. Numbers count as they are written."""
    table = read_table(data, file, _CONFIGURATION[file], (), optional=_CONFIGURATION[file])
    columns = [table.text(name) for name in _CONFIGURATION[file]]
    return np.array([is_held_back(configuration) for configuration in zip(*columns, strict=True)], dtype=np.bool_)


def _read(data: Path, file: str, words: tuple[str, ...], numbers: tuple[str, ...]) -> MeasuredTable:
    """A table with a column `held_out`."""
    optional = ("optimizer", "cache_settings")  # lookups have no optimizer, and few tables a cache
    table = read_table(data, file, words, numbers, positive=("latency_us", "embedding_dim"), optional=optional)
    return replace(table, columns=table.columns | {"held_out": _held_back(data, file)})


def _fbgemm_rows(data: Path) -> Iterator[WholeLookup]:
    numbers = ("batch", "num_tables", "rows_per_table", "embedding_dim", "alpha", "latency_us")
    words = ("device", "op", "optimizer", "placement", "cache_settings", "includes")
    table = _read(data, FBGEMM_FILE, words, numbers)
    ops = table.text("op").astype(str)
    table = table.take(np.isin(ops, list(_FBGEMM_WATCH)))
    for row, op in enumerate(table.text("op")):
        batch, count, height, dim = (int(table.number(name)[row]) for name in numbers[:4])
        place, optimizer = str(table.text("placement")[row]), table.text("optimizer")[row]
        tables = make_pooled_tables(
            batch=batch, pooling=(1.0,) * count, access=(Power(table.number("alpha")[row]),) * count,
            rows=(height,) * count, dims=(dim,) * count, index_bytes=8, row_item_bytes=4,
        )  # fmt: skip
        tables = replace(tables, host=_HOST[place])
        settings = table.text("cache_settings")[row]
        items = (
            _fbgemm_update(tables, str(optimizer)) if op.endswith("backward")
            else _fbgemm_lookup(tables, _fetched_bytes(tables, table, row, str(settings)))
        )  # fmt: skip
        alone = "CUDA events around one module call" in str(table.text("includes")[row])
        way = "update" if op.endswith("backward") else "lookup"
        yield WholeLookup(
            find_device_by_name(str(table.text("device")[row])), items, 1e-6 * float(table.number("latency_us")[row]),
            bool(table.columns["held_out"][row]),
            f"FBGEMM {way}, {_PLACES[place]}, H100",
            f"{op}, {count} x {height} rows, {batch * count} lookups, {optimizer}, {place}",
            watch=_FBGEMM_WATCH[op] if alone else "",
        )  # fmt: skip


def _fetched_bytes(tables: Tables, table: MeasuredTable, row: int, settings: str) -> float:
    """Row bytes that a batch brings into FBGEMM's cache once that has been in use for long."""
    if tables.host != _HOST["managed_caching"]:
        return 0.0
    count, height = int(table.number("num_tables")[row]), int(table.number("rows_per_table")[row])
    classes = make_row_classes(Power(table.number("alpha")[row]), height)
    lookups = tables.lookups / count
    share = float(settings.split()[-1])
    cached = share * (height if "cache_load_factor" in settings else classes.count_unique_rows(_BATCHES * lookups))
    rows = min(lookups * (1.0 - classes.compute_steady_hit_rate(cached)), classes.count_unique_rows(lookups))
    return count * rows * 4.0 * float(table.number("embedding_dim")[row])


def _fbgemm_lookup(tables: Tables, fetched_bytes: float) -> tuple[Item, ...]:
    lookup = tables.call("tbe_forward")
    if tables.host != _HOST["managed_caching"]:
        return (lookup,)
    indices = TensorSpec((tables.lookups,), (1,), "int64")
    bits = count_index_bits(int(tables.rows))
    return (
        make_moved_elements(indices, 1),
        *make_populate_items(indices, bits, int(tables.distinct), fetched_bytes),
        lookup,
    )


def _fbgemm_update(tables: Tables, optimizer: str) -> tuple[Item, ...]:
    return (*lower_tbe_preparation(tables), tables.call(f"tbe_backward_{_OPTIMIZERS[optimizer]}"))


def _ugache_rows(data: Path) -> Iterator[WholeLookup]:
    """Gathers of rows that are here, next door or with the host: each part by itself, and the whole batch."""
    numbers = (
        "num_gpus", "embedding_dim", "cache_rate", "latency_us", "local_bytes", "peer_bytes", "host_bytes",
        "feature_bytes", "get_index_us", "gather_local_us", "gather_peer_us", "gather_host_us",
    )  # fmt: skip
    words = ("device", "model", "dataset", "policy", "weights_dtype", "config_complete")
    table = _read(data, UGACHE_FILE, words, numbers)
    complete = np.array([str(value).lower() == "true" for value in table.text("config_complete")])
    gathers = np.array([not str(policy).startswith(("HPS", "SOK")) for policy in table.text("policy")])
    known = ~np.isnan(table.number("local_bytes")) | (table.number("cache_rate") >= 1.0)
    table = table.take(complete & gathers & known)
    for row in range(len(table)):
        yield from _ugache_parts(table, row, bool(table.columns["held_out"][row]))


def _ugache_parts(table: MeasuredTable, row: int, held_out: bool) -> Iterator[WholeLookup]:
    """Where all rows are local the gather is a sample by itself; where they are not, links are, and so is the batch."""
    device = find_device_by_name(str(table.text("device")[row]))
    gpus = int(table.number("num_gpus")[row])
    words = ", ".join(str(table.text(name)[row]) for name in ("dataset", "model", "policy"))
    label = f"{gpus} x {device.key}, {words}, {table.number('cache_rate')[row]:g} cached"
    size = {name: float(table.number(f"{name}_bytes")[row]) for name in ("local", "peer", "host", "feature")}
    taken = {name: 1e-6 * float(table.number(f"gather_{name}_us")[row]) for name in ("local", "peer", "host")}
    if np.isnan(size["local"]):
        yield WholeLookup(
            device, _gathered(table, row, size["feature"], 0), taken["local"], held_out, "UGache gather, HBM", label
        )
        return
    far = {"host": _gathered(table, row, size["host"] * _SHARED_LINK.get(gpus, 1), 1)}
    far["peer"] = _gathered(table, row, size["peer"], 3)
    for name, items in far.items():
        if taken[name] == max(taken.values()):  # others run alongside it, and share the SMs
            yield WholeLookup(device, items, taken[name], held_out, f"UGache gather, {name}", label)
    near = (*_gathered(table, row, size["local"], 0), *far["peer"])
    yield WholeLookup(
        device, near, 1e-6 * float(table.number("latency_us")[row]), held_out, "UGache batch, HBM + peers + host",
        label, beside=far["host"], known_seconds=1e-6 * float(table.number("get_index_us")[row]),
    )  # fmt: skip


def _gathered(table: MeasuredTable, row: int, nbytes: float, host: int) -> tuple[Item, ...]:
    """One kernel that copies this many bytes of rows from where they are."""
    item = 2 if str(table.text("weights_dtype")[row]) == "fp16" else 4
    dim = int(table.number("embedding_dim")[row])
    count = round(nbytes / (item * dim))
    if not count:
        return ()
    tables = make_uniform_tables(
        batch=count, lookups=count, rows=(_FAR_APART,), dims=(dim,), index_bytes=4, row_item_bytes=item
    )
    return (replace(tables, host=host).call("row_gather", "fp16" if item == 2 else "fp32"),)


def _aten_rows(data: Path) -> Iterator[WholeLookup]:
    numbers = ("rows_per_table", "embedding_dim", "num_indices", "latency_us")
    table = _read(data, ATEN_FILE, ("device", "op"), numbers)
    table = table.take(np.isin(table.text("op").astype(str), list(_ATEN_OPS)))
    for row, op in enumerate(table.text("op")):
        height, dim, count = (int(table.number(name)[row]) for name in numbers[:3])
        device = find_device_by_name(str(table.text("device")[row]))
        yield WholeLookup(
            device, _aten_items(device, height, dim, count, backward=_ATEN_OPS[op]),
            1e-6 * float(table.number("latency_us")[row]), bool(table.columns["held_out"][row]),
            f"ATen {'lookup and dense gradient' if _ATEN_OPS[op] else 'lookup'}, HBM, A100",
            f"{op}, {height} x {dim}, {count} lookups", watch="gradient" if _ATEN_OPS[op] else "",
        )  # fmt: skip


def _aten_items(device: Device, height: int, dim: int, count: int, *, backward: bool) -> tuple[Item, ...]:
    """As the benchmark runs it: the same row numbers each time, caches cleared; a random gradient of the result, and
    the table's gradient added to that of the call before."""
    access = Uniform()
    tables = make_pooled_tables(
        batch=count, pooling=(1.0,), access=(access,), rows=(height,), dims=(dim,), index_bytes=8, row_item_bytes=4
    )
    lookup = tables.call("lookup_forward")
    if not backward:
        return (lookup,)
    result, table = (TensorSpec((rows, dim), (dim, 1), "float32") for rows in (count, height))
    return (
        lookup,
        make_elementwise_call("dropout", (), (result,)),
        *make_dense_backward(tables, TensorSpec((count,), (1,), "int64"), table),
        make_elementwise_call("add", (table, table), (table,)),
    )
