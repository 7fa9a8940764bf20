"""One estimator for every kind of op: a sum of non-negative terms, and a smooth correction by shape.

The terms (calls, bytes by cache level, work) carry what is known of the physics and hold beyond the shapes measured.
What they leave over in the logarithm is a Gaussian process over the shape, which returns to the terms, and widens its
interval, where nothing was measured nearby.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from traincast.costs.cpu.process import Process, compute_covariance, find_process, make_default_process
from traincast.utils.arrays import BoolArray, FloatArray

_SWEEPS = 400  # of coordinate descent, at most
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
