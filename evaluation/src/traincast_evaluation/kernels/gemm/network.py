"""Trains the residual networks of GEMMs, and finds codes for devices that were measured after the training.

A code is eight numbers in front of a network that has seen other chips, so a few thousand measurements find it, and
what the model says of the chips it was trained on stays the same to the last bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from traincast.costs.kernels.contract import COMPUTE_BYTES, Calls, Chips
from traincast.costs.kernels.gemm.model import (
    SIGMA_EDGES,
    EngineFit,
    Float32Array,
    ResidualNet,
    classify_spread,
    compute_gate,
    estimate_engine_seconds,
)
from traincast.costs.kernels.gemm.physics import Engine, Problem, describe_gemm
from traincast.hardware.device import Device
from traincast.utils.arrays import BoolArray, FloatArray, IntArray
from traincast_evaluation.kernels.gemm.measurements import EDGE, as_timed
from traincast_evaluation.solve import compute_spread_90

_ROUNDS, _STEP = 200, 0.3  # of Adam on eight numbers; every start ends at the same error
_KNEE = 0.05  # log errors beyond this count linearly
_MOST = 2000  # measurements that a code is found from
_LONG_SECONDS, _FEWEST_LONG, _FASTEST = 5e-4, 500, 0.99  # as for the chips of the training
_FEWEST_ROWS = 25  # for a spread of its own


@dataclass(frozen=True, kw_only=True, slots=True)
class Examples:
    """What a network learns from; one entry per measurement.

    `features` has one column per measurement. `fixed` seconds of a kernel, and `physical` seconds that the network
    scales, make up its physical estimate. `device` is the row of the device's code, `group` the row of
    `floor` and `offset` (seconds): where to start looking for how this machine's stopwatch reads; both 0 when it
    reads the kernel alone. A log error beyond `tail` counts ever less.
    """

    features: Float32Array
    fixed: float
    physical: FloatArray
    device: IntArray
    measured: FloatArray
    weight: FloatArray
    tail: FloatArray
    group: IntArray
    floor: FloatArray
    offset: FloatArray


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """How to train: layer widths, length of a device's code, passes over the data, batch, step, decay of the weights,
    seed. Chosen on validation shapes, see docs/evidence/kernels.md."""

    widths: tuple[int, ...] = (128, 96, 48)
    code_size: int = 8
    passes: int = 80
    batch: int = 256
    step: float = 3e-3
    decay: float = 0.05
    knee: float = 0.02  # log errors beyond this count linearly
    pull: float = 1e-3  # towards physics
    pull_unseen: float = 0.05  # the same, where the host hides the kernel and a measurement says nothing about it
    seed: int = 0


class _Adam:
    """Adam with a warm-up and a cosine decay of the step."""

    def __init__(self, parameters: Sequence[npt.NDArray[Any]], step: float, steps: int) -> None:
        self.parameters, self.step, self.steps, self.count = parameters, step, steps, 0
        self.first = [np.zeros_like(p) for p in parameters]
        self.second = [np.zeros_like(p) for p in parameters]

    def update(self, gradients: Sequence[npt.NDArray[Any]], decay: float = 0.0) -> None:
        self.count += 1
        rate = self.step * min(1.0, self.count / 200) * 0.5 * (1 + np.cos(np.pi * self.count / self.steps))
        fix_first, fix_second = 1 - 0.9**self.count, 1 - 0.999**self.count
        for p, g, first, second in zip(self.parameters, gradients, self.first, self.second, strict=True):
            first += 0.1 * (g - first)
            second += 0.001 * (g * g - second)
            p -= (rate / fix_first * first / (np.sqrt(second / fix_second) + 1e-8)).astype(p.dtype)
            if decay and p.ndim == 2:
                p *= 1 - decay * rate


class _Trainer:
    """One training run: parameters, and their gradients on a batch."""

    def __init__(self, examples: Examples, schedule: Schedule) -> None:
        self.schedule = schedule
        self.random = np.random.default_rng(schedule.seed)
        features = examples.features
        self.mean = features.mean(axis=1, dtype=np.float64).astype(np.float32)
        spread = features.std(axis=1, dtype=np.float64)
        # a feature that never varied cannot have taught anything
        self.scale = np.where(spread > 1e-6, 1.0 / np.maximum(spread, 1e-6), 0.0).astype(np.float32)
        self.inputs = ((features - self.mean[:, None]) * self.scale[:, None]).T.copy()
        sizes = (len(features) + schedule.code_size, *schedule.widths, 1)
        self.weights = [self._initial(a, b) for a, b in pairwise(sizes)]
        self.biases = [np.zeros(b, dtype=np.float32) for b in sizes[1:]]
        shape = (int(examples.device.max()) + 1, schedule.code_size)
        self.codes = (0.3 * self.random.standard_normal(shape)).astype(np.float32)
        self.timing = np.log(np.maximum(np.concatenate([examples.floor, examples.offset]), 1e-9))

    def _initial(self, inputs: int, outputs: int) -> Float32Array:
        size = np.sqrt(1.6 / inputs) * (0.1 if outputs == 1 else 1.0)
        return np.asarray(size * self.random.standard_normal((inputs, outputs)), dtype=np.float32)

    def forward(self, rows: IntArray, device: IntArray) -> tuple[Float32Array, list[Float32Array], list[Float32Array]]:
        """Output of the net with the inputs and slopes of its layers."""
        h = np.concatenate([self.inputs[rows], self.codes[device]], axis=1)
        inputs, slopes = [h], []
        for weight, bias in zip(self.weights[:-1], self.biases[:-1], strict=True):
            z = h @ weight + bias
            open_ = compute_gate(z)
            h = z * open_
            inputs.append(h)
            slopes.append(open_ * (1 + z * (1 - open_)))
        return (h @ self.weights[-1] + self.biases[-1])[:, 0], inputs, slopes

    def backward(
        self, slope: Float32Array, inputs: list[Float32Array], slopes: list[Float32Array], device: IntArray
    ) -> list[Float32Array]:
        """Gradients of weights, biases and codes, in the order of `parameters`."""
        delta = slope[:, None]
        by_weight, by_bias = [], []
        for i in range(len(self.weights) - 1, -1, -1):
            by_weight.append(inputs[i].T @ delta)
            by_bias.append(delta.sum(axis=0))
            delta = delta @ self.weights[i].T
            if i:
                delta = delta * slopes[i - 1]
        pick = np.zeros((len(device), len(self.codes)), dtype=np.float32)
        pick[np.arange(len(device)), device] = 1.0
        return [*by_weight[::-1], *by_bias[::-1], pick.T @ delta[:, -self.codes.shape[1] :]]

    def net(self) -> ResidualNet:
        """The network as trained."""
        return ResidualNet(
            self.mean, self.scale, self.inputs.min(axis=0), self.inputs.max(axis=0), self.codes,
            tuple(self.weights), tuple(self.biases),
        )  # fmt: skip


def train(examples: Examples, schedule: Schedule) -> tuple[ResidualNet, FloatArray, FloatArray]:
    """The trained network, and the floor and offset (seconds) of every timing group. Deterministic."""
    run = _Trainer(examples, schedule)
    n, groups = len(examples.measured), len(examples.floor)
    steps = schedule.passes * -(-n // schedule.batch)
    net_adam = _Adam([*run.weights, *run.biases, run.codes], schedule.step, steps)
    timing_adam = _Adam([run.timing], 0.3 * schedule.step, steps)
    adjustable = np.concatenate([examples.floor, examples.offset]) > 0
    log_physical, log_measured = np.log(examples.physical), np.log(examples.measured)
    for _ in range(schedule.passes):
        order = run.random.permutation(n)
        for start in range(0, n, schedule.batch):
            rows = order[start : start + schedule.batch]
            device, group, size = examples.device[rows], examples.group[rows], len(rows)
            output, inputs, slopes = run.forward(rows, device)
            scaled = np.exp(log_physical[rows] + output)
            seconds = examples.fixed + scaled
            floor, offset = np.exp(run.timing[group]), np.exp(run.timing[groups + group])
            error = np.log(as_timed(seconds, floor, offset)) - log_measured[rows]
            heed = examples.weight[rows] / (1.0 + (error / examples.tail[rows]) ** 2)
            push = heed * np.clip(error / schedule.knee, -1.0, 1.0) / size
            shown = offset + seconds
            on_device = 1.0 / (1.0 + (floor / shown) ** EDGE)
            pull = np.where(on_device > 0.5, schedule.pull, schedule.pull_unseen)
            slope = push * on_device * scaled / shown + 2 * pull * output / size
            gradients = run.backward(slope.astype(np.float32), inputs, slopes, device)
            net_adam.update(gradients, schedule.decay)
            by_floor = np.bincount(group, push * (1 - on_device), groups)
            by_offset = np.bincount(group, push * on_device * offset / shown, groups)
            timing_adam.update([np.where(adjustable, np.concatenate([by_floor, by_offset]), 0.0)])
    timing = np.where(adjustable, np.exp(run.timing), 0.0)
    return run.net(), timing[:groups], timing[groups:]


def with_device(fit: EngineFit, engine: Engine, calls: Calls, seconds: FloatArray, device: Device) -> EngineFit:
    """The engine with a code for this device, learned from kernels timed alone in one compute type. Deterministic."""
    compute = calls.only_compute()
    left_out = _every(len(calls), 5)
    problem = Problem.of(calls, device, compute, COMPUTE_BYTES[compute])
    physical, features = describe_gemm(engine, problem)
    judged = _added(fit, engine, device, problem, physical, features, seconds, ~left_out)
    predicted = estimate_engine_seconds(engine, judged, calls.take(left_out), device, compute)
    extended = _added(fit, engine, device, problem, physical, features, seconds, np.ones(len(calls), dtype=np.bool_))
    sigma = _spreads(fit, predicted, seconds[left_out], classify_spread(calls)[left_out])
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
        open_ = compute_gate(z)
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
            own = compute_spread_90(predicted[mine], seconds[mine])
            sigma[:, index] = np.maximum(sigma[:, index], own)
            sigma[0, index] = own
    return np.asarray(sigma)


def _every(count: int, nth: int) -> BoolArray:
    chosen = np.zeros(count, dtype=np.bool_)
    chosen[::nth] = True
    return chosen
