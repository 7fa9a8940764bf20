"""One estimator for every kind of op: a sum of non-negative terms, and a Gaussian process that corrects it by shape and
state.

The terms (calls, bytes by cache level, work) carry what is known of the physics and hold beyond the shapes measured.
What they leave over in the logarithm is a Gaussian process over the shape, which returns to the terms, and widens its
interval, where nothing was measured nearby.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from traincast.utils.arrays import BoolArray, FloatArray

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


_DESCENT_SWEEPS = 400  # of coordinate descent, at most
_SETTLED = 1e-4  # of the largest coefficient: moves that change no prediction
_ROUNDS = 4  # of least squares around the last guess
_LEAST_SIGMA = 0.01
_LEAST_TERM = 1e-3  # of a call, a byte or a flop
_RESIDUAL_SIGMA = 0.5  # how far prices that were not fitted are off
_FEW_NOISE = 0.1  # of one sample: what was measured again differs by 5 to 13 %
_MOST_POINTS = 1500
_OUTLIER = 3.0  # deviations between a sample and what all others say of it, beyond which it is left out
_FEWEST_STEADY = 8  # samples that must remain


_LARGEST_NUMBER, _LARGEST_LOG = 1e9, 50.0  # of a model; of its residuals, which are logarithms, and their deviations
_LARGEST_SECONDS = 10.0  # of a call, a byte or a flop


@dataclass(frozen=True, eq=False, kw_only=True)
class KindModel:
    """The fitted model of one kind; `places` and `weights` are the points of the process and their pull."""

    coefficients: FloatArray
    places: FloatArray
    weights: FloatArray
    inverse: FloatArray
    lengths: FloatArray
    amplitude: float
    noise: float

    def predict(self, terms: FloatArray, place: FloatArray) -> tuple[float, float]:
        """Seconds, and the standard deviation of their logarithm."""
        base = max(float(terms @ self.coefficients), 1e-9)
        if not len(self.places):
            return base, _RESIDUAL_SIGMA
        near = self.amplitude**2 * compute_covariance(place[None, :], self.places, self.lengths)[0]
        variance = self.amplitude**2 - float(near @ self.inverse @ near)
        sigma = float(np.sqrt(max(variance, 0.0) + self.noise**2))
        return base * float(np.exp(near @ self.weights)), max(sigma, _LEAST_SIGMA)

    def to_dict(self) -> dict[str, Any]:
        """The numbers that `from_dict` takes, rounded to what matters."""
        return {
            "coefficients": [float(f"{value:.6g}") for value in self.coefficients],
            "places": [[float(f"{value:.6g}") for value in row] for row in self.places],
            "residuals": [float(f"{value:.5g}") for value in self._residuals()],
            "lengths": [float(value) for value in self.lengths],
            "amplitude": float(f"{self.amplitude:.6g}"),
            "noise": float(f"{self.noise:.6g}"),
        }

    def _residuals(self) -> FloatArray:
        if not len(self.places):
            return np.zeros(0)
        return np.asarray(self.process.covariance(self.places) @ self.weights)

    @property
    def process(self) -> Process:
        """How alike places are."""
        return Process(self.lengths, self.amplitude, self.noise)

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> KindModel:
        """The model that `to_dict` wrote."""
        places = np.array(data["places"], dtype=np.float64)
        lengths = np.array(data["lengths"], dtype=np.float64)
        amplitude, noise = float(data["amplitude"]), float(data["noise"])
        residuals = np.array(data["residuals"], dtype=np.float64)
        coefficients = np.array(data["coefficients"], dtype=np.float64)
        numbers = (places, lengths, residuals, coefficients, np.array([amplitude, noise]))
        most = (_LARGEST_NUMBER, _LARGEST_NUMBER, _LARGEST_LOG, _LARGEST_SECONDS, _LARGEST_LOG)
        small = all(np.abs(held).max(initial=0.0) <= limit for held, limit in zip(numbers, most, strict=True))
        if not small or not lengths.min(initial=1.0) > 0 or min(amplitude, noise) < 0:
            raise ValueError("a model has numbers that are not finite or too large, or lengths that are not above 0")
        if any(held.ndim != 1 for held in (lengths, residuals, coefficients)):
            raise ValueError("a model has a number where a list belongs")
        if coefficients.min(initial=0.0) < 0 or (places.size and places.ndim != 2) or len(places) != len(residuals):
            raise ValueError("a model has negative seconds, or other counts of places and residuals")
        inverse, weights = Process(lengths, amplitude, noise).solved(places, residuals)
        return KindModel(
            coefficients=coefficients, places=places, weights=weights,
            inverse=inverse, lengths=lengths, amplitude=amplitude, noise=noise,
        )  # fmt: skip


def fit_kind(
    terms: FloatArray,
    places: FloatArray,
    seconds: FloatArray,
    coefficients: FloatArray | None = None,
    *,
    like: KindModel | None = None,
) -> KindModel:
    """The model of samples with these terms (n x t), places (n x p) and seconds (n); `coefficients` of the terms where
    they are known already, and a model that was fitted to most of the same samples, whose process is near by."""
    keep = np.linspace(0, len(seconds) - 1, min(len(seconds), _MOST_POINTS)).astype(int)
    terms, places, seconds = terms[keep], places[keep], seconds[keep]
    if coefficients is None:
        coefficients = fit_terms(terms, seconds)
    residuals = np.log(seconds / np.maximum(terms @ coefficients, 1e-9))
    first = like.process if like is not None and len(like.places) else find_process(places, residuals)
    steady = _select_steady(places, residuals, first)
    places, residuals = places[steady], residuals[steady]
    process = find_process(places, residuals, first)
    inverse, weights = process.solved(places, residuals)
    return KindModel(
        coefficients=coefficients, places=places, weights=weights, inverse=inverse, **process._asdict()
    )  # fmt: skip


def fit_few(terms: FloatArray, places: FloatArray, seconds: FloatArray, prices: FloatArray) -> KindModel:
    """The model of a kind with too few samples to fit anything: terms at rough prices, all of them scaled to the
    samples, which hold for shapes like theirs; for others the interval is wide."""
    coefficients = prices * float(np.exp(np.mean(np.log(seconds / (terms @ prices)))))
    residuals = np.log(seconds / (terms @ coefficients))
    process = make_default_process(places.shape[1], _RESIDUAL_SIGMA, _FEW_NOISE)
    inverse, weights = process.solved(places, residuals)
    return KindModel(
        coefficients=coefficients, places=places, weights=weights, inverse=inverse, **process._asdict()
    )  # fmt: skip


def _select_steady(places: FloatArray, residuals: FloatArray, process: Process) -> BoolArray:
    """Which samples agree with what all others say of them: those that something disturbed would bend the rest."""
    inverse, weights = process.solved(places, residuals)
    own = np.diag(inverse)
    agree = np.abs(weights) < _OUTLIER * np.sqrt(own)  # left out, a sample is off by weights / own, +- 1 / sqrt(own)
    return agree if agree.sum() >= _FEWEST_STEADY else np.ones(len(residuals), dtype=bool)


def fit_terms(terms: FloatArray, seconds: FloatArray, most: FloatArray | None = None) -> FloatArray:
    """Non-negative prices of terms, each at most as high as said, by least squares of logarithms: those of relative
    errors would come out low, the more so the more the samples scatter. What no sample has a unit of (bytes from a
    memory that none came from, but for a rounding) has no price."""
    terms = np.where(np.max(terms, axis=0, initial=0.0) < _LEAST_TERM, 0.0, terms)
    prices = solve_non_negative(terms / seconds[:, None], np.ones(len(seconds)), most)
    for _ in range(_ROUNDS):
        guess = np.maximum(terms @ prices, 1e-9)
        prices = solve_non_negative(terms / guess[:, None], 1.0 + np.clip(np.log(seconds / guess), -0.5, 0.5), most)
    return prices


def solve_non_negative(columns: FloatArray, target: FloatArray, most: FloatArray | None = None) -> FloatArray:
    """Least squares with coefficients from zero to `most`, by coordinate descent on columns of equal size."""
    scale = np.linalg.norm(columns, axis=0)
    scale[scale == 0] = 1.0
    limit = np.full(columns.shape[1], np.inf) if most is None else most * scale
    a = columns / scale
    gram, left = a.T @ a, a.T @ target  # what each coefficient is pulled by
    own, limits, solution = np.diag(gram).tolist(), limit.tolist(), [0.0] * len(left)
    free = [j for j, square in enumerate(own) if square > 0]
    for _ in range(_DESCENT_SWEEPS):
        moved = 0.0
        for j in free:
            step = min(max(0.0, solution[j] + left.item(j) / own[j]), limits[j]) - solution[j]
            if step:  # most that are zero stay so
                solution[j] += step
                left -= step * gram[j]
                moved = max(moved, abs(step))
        if moved <= _SETTLED * max(solution):
            break
    return np.asarray(np.array(solution) / scale)
