"""The Gaussian process that corrects a kind of op by its shape and state: how alike two places are, and which lengths,
amplitude and noise its samples speak for."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from traincast.utils.arrays import FloatArray

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
    with np.errstate(all="ignore"):  # what is not finite is rejected where a profile is read
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
