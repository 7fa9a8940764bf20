"""Devices that were measured after the networks were trained: each gets a code of its own, nothing else changes.

A code is eight numbers in front of a network that has seen other chips, so a few thousand measurements find it, and
what the model says of the chips it was trained on stays the same to the last bit.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from traincast.costs.kernels.call import COMPUTE_BYTES, Calls
from traincast.costs.kernels.chips import Chips
from traincast.costs.kernels.gemm.engine import Engine, Problem, describe
from traincast.costs.kernels.gemm.parameters import SIGMA_EDGES, EngineFit, engine_seconds, spread_class
from traincast.costs.kernels.gemm.residual_net import Float32Array, ResidualNet, gate
from traincast.costs.kernels.solve import spread_90
from traincast.hardware.device import Device
from traincast.utils.arrays import BoolArray, FloatArray, IntArray

_ROUNDS, _STEP = 200, 0.3  # of Adam on eight numbers; every start ends at the same error
_KNEE = 0.05  # log errors beyond this count linearly
_MOST = 2000  # measurements that a code is found from
_LONG_SECONDS, _FEWEST_LONG, _FASTEST = 5e-4, 500, 0.99  # as for the chips of the training
_FEWEST_ROWS = 25  # for a spread of its own


def with_device(fit: EngineFit, engine: Engine, calls: Calls, seconds: FloatArray, device: Device) -> EngineFit:
    """The engine with a code for this device, learned from kernels timed alone in one compute type. Deterministic."""
    compute = calls.only_compute()
    left_out = _every(len(calls), 5)
    problem = Problem.of(calls, device, compute, COMPUTE_BYTES[compute])
    physical, features = describe(engine, problem)
    judged = _added(fit, engine, device, problem, physical, features, seconds, ~left_out)
    predicted = engine_seconds(engine, judged, calls.take(left_out), device, compute)
    extended = _added(fit, engine, device, problem, physical, features, seconds, np.ones(len(calls), dtype=np.bool_))
    sigma = _spreads(fit, predicted, seconds[left_out], spread_class(calls)[left_out])
    return replace(extended, sigma=np.concatenate([fit.sigma[:-2], sigma[None], fit.sigma[-2:]]))


def _added(
    fit: EngineFit, engine: Engine, device: Device, problem: Problem, physical: FloatArray, features: Float32Array,
    seconds: FloatArray, use: BoolArray,
) -> EngineFit:  # fmt: skip
    rows = np.flatnonzero(use)
    rows = rows[:: max(1, len(rows) // _MOST)]
    scaled = physical[rows] - engine.least_seconds
    measured, fixed = seconds[rows], engine.least_seconds
    nets = tuple(_with_code(net, fit.trained, features[:, rows], scaled, measured, fixed) for net in fit.nets)
    long = use & (seconds > _LONG_SECONDS)
    share = problem.flop / problem.rate / seconds
    ceiling = float(np.quantile(share[long], _FASTEST)) if long.sum() >= _FEWEST_LONG else np.inf
    known = Chips.of([device])
    chips = Chips(
        (*fit.chips.keys, *known.keys), (*fit.chips.archs, *known.archs),
        np.concatenate([fit.chips.numbers, known.numbers]),
    )  # fmt: skip
    # a row of spreads that holds the place until they are judged
    sigma = np.concatenate([fit.sigma[:-2], fit.sigma[-1:], fit.sigma[-2:]])
    return replace(fit, nets=nets, chips=chips, ceiling=np.append(fit.ceiling, ceiling), sigma=sigma)


def _with_code(
    net: ResidualNet, trained: int, features: Float32Array, scaled: FloatArray, seconds: FloatArray, fixed: float
) -> ResidualNet:
    """The network with one more code, found from the mean of those it was trained with."""
    inputs = net.weights[0][: len(net.mean)].T @ net.normalised(features)
    code = _descend(net, inputs, net.codes[:trained].mean(axis=0), scaled, seconds, fixed)
    return replace(net, codes=np.concatenate([net.codes, code[None]]).astype(np.float32))


def _descend(
    net: ResidualNet, inputs: Float32Array, start: Float32Array, scaled: FloatArray, seconds: FloatArray, fixed: float
) -> FloatArray:
    """The code after `_ROUNDS` steps of Adam, the step falling to nothing."""
    code = start.astype(np.float64)
    first, second = np.zeros_like(code), np.zeros_like(code)
    for count in range(1, _ROUNDS + 1):
        slope = _slope(net, inputs, code, scaled, seconds, fixed)
        first, second = 0.9 * first + 0.1 * slope, 0.99 * second + 0.01 * slope * slope
        rate = _STEP * 0.5 * (1 + np.cos(np.pi * count / _ROUNDS))
        code -= rate * (first / (1 - 0.9**count)) / (np.sqrt(second / (1 - 0.99**count)) + 1e-9)
    return code


def _slope(
    net: ResidualNet, inputs: Float32Array, code: FloatArray, scaled: FloatArray, seconds: FloatArray, fixed: float
) -> FloatArray:
    """How the mean error (rounded absolute log) changes with this code."""
    entry = net.weights[0][len(net.mean) :]
    z = inputs + (code.astype(np.float32) @ entry + net.biases[0])[:, None]
    layers = []
    for weight, bias in zip(net.weights[1:], net.biases[1:], strict=True):
        open_ = gate(z)
        layers.append(open_ * (1 + z * (1 - open_)))
        z = weight.T @ (z * open_) + bias[:, None]
    kernel = scaled * np.exp(z[0].astype(np.float64))
    error = np.log((fixed + kernel) / seconds)
    rounded = np.sqrt(error * error + _KNEE * _KNEE)
    delta = (error / rounded * kernel / (fixed + kernel) / len(seconds)).astype(np.float32)[None]
    for weight, slope in zip(net.weights[:0:-1], layers[::-1], strict=True):
        delta = (weight @ delta) * slope
    return np.asarray(entry @ delta.sum(axis=1), dtype=np.float64)


def _spreads(fit: EngineFit, predicted: FloatArray, seconds: FloatArray, kind: IntArray) -> FloatArray:
    """Log-sigma by class and duration: linear layers by their own errors, else as of the middle trained chip."""
    sigma = np.median(fit.sigma[: fit.trained], axis=0)
    bins = np.searchsorted(SIGMA_EDGES, predicted)
    for index in range(sigma.shape[1]):
        mine = (bins == index) & (kind == 0)
        if mine.sum() >= _FEWEST_ROWS:
            own = spread_90(predicted[mine], seconds[mine])
            sigma[:, index] = np.maximum(sigma[:, index], own)
            sigma[0, index] = own
    return np.asarray(sigma)


def _every(count: int, nth: int) -> BoolArray:
    chosen = np.zeros(count, dtype=np.bool_)
    chosen[::nth] = True
    return chosen
