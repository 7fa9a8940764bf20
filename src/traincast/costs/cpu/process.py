"""The Gaussian process that corrects a kind of op by its shape and state, and the host events of a step that a profile
costs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from traincast.costs.cpu.cpu_ops import VIEWS, make_cpu_ops
from traincast.ir.collectives import COLLECTIVE_OPS
from traincast.ir.ops import Phase
from traincast.ir.program import Program
from traincast.utils.arrays import FloatArray

if TYPE_CHECKING:
    from traincast.costs.cpu.profile import Profile

_LENGTHS = (0.5, 4.0, 100.0)  # in factors of two of a size: least, first tried, most (which does not matter any more)
_USUAL, _FACTOR = 8.0, np.e  # what a length is before anything was measured, and by which factor it may well be off
_AMPLITUDES = (0.02, 3.0)  # of logarithms
_NOISE = (0.01, 0.06, 0.4)  # relative: least, first tried, most
_SEARCHED = 500  # samples that are enough to tell how alike shapes are
_SWEEPS, _FEWER_SWEEPS = 40, 20  # of the search, and of one that begins near by
_STEPS = (1e-3, 0.3, 1.0)  # of logarithms: least, first, most
_FASTER, _SLOWER = 1.3, 0.5  # a step, where the slope keeps its sign and where it has changed it
_FEWEST = 4  # samples that say anything of lengths


class Process(NamedTuple):
    """Lengths of every coordinate, how far residuals deviate, and how far single samples do (both of logarithms)."""

    lengths: FloatArray
    amplitude: float
    noise: float

    def covariance(self, places: FloatArray) -> FloatArray:
        """Of residuals at these places (n x n)."""
        return np.asarray(
            self.amplitude**2 * compute_covariance(places, places, self.lengths) + self.noise**2 * np.eye(len(places))
        )

    def solved(self, places: FloatArray, residuals: FloatArray) -> tuple[FloatArray, FloatArray]:
        """The inverse of the covariance, and the pull of every sample."""
        if not len(residuals):
            return np.zeros((0, 0)), np.zeros(0)
        inverse: FloatArray = np.asarray(np.linalg.inv(self.covariance(places)), dtype=np.float64)
        return inverse, inverse @ residuals


def compute_covariance(left: FloatArray, right: FloatArray, lengths: FloatArray) -> FloatArray:
    """How alike places are, from 1 (equal) to 0: once differentiable in the distance, as real kernels are rough."""
    apart = _measure_distance(left, right, lengths)
    return np.asarray((1.0 + apart) * np.exp(-apart))


def _measure_distance(left: FloatArray, right: FloatArray, lengths: FloatArray) -> FloatArray:
    left, right = left / lengths, right / lengths
    squares = (left**2).sum(axis=1)[:, None] + (right**2).sum(axis=1)[None, :] - 2.0 * left @ right.T
    return np.asarray(np.sqrt(3.0 * np.maximum(squares, 0.0)))


def make_default_process(sizes: int, amplitude: float, noise: float) -> Process:
    """The process before anything tells its lengths."""
    return Process(np.full(sizes, _LENGTHS[1]), amplitude, noise)


def find_process(places: FloatArray, residuals: FloatArray, start: Process | None = None) -> Process:
    """The process under which residuals are likeliest, lengths being as usual where nothing speaks against it; searched
    from `start` where it is known about."""
    amplitude = max(float(np.std(residuals)), _AMPLITUDES[0]) if len(residuals) else _AMPLITUDES[0]
    if len(residuals) < _FEWEST:
        return make_default_process(places.shape[1], amplitude, _NOISE[2])
    chosen = np.linspace(0, len(residuals) - 1, min(len(residuals), _SEARCHED)).astype(int)
    begin = start or make_default_process(places.shape[1], amplitude, _NOISE[1])
    return _climb_likelihood(places[chosen], residuals[chosen], begin, _SWEEPS if start is None else _FEWER_SWEEPS)


def _climb_likelihood(places: FloatArray, residuals: FloatArray, begin: Process, sweeps: int) -> Process:
    """Uphill in the logarithms of all parameters at once, each with a step of its own that grows while its slope keeps
    its sign; the best of all that were tried."""
    many = places.shape[1]
    low, high = (np.log([*[_LENGTHS[end]] * many, _AMPLITUDES[end], _NOISE[end]]) for end in (0, -1))
    at = np.clip(np.log([*begin.lengths, begin.amplitude, begin.noise]), low, high)
    step, slope, best = np.full(many + 2, _STEPS[1]), np.zeros(many + 2), (-np.inf, at)
    for _ in range(sweeps):
        found, uphill = _compute_likelihood(places, residuals, at)
        best = max(best, (found, at), key=lambda tried: tried[0])
        turned = uphill * slope
        step = np.clip(step * np.where(turned > 0, _FASTER, np.where(turned < 0, _SLOWER, 1.0)), _STEPS[0], _STEPS[2])
        slope = np.where(turned < 0, 0.0, uphill)
        at = np.clip(at + np.sign(slope) * step, low, high)
    return _make_process(best[1])


def _make_process(logarithms: FloatArray) -> Process:
    *lengths, amplitude, noise = np.exp(logarithms)
    return Process(np.array(lengths), float(amplitude), float(noise))


def _compute_likelihood(places: FloatArray, residuals: FloatArray, logarithms: FloatArray) -> tuple[float, FloatArray]:
    """The logarithm of how likely residuals and lengths are, but for a constant, and its slope in each parameter."""
    lengths, amplitude, noise = _make_process(logarithms)
    apart = _measure_distance(places, places, lengths)
    fading = np.exp(-apart)
    near = amplitude**2 * (1.0 + apart) * fading
    try:
        lower = np.linalg.cholesky(near + noise**2 * np.eye(len(places)))
    except np.linalg.LinAlgError:
        return -np.inf, np.zeros(len(logarithms))
    half = np.linalg.solve(lower, np.eye(len(places)))
    inverse = half.T @ half
    pull = inverse @ residuals
    off = np.log(lengths / _USUAL) / np.log(_FACTOR)
    found = -0.5 * float(residuals @ pull) - float(np.log(np.diag(lower)).sum()) - 0.5 * float(off @ off)
    weight = np.outer(pull, pull) - inverse
    # of a length: half the sum over pairs of weight * 3 * amplitude^2 * fading * (difference / length)^2
    pairs = 3.0 * amplitude**2 * weight * fading
    by_length = ((places**2 * pairs.sum(axis=1)[:, None]).sum(axis=0) - (places * (pairs @ places)).sum(axis=0)) / (
        lengths**2
    )
    slopes = [by_length - off / np.log(_FACTOR), [float((weight * near).sum())], [noise**2 * float(np.trace(weight))]]
    return found, np.concatenate(slopes)


HOST_EVENTS = ("step", "op", "view", "backward", "accumulate", "optimizer", "reduced", "collective")
"""A step, a top-level op outside backward, a view, an autograd node, a gradient that is accumulated, an op of the
optimizer; and of several ranks, a gradient that DDP has all-reduced, and a collective that is called."""


def count_host_events(program: Program) -> FloatArray:
    """How often each of `HOST_EVENTS` occurs in a step."""
    numbers = [event for event, _ in _list_events(program)]
    return np.bincount(numbers, minlength=len(HOST_EVENTS)).astype(np.float64)


def sum_host_seconds_by_op(program: Program, profile: Profile) -> FloatArray:
    """Seconds of the host before each op of a program; those of a top-level op stand before its first one."""
    prices = np.array([profile.host.get(name, 0.0) for name in HOST_EVENTS])
    events, places = np.array(list(_list_events(program)), dtype=np.int64).reshape(-1, 2).T
    last = max(program.num_ops - 1, 0)
    seconds = np.bincount(np.minimum(places, last), weights=prices[events], minlength=program.num_ops)
    return seconds.astype(np.float64)


def _list_events(program: Program) -> Iterator[tuple[int, int]]:
    """(event, op before which it happens) of a step."""
    number = {name: place for place, name in enumerate(HOST_EVENTS)}
    yield number["step"], 0
    for op in program.ops:
        if op.name in COLLECTIVE_OPS:
            yield number["collective"], op.index
        elif op.name in VIEWS:
            yield number["view"], op.index
        elif op.phase is Phase.OPTIMIZER or "Optimizer." in program.scopes[op.scope].name:
            yield from ((number["optimizer"], op.index) for _ in make_cpu_ops(op.signature))
    reduced = any(op.signature.scalar("collective") == "all_reduce" for op in program.ops)
    for scope in program.scopes:
        if scope.name.startswith("Optimizer."):
            continue
        if scope.phase is not Phase.BACKWARD:
            yield number["op"], scope.first_op
        elif "AccumulateGrad" in scope.name:
            yield number["accumulate"], scope.first_op
            if reduced:
                yield number["reduced"], scope.first_op
        else:
            yield number["backward"], scope.first_op
