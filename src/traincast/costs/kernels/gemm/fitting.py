"""Fitting the GEMM model: training, spreads from left-out shapes, and spreads for chips never measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from traincast.costs.kernels.call import COMPUTE_BYTES, COMPUTE_TYPES
from traincast.costs.kernels.chips import Chips
from traincast.costs.kernels.gemm.engine import ENGINES, Engine, Problem, describe, engine_of
from traincast.costs.kernels.gemm.parameters import (
    OLD_ARCHS,
    SIGMA_EDGES,
    EngineFit,
    clock_spread,
    engine_seconds,
    spread_class,
)
from traincast.costs.kernels.gemm.residual_net import Float32Array
from traincast.costs.kernels.gemm.residual_training import Examples, Schedule, train
from traincast.costs.kernels.gemm.stopwatch import Stopwatch
from traincast.costs.kernels.model import Measurements
from traincast.costs.kernels.record import Progress, silent
from traincast.costs.kernels.solve import spread_90
from traincast.hardware.device import Device
from traincast.utils.arrays import BoolArray, FloatArray, IntArray

# bounds on what `Engine.visits` asks for; set by hand
_FEWEST_PASSES, _MOST_PASSES = 30, 300
_TRIAL_SHARE = 0.6  # of a training's passes, for the fit that measures the spread
_STRANGER_SHARE = 0.15  # the same, for fits without one of the chips
_FEWEST_OWN = 2000  # measurements of a device, for a code of its own beside another card with its chip
_UNKNOWN_SPREAD = 0.5  # log-sigma where nothing can be judged: assumed, a factor of 1.6
_FEWEST_ROWS = 25  # for a spread of its own
_CLASSES = 3  # see `spread_class`
_BINS = len(SIGMA_EDGES) + 1
_LONG_SECONDS = 5e-4  # kernels that show how fast a device multiplies
_FEWEST_LONG = 500  # linear layers of a machine, for a 99 % quantile of them
_FASTEST = 0.99  # quantile: single readings can be too short
_DEVICE_SHARE = 0.6  # of a stopwatch's reading, for its error to be the kernel's


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
    data: Measurements, watch: Stopwatch, progress: Progress = silent
) -> tuple[dict[str, EngineFit], Stopwatch]:
    """Every engine that has measurements, by name, and the stopwatch as fitted beside them. Deterministic."""
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
    table = np.array([[names.index(engine_of(d, c).name) for c in COMPUTE_TYPES] for d in data.devices])
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
        physical[mine], block = describe(engine, problem)
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
    chip, kind = task.chip[left_out], spread_class(task.data.calls.take(task.rows[left_out]))
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
    """An engine of so many networks without spreads yet, and the stopwatch as fitted beside them."""
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
    them; infinite where few were measured. Batched products were measured up to sizes that do not fill a device yet."""
    rows = task.rows[use]
    group = watch.group[rows]
    seconds = task.data.seconds[rows] - watch.offset[group]
    share = task.ideal[use] / np.maximum(seconds, 1e-9)
    long = (spread_class(task.data.calls.take(rows)) == 0) & (seconds > _LONG_SECONDS)
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
        seconds[mine] = engine_seconds(task.engine, fit, calls.take(mine), task.data.devices[d], COMPUTE_TYPES[c])
    shown = watch.shown(seconds, rows)
    error = np.log(task.data.seconds[rows] / shown) * (shown / seconds)  # the offset dilutes the kernel's error
    return np.where(seconds > _DEVICE_SHARE * shown, error, np.nan), seconds


def _clock_spreads(task: _Task) -> FloatArray:
    """`clock_spread` of the device of every measurement."""
    return np.array([clock_spread(device) for device in task.data.devices])[task.data.device[task.rows]]


def _spreads(errors: FloatArray, base: FloatArray, preferred: Sequence[Sequence[BoolArray]]) -> FloatArray:
    """Log-sigma, beside `base`, of every bin of durations, from the first of its `preferred` selections that has
    enough measurements, else from the nearest bin."""
    known = np.isfinite(errors)
    sigma = np.full(len(preferred), np.nan)
    for i, selections in enumerate(preferred):
        for selection in selections:
            use = selection & known
            if use.sum() >= _FEWEST_ROWS:
                sigma[i] = spread_90(np.exp(errors[use]), np.ones(int(use.sum())), base[use])
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
    kinds = spread_class(task.data.calls.take(task.rows)).astype(np.float64)
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
    """Least and most of batch, m, n, k, for single and batched products; engines without batches say so by b <= 1."""
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
