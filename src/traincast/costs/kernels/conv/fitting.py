"""How the weights of the convolution physics, and the trees on top of them, are found."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from traincast.costs.kernels.call import Calls
from traincast.costs.kernels.chips import Chips
from traincast.costs.kernels.conv.boosting import boost
from traincast.costs.kernels.conv.parameters import (
    FIXED_SECONDS,
    FUSED,
    GEMM_COLUMNS,
    NONFUSED,
    TENSOR_TYPES,
    ConvParameters,
    algorithm_seconds,
    flop_rates,
    way_features,
)
from traincast.costs.kernels.conv.physics import Geometry
from traincast.costs.kernels.conv.residual import ConvTrees, own_features, shared_features
from traincast.costs.kernels.model import Measurements
from traincast.costs.kernels.solve import relative_fit
from traincast.hardware.device import Device
from traincast.utils.arrays import BoolArray, FloatArray

# set by hand: they only say which way is fastest in the first round
_START = np.array([1.5, 1.0, 0.6, 2.0, 1.2, 0.6, 2.0, 1.0, 1.2, 1.35, 0.6, 3.0, 1.1, 2.0, 3.0, 5.0])
_MODEL_ERROR = 0.05  # what the physics misses even of a perfect reading, relative
_ROUNDS = 8  # of giving samples to ways and refitting; set by hand
_TIE = 0.002  # how strongly a device is tied to the pooled weights, against its own rows


def fit_weights(data: Measurements) -> ConvParameters:
    """Weights by alternating: give every row to its fastest way, refit the ways to their rows."""
    tensor_row = data.calls.is_compute(*TENSOR_TYPES)
    plain_pool = _pooled(data, ~tensor_row, _START)
    tensor_pool = _pooled(data, tensor_row, plain_pool) if tensor_row.any() else plain_pool
    plain, tensor = [], []
    for index in range(len(data.devices)):
        mine = data.device == index
        plain.append(_refined(data, mine & ~tensor_row, plain_pool))
        tensor.append(_refined(data, mine & tensor_row, tensor_pool))
    size = len(data.devices)
    g = Geometry.of(data.calls)
    limits = np.array([part.max() for part in (g.batch, g.channels, g.filters, g.height)])
    spread = np.full(size, 0.15)  # a placeholder, as 0.3 for other chips: `with_spread` sets both
    return ConvParameters(
        Chips.of(data.devices), np.array(plain), np.array(tensor), plain_pool, tensor_pool, spread, 0.3, limits
    )


def certainty(data: Measurements) -> FloatArray:
    """Weight of a row's relative error: the model itself is good to some 5 %."""
    noise = np.broadcast_to(np.asarray(data.noise_seconds, dtype=np.float64), data.seconds.shape)
    return np.asarray(1.0 / np.hypot(_MODEL_ERROR, noise / data.seconds))


def _pooled(data: Measurements, use: BoolArray, start: FloatArray) -> FloatArray:
    """Weights shared by all devices, every device counting alike."""
    groups = [np.flatnonzero(use & (data.device == i)) for i in range(len(data.devices))]
    groups = [rows for rows in groups if len(rows)]
    order = np.concatenate(groups)
    share = np.concatenate([np.full(len(rows), 1.0 / np.sqrt(len(rows))) for rows in groups])
    return _alternate(data, order, share, start, tie=0.0)


def _refined(data: Measurements, use: BoolArray, pooled: FloatArray) -> FloatArray:
    rows = np.flatnonzero(use)
    return _alternate(data, rows, np.ones(len(rows)), pooled, tie=_TIE) if len(rows) else pooled


def _alternate(
    data: Measurements, rows: npt.NDArray[np.intp], share: FloatArray, start: FloatArray, tie: float
) -> FloatArray:
    calls, seconds = data.calls.take(rows), data.seconds[rows]
    g = Geometry.of(calls)
    parts = [np.zeros((len(rows), width)) for width in (3, 3, 4)]
    for index in np.unique(data.device[rows]):
        mine = data.device[rows] == index
        some, device = calls.take(mine), data.devices[int(index)]
        rate = flop_rates(some, device, some.is_compute(*TENSOR_TYPES))
        for part, block in zip(parts, way_features(some, Geometry.of(some), device, rate), strict=True):
            part[mine] = block
    sure = share * certainty(data)[rows]
    weights = start.copy()
    for _ in range(_ROUNDS):
        way = _fastest(calls, g, parts, weights)
        jobs = [(way == 0) & calls.is_kind(kind) for kind in GEMM_COLUMNS] + [way == 1, way == 2]
        columns = [*GEMM_COLUMNS.values(), FUSED, NONFUSED]
        blocks = [parts[0]] * 3 + [parts[1], parts[2]]
        fixed = [0.0] * 3 + list(FIXED_SECONDS)
        for job, column, block, constant in zip(jobs, columns, blocks, fixed, strict=True):
            if job.sum() >= 20:
                weights[column] = _tied_fit(block[job], seconds[job], sure[job], constant, start[column], tie)
    return weights


def _fastest(calls: Calls, g: Geometry, parts: list[FloatArray], weights: FloatArray) -> npt.NDArray[np.int64]:
    direct = np.zeros(len(calls))
    for kind, columns in GEMM_COLUMNS.items():
        mine = calls.is_kind(kind)
        direct[mine] = parts[0][mine] @ weights[columns]
    fused = np.where(g.winograd & ~g.weights, FIXED_SECONDS[0] + parts[1] @ weights[FUSED], np.inf)
    nonfused = np.where(g.winograd | g.winograd5, FIXED_SECONDS[1] + parts[2] @ weights[NONFUSED], np.inf)
    return np.asarray(np.argmin(np.stack([direct, fused, nonfused]), axis=0))


def _tied_fit(
    block: FloatArray, seconds: FloatArray, sure: FloatArray, constant: float, prior: FloatArray, tie: float
) -> FloatArray:
    """Non-negative weights near `prior`: one made-up row per weight, as heavy as `tie` of the real ones."""
    known = np.flatnonzero(prior > 0) if tie else np.zeros(0, dtype=np.intp)
    made_up = np.zeros((len(known), block.shape[1]))
    made_up[np.arange(len(known)), known] = 1.0 / prior[known]
    pull = np.sqrt(tie * float(np.sum(sure**2)))
    return relative_fit(
        np.concatenate([block, made_up]),
        np.concatenate([seconds, np.ones(len(known))]),
        base=np.concatenate([np.full(len(seconds), constant), np.zeros(len(known))]),
        weight=np.concatenate([sure, np.full(len(known), pull)]),
        knee=0.1,
    )


_MOST_RESIDUAL = 1.0  # log error beyond which a reading is taken for a mistake
_ENOUGH_ROWS = 1000  # of 3x3 forward in fp32, for a chip to have trees of its own


def fit_trees(parameters: ConvParameters, data: Measurements, tensor: BoolArray) -> ConvTrees:
    """Trees on what the weights leave over; `tensor` says which rows ran on tensor cores."""
    g = Geometry.of(data.calls)
    plentiful = g.winograd & data.calls.is_kind("forward")
    wanted = certainty(data)
    trees, devices = [], []
    shared, others, fast = [], [], []
    for index, device in enumerate(data.devices):
        mine = data.device == index
        rows = np.flatnonzero(mine & plentiful)
        if len(rows) >= _ENOUGH_ROWS:
            devices.append(device)
            _, some, seconds = _ways(parameters, data, rows, device, tensor)
            target = _left(data.seconds[rows], seconds)
            trees.append(boost(own_features(some, device, seconds), target, wanted[rows]))
            mine &= ~plentiful
        rows = np.flatnonzero(mine)
        if len(rows):
            calls, some, seconds = _ways(parameters, data, rows, device, tensor)
            others.append(device)
            fast.append(bool(tensor[rows].any()))
            features = shared_features(calls, some, device, seconds)
            shared.append((features, _left(data.seconds[rows], seconds), wanted[rows]))
    matrix, target, weight = (np.concatenate([part[column] for part in shared]) for column in range(3))
    return ConvTrees(Chips.of(devices), tuple(trees), Chips.of(others), np.array(fast), boost(matrix, target, weight))


def _ways(
    parameters: ConvParameters, data: Measurements, rows: npt.NDArray[np.intp], device: Device, tensor: BoolArray
) -> tuple[Calls, Geometry, FloatArray]:
    calls = data.calls.take(rows)
    g = Geometry.of(calls)
    return calls, g, algorithm_seconds(parameters, calls, g, device, tensor[rows])


def _left(seconds: FloatArray, by_algorithm: FloatArray) -> FloatArray:
    return np.asarray(np.clip(np.log(seconds / by_algorithm.min(axis=1)), -_MOST_RESIDUAL, _MOST_RESIDUAL))
