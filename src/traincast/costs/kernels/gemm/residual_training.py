"""Training of a residual network in plain numpy, through a model of how the measurements were timed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from traincast.costs.kernels.gemm.residual_net import Float32Array, ResidualNet, gate
from traincast.costs.kernels.gemm.stopwatch import EDGE, as_timed
from traincast.utils.arrays import FloatArray, IntArray


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
            open_ = gate(z)
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
