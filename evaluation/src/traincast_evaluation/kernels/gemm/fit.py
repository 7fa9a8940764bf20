"""Fits the GEMM model from the public tables, every shape of the held-out fifth left aside.

Training, spreads from left-out shapes, spreads for chips never measured; then the Blackwell table on top: codes for its
devices, networks for its types.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from traincast.costs.kernels.contract import COMPUTE_BYTES, COMPUTE_TYPES, Chips
from traincast.costs.kernels.gemm.model import (
    OLD_ARCHS,
    SIGMA_EDGES,
    EngineFit,
    Float32Array,
    GemmModel,
    classify_spread,
    compute_clock_spread,
    estimate_engine_seconds,
)
from traincast.costs.kernels.gemm.physics import ENGINES, Engine, Problem, choose_engine, describe_gemm
from traincast.hardware.device import Device
from traincast.utils.arrays import BoolArray, FloatArray, IntArray
from traincast.utils.metrics import Z90, compute_mean_error_percent
from traincast_evaluation.kernels.fit import SEED, Progress, ignore_progress, save_state
from traincast_evaluation.kernels.gemm.measurements import (
    BLACKWELL_FILE,
    FILES,
    SOURCES,
    GemmSamples,
    Stopwatch,
    as_timed,
    join_samples,
    read_gemm,
)
from traincast_evaluation.kernels.gemm.network import Examples, Schedule, train, with_device
from traincast_evaluation.kernels.samples import Measurements
from traincast_evaluation.solve import compute_spread_90

# bounds on what `Engine.visits` asks for; set by hand
_FEWEST_PASSES, _MOST_PASSES = 30, 300
_TRIAL_SHARE = 0.6  # of a training's passes, for the fit that measures the spread
_STRANGER_SHARE = 0.15  # the same, for fits without one of the chips
_FEWEST_OWN = 2000  # measurements of a device, for a code of its own alongside another card with its chip
_UNKNOWN_SPREAD = 0.5  # log-sigma where nothing can be judged: assumed, a factor of 1.6
_FEWEST_ROWS = 25  # for a spread of its own
_CLASSES = 3  # see `spread_class`
_BINS = len(SIGMA_EDGES) + 1
_LONG_SECONDS = 5e-4  # kernels that show how fast a device multiplies
_FEWEST_LONG = 500  # linear layers of a machine, for a 99 % quantile of them
_FASTEST = 0.99  # quantile: single readings can be too short
_DEVICE_SHARE = 0.6  # of a stopwatch's reading, for its error to be the kernel's
EXTENDED = ("half", "fp8")
"""Engines whose networks were trained before, on other devices."""
TRAINED = ("fp8_block", "fp8_graphics", "fp4")
"""Engines that only this table has."""
_SAMPLE = 6  # of the table, one shape in this many trains the networks: about 19,000 measurements of each type
_UNFITTED_FLOOR = 0.003  # quantile of a machine's own readings that stands for its host
_HOST_NOISE = 0.05  # readings near a floor scatter with the host, not with the kernel
_UNFITTED_OFFSET = 0.5  # of the floor: what the fitted machines show
_FLOOR_SHARE = 0.02  # of a machine's measurements: tiny GEMMs, where only the host shows
_EVENT_OFFSET = 0.5  # of the floor: a first guess at what events add to a long kernel
_LOOP_OFFSET = 0.1  # of the floor: launches queue up behind each other in a loop
_LINEAR_WEIGHT = 1.5  # NeuSight has a third as many linear layers as batched GEMMs
_DEEPBENCH_WEIGHT = 5.0  # 134 shapes per device, against thousands
_DEEPBENCH_HALF_WEIGHT = 20.0  # all there is for Volta's and Turing's tensor cores


@dataclass(frozen=True, slots=True)
class _Task:
    """The measurements of one engine, described once. `chip` is the row in `chips` of each measurement, `ideal` its
    arithmetic at the engine's full rate in seconds."""

    engine: Engine
    data: Measurements
    watch: Stopwatch
    rows: IntArray
    chips: Chips
    chip: IntArray
    physical: FloatArray
    ideal: FloatArray
    features: Float32Array

    def examples(self, use: BoolArray) -> Examples:
        """What a training on a part of the measurements sees."""
        rows = self.rows[use]
        group = self.watch.group[rows]
        many = np.bincount(group, minlength=len(self.watch.floor)) >= _FEWEST_OWN  # elsewhere every one is needed
        return Examples(
            features=self.features[:, use], fixed=self.engine.least_seconds,
            physical=self.physical[use] - self.engine.least_seconds, device=self.chip[use],
            measured=self.data.seconds[rows], weight=self.watch.weight[rows],
            tail=np.where(many[group], self.engine.tail, np.inf), group=group,
            floor=self.watch.floor, offset=self.watch.offset,
        )  # fmt: skip


def fit_engines(
    data: Measurements, watch: Stopwatch, progress: Progress = ignore_progress
) -> tuple[dict[str, EngineFit], Stopwatch]:
    """Every engine that has measurements, by name, and the stopwatch as fitted alongside them. Deterministic."""
    by_row = _engines_by_row(data)
    fits = {}
    for i, engine in enumerate(ENGINES.values()):
        rows = np.flatnonzero(by_row == i)
        if len(rows):
            progress(f"GEMM on {engine.name} units: {len(rows)} measurements", i / len(ENGINES))
            fits[engine.name], watch = _fit_engine(_task(engine, data, watch, rows))
    return fits, watch


def _engines_by_row(data: Measurements) -> IntArray:
    names = list(ENGINES)
    table = np.array([[names.index(choose_engine(d, c).name) for c in COMPUTE_TYPES] for d in data.devices])
    return np.asarray(table[data.device, data.calls.compute])


def _task(engine: Engine, data: Measurements, watch: Stopwatch, rows: IntArray) -> _Task:
    chips = Chips.of(_coded_devices(data, rows))
    code = np.array([chips.find(device) for device in data.devices])
    device, compute = data.device[rows], data.calls.compute[rows]
    physical, ideal, blocks, order = np.zeros(len(rows)), np.zeros(len(rows)), [], []
    for d, c in np.unique(np.stack([device, compute]), axis=1).T:
        mine = np.flatnonzero((device == d) & (compute == c))
        name = COMPUTE_TYPES[c]
        problem = Problem.of(data.calls.take(rows[mine]), data.devices[d], name, float(COMPUTE_BYTES[name]))
        physical[mine], block = describe_gemm(engine, problem)
        ideal[mine] = problem.flop / problem.rate
        blocks.append(block)
        order.append(mine)
    features = np.empty((len(blocks[0]), len(rows)), dtype=np.float32)
    features[:, np.concatenate(order)] = np.concatenate(blocks, axis=1)
    return _Task(engine, data, watch, rows, chips, code[device], physical, ideal, features)


def _coded_devices(data: Measurements, rows: IntArray) -> list[Device]:
    """Devices that get a code of their own: a card with few measurements shares that of a card with its chip."""
    count = np.bincount(data.device[rows], minlength=len(data.devices))
    kept: list[Device] = []
    for i in np.argsort(-count, kind="stable"):
        device = data.devices[i]
        if count[i] >= _FEWEST_OWN or (count[i] and Chips.of(kept).find(device) < 0):
            kept.append(device)
    return sorted(kept, key=lambda device: device.key)


def _fit_engine(task: _Task) -> tuple[EngineFit, Stopwatch]:
    everything = np.ones(len(task.rows), dtype=np.bool_)
    sizes = np.maximum(task.data.calls.values[task.rows, :4], 1.0)
    box = _box(sizes)
    fit, fitted_watch = _train(task, everything, box, share=1.0, nets=task.engine.nets)
    left_out = _shape_fifth(sizes)
    trial, watch = _train(task, ~left_out, box, share=_TRIAL_SHARE, nets=task.engine.nets)
    errors, seconds = _log_errors(task, watch, trial, left_out)
    chip, kind = task.chip[left_out], classify_spread(task.data.calls.take(task.rows[left_out]))
    bins = np.searchsorted(SIGMA_EDGES, seconds)
    base = _clock_spreads(task)[left_out]
    few = np.bincount(task.chip, minlength=len(task.chips.keys)) < _FEWEST_OWN
    sigma = [
        [
            _spreads(errors, base, [[(chip == row) & (kind == c) & (bins == i), (chip == row) & few[row],
                                     few[chip] & few[row],
                                     (kind == c) & (bins == i) & ~few[chip], kind == c, bins == i]
                                    for i in range(_BINS)])
            for c in range(_CLASSES)
        ]
        for row in range(len(task.chips.keys))
    ]  # fmt: skip
    return replace(fit, sigma=np.array([*sigma, *_unseen_spreads(task, box, fitted_watch)])), fitted_watch


def _train(task: _Task, use: BoolArray, box: FloatArray, *, share: float, nets: int) -> tuple[EngineFit, Stopwatch]:
    """An engine of this many networks without spreads yet, and the stopwatch as fitted alongside them."""
    passes = share * np.clip(task.engine.visits / use.sum(), _FEWEST_PASSES, _MOST_PASSES)
    examples, rounds = task.examples(use), max(5, round(float(passes)))
    runs = [train(examples, Schedule(passes=rounds, seed=seed)) for seed in range(nets)]
    spread = np.full((len(task.chips.keys) + 2, _CLASSES, _BINS), _UNKNOWN_SPREAD)
    watch = replace(
        task.watch, floor=np.mean([run[1] for run in runs], axis=0), offset=np.mean([run[2] for run in runs], axis=0)
    )
    ceilings = _ceilings(task, use, watch)
    return EngineFit(tuple(run[0] for run in runs), task.chips, spread, box, ceilings, len(task.chips.keys)), watch


def _ceilings(task: _Task, use: BoolArray, watch: Stopwatch) -> FloatArray:
    """By chip, the share of the engine's rate that the fastest long linear layers reach on the machine with most of
    them; infinite where few were measured. Batched GEMMs were measured up to sizes that do not fill a device yet."""
    rows = task.rows[use]
    group = watch.group[rows]
    seconds = task.data.seconds[rows] - watch.offset[group]
    share = task.ideal[use] / np.maximum(seconds, 1e-9)
    long = (classify_spread(task.data.calls.take(rows)) == 0) & (seconds > _LONG_SECONDS)
    ceilings = np.full(len(task.chips.keys), np.inf)
    for chip in range(len(ceilings)):
        mine = long & (task.chip[use] == chip)
        counts = np.bincount(group[mine], minlength=1)
        if counts.max() >= _FEWEST_LONG:
            ceilings[chip] = np.quantile(share[mine & (group == counts.argmax())], _FASTEST)
    return ceilings


def _log_errors(task: _Task, watch: Stopwatch, fit: EngineFit, use: BoolArray) -> tuple[FloatArray, FloatArray]:
    """Log of shown over predicted, and predicted device seconds; errors where the host decides are nan."""
    rows = task.rows[use]
    seconds = np.zeros(len(rows))
    calls, device = task.data.calls.take(rows), task.data.device[rows]
    for d, c in np.unique(np.stack([device, calls.compute]), axis=1).T:
        mine = np.flatnonzero((device == d) & (calls.compute == c))
        seconds[mine] = estimate_engine_seconds(
            task.engine, fit, calls.take(mine), task.data.devices[d], COMPUTE_TYPES[c]
        )
    shown = watch.shown(seconds, rows)
    error = np.log(task.data.seconds[rows] / shown) * (shown / seconds)  # the offset dilutes the kernel's error
    return np.where(seconds > _DEVICE_SHARE * shown, error, np.nan), seconds


def _clock_spreads(task: _Task) -> FloatArray:
    """`clock_spread` of the device of every measurement."""
    return np.array([compute_clock_spread(device) for device in task.data.devices])[task.data.device[task.rows]]


def _spreads(errors: FloatArray, base: FloatArray, preferred: Sequence[Sequence[BoolArray]]) -> FloatArray:
    """Log-sigma, alongside `base`, of every bin of durations, from the first of its `preferred` selections that has
    enough measurements, else from the nearest bin."""
    known = np.isfinite(errors)
    sigma = np.full(len(preferred), np.nan)
    for i, selections in enumerate(preferred):
        for selection in selections:
            use = selection & known
            if use.sum() >= _FEWEST_ROWS:
                sigma[i] = compute_spread_90(np.exp(errors[use]), np.ones(int(use.sum())), base[use])
                break
    have = np.flatnonzero(np.isfinite(sigma))
    if not len(have):
        return np.full(len(sigma), _UNKNOWN_SPREAD)
    return np.asarray(sigma[[have[np.argmin(np.abs(have - i))] for i in range(len(sigma))]])


def _unseen_spreads(task: _Task, box: FloatArray, watch: Stopwatch) -> list[list[FloatArray]]:
    """Log-sigma by class and duration for old and for newer chips never measured: every chip with enough measurements
    is predicted from the others, and read through its own machine's stopwatch. A side with no such chip takes the
    spreads of both."""
    predicted: list[tuple[FloatArray, ...]] = [tuple(np.zeros(0) for _ in range(5))]
    kinds = classify_spread(task.data.calls.take(task.rows)).astype(np.float64)
    base = _clock_spreads(task)
    alike = [(arch, *numbers[:2]) for arch, numbers in zip(task.chips.archs, task.chips.numbers, strict=True)]
    for chip in dict.fromkeys(alike):
        mine = np.isin(task.chip, [i for i, other in enumerate(alike) if other == chip])
        if mine.sum() < _FEWEST_OWN or mine.all():
            continue
        others = _task(task.engine, task.data, task.watch, task.rows[~mine])
        fit, _ = _train(others, np.ones(len(others.rows), dtype=np.bool_), box, share=_STRANGER_SHARE, nets=1)
        old = np.full(int(mine.sum()), float(chip[0] in OLD_ARCHS))
        predicted.append((*_log_errors(task, watch, fit, mine), old, kinds[mine], base[mine]))
    error, seconds, side, kind, clock = (np.concatenate(column) for column in zip(*predicted, strict=True))
    bins = np.searchsorted(SIGMA_EDGES, seconds)
    return [
        [
            _spreads(error, clock, [[(side == old) & (kind == c) & (bins == i), (side == old) & (bins == i), bins == i]
                                    for i in range(_BINS)])
            for c in range(_CLASSES)
        ]
        for old in (1.0, 0.0)
    ]  # fmt: skip


def _box(sizes: FloatArray) -> FloatArray:
    """Least and most of batch, m, n, k, for single and batched GEMMs; engines without batches say so by b <= 1."""
    box = np.empty((2, 2, 4))
    for i, use in enumerate((sizes[:, 0] == 1.0, sizes[:, 0] > 1.0)):
        part = sizes[use] if use.any() else sizes
        box[i] = part.min(axis=0), part.max(axis=0)
    return box


def _shape_fifth(sizes: FloatArray) -> BoolArray:
    """A fifth of the measurements, by shape; chosen with other numbers than the held-out fifth of the evaluation."""
    batch, m, n, k = sizes.astype(np.int64).T
    mixed = (batch * 49979687) ^ (m * 73856093) ^ (n * 19349663) ^ (k * 83492791)
    return np.asarray(mixed % 997 < 200)


def with_blackwell(model: GemmModel, samples: GemmSamples, progress: Progress = ignore_progress) -> GemmModel:
    """The model with what the samples that are not held out teach. Deterministic."""
    seen = samples.take(~samples.held_out)
    engines = dict(model.engines_)
    for name in EXTENDED:
        for index, device in enumerate(seen.devices):
            mine = (seen.device == index) & engine_rows(seen, name)
            if mine.any():
                progress(f"GEMM on {name} units of {device.key}", 0.2)
                part = seen.take(mine)
                engines[name] = with_device(engines[name], ENGINES[name], part.calls, part.seconds, device)
    chosen = np.isin(np.arange(len(seen)) % _SAMPLE, [0]) & engine_rows(seen, *TRAINED)
    part = seen.take(chosen)
    data = Measurements(part.calls, part.devices, part.device, part.seconds)
    fits, _ = fit_engines(data, Stopwatch.none(len(part)), progress)
    return GemmModel({**engines, **fits})


def without_later_devices(model: GemmModel) -> GemmModel:
    """The model without the codes that were added: devices of the table as if their sheets were all there is."""
    engines = {}
    for name, fit in model.engines_.items():
        known, count = fit.chips, fit.trained
        chips = Chips(known.keys[:count], known.archs[:count], known.numbers[:count])
        sigma = np.concatenate([fit.sigma[:count], fit.sigma[-2:]])
        engines[name] = replace(fit, chips=chips, sigma=sigma, ceiling=fit.ceiling[:count])
    return GemmModel(engines)


def engine_rows(samples: GemmSamples, *names: str) -> BoolArray:
    """Which samples run on one of these engines."""
    table = np.array([[choose_engine(d, c).name in names for c in COMPUTE_TYPES] for d in samples.devices])
    return np.asarray(table[samples.device, samples.calls.compute])


@dataclass(frozen=True, eq=False, slots=True)
class Comparison:
    """Samples with what their stopwatch should have shown, and whether it fell in the 90 % interval."""

    samples: GemmSamples
    shown: FloatArray
    inside: BoolArray

    @property
    def mean_error_percent(self) -> float:
        """Mean absolute error, percent of what was measured."""
        return compute_mean_error_percent(self.shown, self.samples.seconds)


def compare(model: GemmModel, samples: GemmSamples, stopwatch_us: Mapping[str, Sequence[float]]) -> Comparison:
    """Predicts device times and shows them through each machine's stopwatch."""
    seconds, sigma = samples.kernel_seconds(model.predict)
    floor, offset = np.zeros(len(samples)), np.zeros(len(samples))
    for machine in np.unique(samples.machine):
        mine = samples.machine == machine
        floor[mine], offset[mine] = _reading(str(machine), samples.seconds[mine], stopwatch_us)
    reach = np.exp(Z90 * sigma)
    low, shown, high = (as_timed(t, floor, offset) for t in (seconds / reach, seconds, seconds * reach))
    slack = _HOST_NOISE * floor
    return Comparison(samples, shown, (samples.seconds >= low - slack) & (samples.seconds <= high + slack))


def _reading(machine: str, seconds: FloatArray, stopwatch_us: Mapping[str, Sequence[float]]) -> tuple[float, float]:
    if machine.startswith("aic/"):
        return 1e-9, 1e-9
    if machine in stopwatch_us:
        floor, offset = stopwatch_us[machine]
        return max(1e-6 * floor, 1e-9), max(1e-6 * offset, 1e-9)
    floor = float(np.quantile(seconds, _UNFITTED_FLOOR))
    return floor, _UNFITTED_OFFSET * floor


def fit_gemm(data: Path, out: Path, progress: Progress) -> dict[str, Any]:
    """Writes `gemm.npz` and `.json` under `out`, and returns the provenance."""
    progress("reading GEMM measurements", 0.0)
    tables = [read_gemm(data, file) for file in FILES]
    parts = [table.take(is_fittable(table)) for table in tables]
    names, watch = guess_stopwatch(parts)
    engines, fitted = fit_engines(join_samples(parts), watch, progress)
    later = read_gemm(data, BLACKWELL_FILE)
    model = with_blackwell(GemmModel(engines), later, progress)
    stopwatch_us = {
        name: [round(1e6 * float(floor), 3), round(1e6 * float(offset), 3)]
        for name, floor, offset in zip(names, fitted.floor, fitted.offset, strict=True)
    }
    provenance = describe_provenance(model, [*tables, later], stopwatch_us)
    save_state(model.state(), provenance, out / "gemm")
    progress("GEMM done", 1.0)
    return provenance


def describe_provenance(
    model: GemmModel, tables: Sequence[GemmSamples], stopwatch_us: dict[str, list[float]]
) -> dict[str, Any]:
    """Where the model came from, and its mean absolute errors on rows it was fitted to and on the held-out fifth."""
    files: dict[str, Any] = {}
    for file, table in zip((*FILES, BLACKWELL_FILE), tables, strict=True):
        seen = is_fittable(table)
        fitted, held = (compare(model, table.take(use), stopwatch_us) for use in (seen, table.held_out & ~table.test))
        if not len(held.samples):  # the AMD table is all test split, of which the hash holds out a fifth
            held = compare(model, table.take(~seen), stopwatch_us)
        files[f"kernels/{file}.parquet"] = {
            "rows_fitted": len(fitted.samples),
            "rows_held_out": len(held.samples),
            "mean_error_percent_fitted": round(fitted.mean_error_percent, 3),
            "mean_error_percent_held_out": round(held.mean_error_percent, 3),
        }
    return {
        "sources": [SOURCES[name] for name in ("neusight", "aic", "deepbench")],
        "files": files,
        "devices": {name: list(fit.chips.keys) for name, fit in model.engines_.items()},
        "seed": f"networks: from 0; held-out shapes: {SEED.removeprefix('shape ')}",
        "stopwatch_us": stopwatch_us,
    }


def is_fittable(samples: GemmSamples) -> BoolArray:
    """Samples a fit may see: none of the held-out fifth, nor of NeuSight's test split where it has a train split."""
    has_train = np.array([bool((~samples.test[samples.device == i]).any()) for i in range(len(samples.devices))])
    nvidia = np.array([device.vendor == "nvidia" for device in samples.devices])
    set_apart = samples.test & (has_train | nvidia)[samples.device]
    return np.asarray(~(samples.held_out | set_apart))


def guess_stopwatch(parts: Sequence[GemmSamples]) -> tuple[list[str], Stopwatch]:
    """The machines, and a first guess at their floors and offsets; graph-replayed kernels are timed alone."""
    machine = np.concatenate([part.machine for part in parts])
    seconds = np.concatenate([part.seconds for part in parts])
    names, group = np.unique(machine, return_inverse=True)
    floor: FloatArray = np.array([np.quantile(seconds[group == i], _FLOOR_SHARE) for i in range(len(names))])
    alone = np.array([name.startswith("aic/") for name in names])
    loop = np.array([name.startswith("deepbench/") for name in names])
    offset = floor * np.where(loop, _LOOP_OFFSET, _EVENT_OFFSET)
    weight = np.concatenate([_weight(part) for part in parts])
    floor, offset = np.where(alone, 0.0, floor), np.where(alone, 0.0, offset)
    return [str(name) for name in names], Stopwatch(group.astype(np.int64), floor, offset, weight)


def _weight(part: GemmSamples) -> FloatArray:
    if part.source != "deepbench":
        return np.where(part.calls.is_kind("linear"), _LINEAR_WEIGHT, 1.0)
    return np.where(part.calls.is_compute("fp32"), _DEEPBENCH_WEIGHT, _DEEPBENCH_HALF_WEIGHT)
