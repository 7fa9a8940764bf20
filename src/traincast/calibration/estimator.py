"""One estimator for every kind of op: a sum of non-negative terms, and a smooth correction by shape.

The terms (calls, bytes by cache level, work) carry what is known of the physics and hold beyond the shapes measured.
What they leave over in the logarithm is a Gaussian process over the shape, which returns to the terms, and widens its
interval, where nothing was measured nearby.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from traincast.arrays import BoolArray, FloatArray

_SWEEPS = 400  # of coordinate descent, at most
_SETTLED = 1e-4  # of the largest coefficient: moves that change no prediction
_ROUNDS = 4  # of least squares around the last guess
_LENGTHS = (1.0, 2.0, 4.0, 8.0, 16.0, 64.0)  # in factors of two of a size; the last: it does not matter
_START = 4.0
_STEPS = (0.5, 0.7, 1.4, 2.0)  # tried on amplitude and noise
_NOISE = (0.01, 0.06, 0.4)  # relative: least, first tried, most
_SEARCHES = 2  # over all parameters in turn
_SEARCHED = 250  # samples that are enough to tell how alike shapes are
_LEAST_SIGMA = 0.01
_LEAST_TERM = 1e-3  # of a call, a byte or a flop
_RESIDUAL_SIGMA = 0.5  # how far prices that were not fitted are off
_FEW_NOISE = 0.1  # of one sample: what was measured again differs by 5 to 13 %
_MOST_POINTS = 1000
_OUTLIER = 3.0  # deviations between a sample and what all others say of it, beyond which it is left out
_FEWEST_STEADY = 8  # samples that must remain


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
        near = self.amplitude**2 * _alike(place[None, :], self.places, self.lengths)[0]
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
        return np.asarray(_covariance(self.places, self.lengths, self.amplitude, self.noise) @ self.weights)

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> KindModel:
        """The model that `to_dict` wrote."""
        places = np.array(data["places"], dtype=np.float64)
        lengths = np.array(data["lengths"], dtype=np.float64)
        amplitude, noise = float(data["amplitude"]), float(data["noise"])
        inverse, weights = _solved(places, np.array(data["residuals"], dtype=np.float64), lengths, amplitude, noise)
        return KindModel(
            coefficients=np.array(data["coefficients"], dtype=np.float64), places=places, weights=weights,
            inverse=inverse, lengths=lengths, amplitude=amplitude, noise=noise,
        )  # fmt: skip


def fit_kind(
    terms: FloatArray, places: FloatArray, seconds: FloatArray, coefficients: FloatArray | None = None
) -> KindModel:
    """The model of samples with these terms (n x t), places (n x p) and seconds (n); `coefficients` of the terms where
    they are known already."""
    keep = np.linspace(0, len(seconds) - 1, min(len(seconds), _MOST_POINTS)).astype(int)
    terms, places, seconds = terms[keep], places[keep], seconds[keep]
    if coefficients is None:
        coefficients = fit_terms(terms, seconds)
    residuals = np.log(seconds / np.maximum(terms @ coefficients, 1e-9))
    steady = _steady(places, residuals)
    places, residuals = places[steady], residuals[steady]
    lengths, amplitude, noise = _hyperparameters(places, residuals)
    inverse, weights = _solved(places, residuals, lengths, amplitude, noise)
    return KindModel(
        coefficients=coefficients, places=places, weights=weights, inverse=inverse, lengths=lengths,
        amplitude=amplitude, noise=noise,
    )  # fmt: skip


def fit_few(terms: FloatArray, places: FloatArray, seconds: FloatArray, prices: FloatArray) -> KindModel:
    """The model of a kind with too few samples to fit anything: terms at rough prices, all of them scaled to the
    samples, which hold for shapes like theirs; for others the interval is wide."""
    coefficients = prices * float(np.exp(np.mean(np.log(seconds / (terms @ prices)))))
    residuals = np.log(seconds / (terms @ coefficients))
    lengths = np.full(places.shape[1], _START)
    inverse, weights = _solved(places, residuals, lengths, _RESIDUAL_SIGMA, _FEW_NOISE)
    return KindModel(
        coefficients=coefficients, places=places, weights=weights, inverse=inverse, lengths=lengths,
        amplitude=_RESIDUAL_SIGMA, noise=_FEW_NOISE,
    )  # fmt: skip


def _steady(places: FloatArray, residuals: FloatArray) -> BoolArray:
    """Which samples agree with what all others say of them: those that something disturbed would bend the rest."""
    inverse, weights = _solved(places, residuals, *_hyperparameters(places, residuals))
    own = np.diag(inverse)
    agree = np.abs(weights) < _OUTLIER * np.sqrt(own)  # left out, a sample is off by weights / own, +- 1 / sqrt(own)
    return agree if agree.sum() >= _FEWEST_STEADY else np.ones(len(residuals), dtype=bool)


def fit_terms(terms: FloatArray, seconds: FloatArray, most: FloatArray | None = None) -> FloatArray:
    """Non-negative prices of terms, each at most as high as said, by least squares of logarithms: those of relative
    errors would come out low, the more so the more the samples scatter. What no sample has a unit of (bytes from a
    memory that none came from, but for a rounding) has no price."""
    terms = np.where(np.max(terms, axis=0, initial=0.0) < _LEAST_TERM, 0.0, terms)
    prices = non_negative(terms / seconds[:, None], np.ones(len(seconds)), most)
    for _ in range(_ROUNDS):
        guess = np.maximum(terms @ prices, 1e-9)
        prices = non_negative(terms / guess[:, None], 1.0 + np.clip(np.log(seconds / guess), -0.5, 0.5), most)
    return prices


def non_negative(columns: FloatArray, target: FloatArray, most: FloatArray | None = None) -> FloatArray:
    """Least squares with coefficients from zero to `most`, by coordinate descent on columns of equal size."""
    scale = np.linalg.norm(columns, axis=0)
    scale[scale == 0] = 1.0
    limit = np.full(columns.shape[1], np.inf) if most is None else most * scale
    a = columns / scale
    gram, left = a.T @ a, a.T @ target  # what each coefficient is pulled by
    own, limits, solution = np.diag(gram).tolist(), limit.tolist(), [0.0] * len(left)
    free = [j for j, square in enumerate(own) if square > 0]
    for _ in range(_SWEEPS):
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


def _hyperparameters(places: FloatArray, residuals: FloatArray) -> tuple[FloatArray, float, float]:
    """Lengths (one per size), amplitude and noise of the best likelihood, searched one after the other."""
    least, noise, most = _NOISE
    lengths, amplitude = np.full(places.shape[1], _START), max(float(np.std(residuals)), 0.02)
    if len(residuals) < 4:
        return lengths, amplitude, most
    chosen = np.linspace(0, len(residuals) - 1, min(len(residuals), _SEARCHED)).astype(int)
    places, residuals = places[chosen], residuals[chosen]
    best = _likelihood(places, residuals, lengths, amplitude, noise)
    for _ in range(_SEARCHES):
        for position, length in product(range(len(lengths)), _LENGTHS):
            new = _replaced(lengths, position, length)
            found = _likelihood(places, residuals, new, amplitude, noise)
            if found > best:
                best, lengths = found, new
        for larger, noisier in [*((step, 1.0) for step in _STEPS), *((1.0, step) for step in _STEPS)]:
            level, rough = amplitude * larger, min(max(noise * noisier, least), most)
            found = _likelihood(places, residuals, lengths, level, rough)
            if found > best:
                best, amplitude, noise = found, level, rough
    return lengths, amplitude, noise


def _replaced(values: FloatArray, position: int, value: float) -> FloatArray:
    changed = values.copy()
    changed[position] = value
    return changed


def _likelihood(
    places: FloatArray, residuals: FloatArray, lengths: FloatArray, amplitude: float, noise: float
) -> float:
    """The logarithm of how likely the residuals are, but for a constant."""
    try:
        lower = np.linalg.cholesky(_covariance(places, lengths, amplitude, noise))
    except np.linalg.LinAlgError:
        return -np.inf
    white = np.linalg.solve(lower, residuals)
    return float(-0.5 * white @ white - np.log(np.diag(lower)).sum())


def _solved(
    places: FloatArray, residuals: FloatArray, lengths: FloatArray, amplitude: float, noise: float
) -> tuple[FloatArray, FloatArray]:
    if not len(residuals):
        return np.zeros((0, 0)), np.zeros(0)
    inverse: FloatArray = np.asarray(np.linalg.inv(_covariance(places, lengths, amplitude, noise)), dtype=np.float64)
    return inverse, inverse @ residuals


def _covariance(places: FloatArray, lengths: FloatArray, amplitude: float, noise: float) -> FloatArray:
    return np.asarray(amplitude**2 * _alike(places, places, lengths) + noise**2 * np.eye(len(places)))


def _alike(left: FloatArray, right: FloatArray, lengths: FloatArray) -> FloatArray:
    """How alike shapes are, from 1 (equal) to 0: once differentiable in the distance, as real kernels are rough."""
    left, right = left / lengths, right / lengths
    squares = (left**2).sum(axis=1)[:, None] + (right**2).sum(axis=1)[None, :] - 2.0 * left @ right.T
    distance = np.sqrt(3.0 * np.maximum(squares, 0.0))
    return np.asarray((1.0 + distance) * np.exp(-distance))
