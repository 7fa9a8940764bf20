"""Measured embedding kernels: the table-batched ones of the DLRM studies, and FBGEMM's in two jobs.

The indices behind the measurements are not known; every row of a table counts as wanted alike. Lengths of FBGEMM's bags
are not known either: they are taken to fall off exponentially around their mean.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from traincast.costs.kernels.contract import Calls, KernelCall, get_clock_hz
from traincast.costs.kernels.embedding import EMBEDDING
from traincast.costs.kernels.embedding.physics import L2_SHARE, Rates, guess_longest_bag, make_uniform_tables
from traincast.hardware import Device, load_device
from traincast.models.embeddings import load_tables
from traincast.utils.arrays import FloatArray
from traincast.utils.errors import TraincastError
from traincast_evaluation.kernels.embedding.lookups import FOLDER, WholeLookup, read_whole_lookups
from traincast_evaluation.kernels.samples import Samples
from traincast_evaluation.measured_tables import (
    MeasuredTable,
    check_among,
    check_positive,
    check_possible,
    list_devices,
    number_devices,
    read_table,
)

STUDY_FILE = "kernels/embedding_v100.csv"
TRACES_FILE = "kernels/embedding_from_traces.csv"
_STUDY_CLOCK = 1297.0  # MHz, locked by the studies
_STUDY_KINDS = {"forward": "batched_forward", "backward_sgd": "batched_backward_sgd"}
_OPTIMIZERS = ("sgd", "adagrad", "rowwise_adagrad", "adam", "dense")
_FORWARD = ("forward_unweighted_kernel", "forward_weighted_kernel")
_BLOCK_KERNEL, _WARP_KERNEL = "kernel_cta_per_row_1", "kernel_warp_per_row_1"
# what rates are fitted to: lookups per bag and dims of the microbenchmark, steps of the A100 job
_FIT_LOOKUPS, _FIT_DIMS = (16, 38), (32, 128, 256)
_A100_JOB, _FIT_STEPS = "hta_recsys_a100_rank3of8", (1009, 1010)


@dataclass(frozen=True, eq=False, slots=True)
class EmbeddingSamples(Samples):
    """Measured kernels: FBGEMM's two update kernels are one sample. Those of one `shape` are repeats or further steps;
    `group` and `name` are for tables of errors; a fit begins with `start`, of which one rate is read off the data.
    `whole` are lookups that were timed with what surrounds them."""

    shape: npt.NDArray[Any]
    group: npt.NDArray[Any]
    name: npt.NDArray[Any]
    start: Rates
    whole: tuple[WholeLookup, ...] = ()

    def names(self) -> list[str]:
        """Their names."""
        names: list[str] = self.name.tolist()
        return names


@dataclass(frozen=True, slots=True)
class _Sample:
    device: Device
    call: KernelCall
    seconds: float
    fitted: bool
    shape: str
    group: str
    name: str


def read_embedding(data: Path) -> EmbeddingSamples:
    """All measured kernels of both files, and whole lookups where the folder has any."""
    samples = [*_study_samples(data), *_job_samples(_read_jobs(data))]
    devices: list[Device] = []
    for sample in samples:
        if sample.device not in devices:
            devices.append(sample.device)
    return EmbeddingSamples(
        devices=tuple(devices),
        device=np.array([devices.index(sample.device) for sample in samples], dtype=np.int64),
        calls=Calls.of(EMBEDDING, [sample.call for sample in samples]),
        seconds=np.array([sample.seconds for sample in samples]),
        held_out=np.array([not sample.fitted for sample in samples], dtype=np.bool_),
        shape=np.array([sample.shape for sample in samples], dtype=object),
        group=np.array([sample.group for sample in samples], dtype=object),
        name=np.array([sample.name for sample in samples], dtype=object),
        start=Rates(empty_block_cycles=empty_block_cycles(data)),
        whole=tuple(read_whole_lookups(data)) if (data / FOLDER).is_dir() else (),
    )


def _study_samples(data: Path) -> Iterator[_Sample]:
    sizes = ("batch", "num_tables", "lookups_per_table", "embedding_dim")
    table = read_table(
        data, STUDY_FILE, ("device", "direction", "context"), (*sizes, "rows_per_table", "latency_us"),
        positive=(*sizes, "latency_us"), among={"device": ("V100",), "direction": tuple(_STUDY_KINDS)},
    )  # fmt: skip
    known = ~np.isnan(table.number("rows_per_table"))  # DLRM_MLPerf has tables of different heights
    check_positive(table.take(known), "rows_per_table")
    device = load_device("v100").with_clock(_STUDY_CLOCK)
    batch, count, lookups, dim = (table.number(name) for name in sizes)
    _check_bags(table, 4 * batch * count * dim, np.full(len(table), device.dram_bandwidth), "latency_us")
    criteo = tuple(float(one.rows) for one in load_tables("mlperf-dlrm"))
    for i, seconds in enumerate(1e-6 * table.number("latency_us")):
        tables, bag = int(count[i]), int(lookups[i])
        if not known[i] and tables != len(criteo):
            raise TraincastError(f"{table.where(i, 'rows_per_table')}: nothing is given for {tables} tables")
        micro, direction = table.text("context")[i] == "microbenchmark", table.text("direction")[i]
        lowered = make_uniform_tables(
            batch=int(batch[i]),
            lookups=int(batch[i]) * tables * bag,
            rows=(float(table.number("rows_per_table")[i]),) * tables if known[i] else criteo,
            dims=(float(dim[i]),) * tables,
            index_bytes=4,
            row_item_bytes=4,
            ascending=not micro and bag > 1,
        )
        call = lowered.call(_STUDY_KINDS[direction])
        shape = f"{direction}, batch {int(batch[i])}, {tables} tables, {bag} lookups, dim {int(dim[i])}"
        yield _Sample(
            device,
            _warm(call, device) if micro else call,
            seconds,
            _study_fitted(micro, direction == "forward", bag, int(dim[i]), bool(known[i])),
            shape,
            "table-batched, V100",
            f"{shape}, {table.text('context')[i]}",
        )


def _study_fitted(micro: bool, forward: bool, bag: int, dim: int, default: bool) -> bool:
    """By shape: repeats fall together. Of the training traces only the update of DLRM_default is fitted to: nothing
    else has the sorted bags that tell the rate of writing in order."""
    if not micro:
        return default and not forward
    return dim in _FIT_DIMS if forward else bag in _FIT_LOOKUPS


def _warm(call: KernelCall, device: Device) -> KernelCall:
    """A microbenchmark makes the same lookups again and again: rows that fit the L2 are there already."""
    sizes = dict(zip(EMBEDDING.fields, call.values, strict=True))
    if sizes["touched_bytes"] > L2_SHARE * device.l2_bytes:
        return call
    resident = {name: 0.0 for name in sizes if name.startswith("missing_")}
    return EMBEDDING.call(call.kind, call.compute, estimated=False, **(sizes | resident))


def _read_jobs(data: Path) -> MeasuredTable:
    """Rows of FBGEMM's own lookup and update kernels. Dense gradients are left out: their tables have a few rows."""
    sizes = ("rank", "step", "batch", "num_tables", "num_indices", "total_dim", "weight_elements", "duration_us")
    table = read_table(
        data, TRACES_FILE, ("trace", "device", "direction", "optimizer", "weighted", "kernel_name"),
        (*sizes, "total_rows"), positive=("duration_us",), among={"direction": ("forward", "backward")},
    )  # fmt: skip
    check_among(table, "optimizer", _OPTIMIZERS)
    names = table.text("kernel_name").astype(str)
    wanted = np.array([name.endswith((*_FORWARD, _BLOCK_KERNEL, _WARP_KERNEL)) for name in names])
    table = table.take(wanted & (table.text("optimizer") != "dense"))
    if not len(table):
        raise TraincastError(f"'{TRACES_FILE}' has no FBGEMM lookup or update in its column 'kernel_name'")
    for name in ("batch", "num_tables", "num_indices", "total_dim", "weight_elements"):
        check_positive(table, name)
    check_positive(table.take(~np.isnan(table.number("total_rows"))), "total_rows")
    devices = list_devices(table)
    rate = np.array([device.dram_bandwidth for device in devices])[number_devices(table, devices)]
    pooled = np.where(table.text("direction") == "forward", 4 * table.number("batch") * table.number("total_dim"), 0.0)
    _check_bags(table, pooled, rate, "duration_us")
    return table


def _check_bags(table: MeasuredTable, pooled_bytes: FloatArray, rate: FloatArray, column: str) -> None:
    """Rows may come from a cache; the pooled result has to go somewhere."""
    check_possible(table, pooled_bytes / rate, 1e-6 * table.number(column), column)


def _job_samples(table: MeasuredTable) -> Iterator[_Sample]:
    devices = list_devices(table)
    device = number_devices(table, devices)
    updates: dict[tuple[Any, ...], list[int]] = {}
    for i, kernel in enumerate(table.text("kernel_name")):
        if kernel.endswith(_FORWARD):
            yield _job_sample(table, i, "tbe_forward", devices[device[i]], table.number("duration_us")[i])
        else:
            key = tuple(table.columns[field][i] for field in ("trace", "rank", "step", "weighted"))
            updates.setdefault(key, []).append(i)
    for launches in updates.values():
        kind = f"tbe_backward_{table.text('optimizer')[launches[0]]}"
        yield _job_sample(
            table, launches[0], kind, devices[device[launches[0]]], float(table.number("duration_us")[launches].sum())
        )


def _job_sample(table: MeasuredTable, i: int, kind: str, device: Device, measured_us: float) -> _Sample:
    integers = ("num_tables", "step", "rank", "num_indices", "batch")
    count, step, rank, lookups, batch = (int(table.number(name)[i]) for name in integers)
    dim = float(table.number("total_dim")[i]) / count
    rows = float(table.number("total_rows")[i])
    rows = float(table.number("weight_elements")[i]) / dim if np.isnan(rows) else rows
    lowered = make_uniform_tables(
        batch=batch,
        lookups=lookups,
        rows=(rows / count,) * count,
        dims=(dim,) * count,
        index_bytes=8,
        row_item_bytes=4,
        weighted=str(table.text("weighted")[i]).lower() == "true",
    )
    lowered = replace(lowered, longest_bag=guess_longest_bag(batch, count, lookups))
    forward = kind == "tbe_forward"
    group = f"FBGEMM {'lookup' if forward else 'update'}, {'V100' if device.arch == 'volta' else 'A100'}"
    trace = str(table.text("trace")[i])
    fitted = _job_fitted(trace, step, rank)
    shape = f"{kind}, {trace} rank {rank}, {count} tables"
    name = f"{trace} rank {rank} step {step}, {count} tables"
    return _Sample(device, lowered.call(kind), 1e-6 * measured_us, fitted, shape, group, name)


def _job_fitted(trace: str, step: int, rank: int) -> bool:
    """Later steps of the A100 job and odd ranks of the V100 job are never seen."""
    return step in _FIT_STEPS if trace == _A100_JOB else rank % 2 == 0


def empty_block_cycles(data: Path) -> float:
    """Cycles an SM spends on a block of 16 lookups that has no row of its own: the slope of the warp-per-row kernel's
    time over its blocks, in fitted steps of the job whose lookups are nearly all elsewhere."""
    table = _read_jobs(data)
    warp = np.array([name.endswith(_WARP_KERNEL) for name in table.text("kernel_name")])
    table = table.take(warp & (table.text("trace") == _A100_JOB) & np.isin(table.number("step"), _FIT_STEPS))
    if len(table) < 2:
        raise TraincastError(f"'{TRACES_FILE}' needs two '{_WARP_KERNEL}' rows of steps 1009 and 1010 in 'kernel_name'")
    device = list_devices(table)[0]
    blocks = table.number("num_indices") / 16.0
    slope, _ = np.polyfit(blocks, 1e-6 * table.number("duration_us"), 1)
    return float(slope) * device.num_sms * get_clock_hz(device)
