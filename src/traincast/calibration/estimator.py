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

from traincast.arrays import FloatArray

_SWEEPS = 400  # coordinate descent of a dozen coefficients settles in far fewer
_LENGTHS = (0.5, 1.0, 2.0, 4.0, 8.0)  # in factors of two of a size
_NOISES = (0.01, 0.03, 0.06, 0.12, 0.25)  # relative
_LEAST_SIGMA = 0.01
_RESIDUAL_SIGMA = 0.5  # what is assumed of a kind with fewer than two samples
_MOST_POINTS = 600


@dataclass(frozen=True, eq=False, kw_only=True)
class KindModel:
    """The fitted model of one kind; `places` and `weights` are the points of the process and their pull."""

    coefficients: FloatArray
    places: FloatArray
    weights: FloatArray
    inverse: FloatArray
    length: float
    amplitude: float
    noise: float

    def predict(self, terms: FloatArray, place: FloatArray) -> tuple[float, float]:
        """Seconds, and the standard deviation of their logarithm."""
        base = max(float(terms @ self.coefficients), 1e-9)
        if not len(self.places):
            return base, _RESIDUAL_SIGMA
        near = self.amplitude**2 * _alike(place[None, :], self.places, self.length)[0]
        variance = self.amplitude**2 - float(near @ self.inverse @ near)
        sigma = float(np.sqrt(max(variance, 0.0) + self.noise**2))
        return base * float(np.exp(near @ self.weights)), max(sigma, _LEAST_SIGMA)

    def to_dict(self) -> dict[str, Any]:
        """The numbers that `from_dict` takes, rounded to what matters."""
        return {
            "coefficients": [float(f"{value:.6g}") for value in self.coefficients],
            "places": [[float(f"{value:.6g}") for value in row] for row in self.places],
            "residuals": [float(f"{value:.5g}") for value in self._residuals()],
            "length": self.length,
            "amplitude": float(f"{self.amplitude:.6g}"),
            "noise": self.noise,
        }

    def _residuals(self) -> FloatArray:
        if not len(self.places):
            return np.zeros(0)
        return np.asarray(_covariance(self.places, self.length, self.amplitude, self.noise) @ self.weights)

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> KindModel:
        """The model that `to_dict` wrote."""
        places = np.array(data["places"], dtype=np.float64)
        length, amplitude, noise = float(data["length"]), float(data["amplitude"]), float(data["noise"])
        inverse, weights = _solved(places, np.array(data["residuals"], dtype=np.float64), length, amplitude, noise)
        return KindModel(
            coefficients=np.array(data["coefficients"], dtype=np.float64), places=places, weights=weights,
            inverse=inverse, length=length, amplitude=amplitude, noise=noise,
        )  # fmt: skip


def fit_kind(
    terms: FloatArray, places: FloatArray, seconds: FloatArray, coefficients: FloatArray | None = None
) -> KindModel:
    """The model of samples with these terms (n x t), places (n x p) and seconds (n); `coefficients` of the terms where
    they are known already."""
    keep = np.arange(len(seconds))[-_MOST_POINTS:]
    terms, places, seconds = terms[keep], places[keep], seconds[keep]
    if coefficients is None:
        coefficients = non_negative(terms / seconds[:, None], np.ones(len(seconds)))
    base = np.maximum(terms @ coefficients, 1e-9)
    residuals = np.log(seconds / base)
    length, amplitude, noise = _hyperparameters(places, residuals)
    inverse, weights = _solved(places, residuals, length, amplitude, noise)
    return KindModel(
        coefficients=coefficients, places=places, weights=weights, inverse=inverse, length=length,
        amplitude=amplitude, noise=noise,
    )  # fmt: skip


def non_negative(columns: FloatArray, target: FloatArray) -> FloatArray:
    """Least squares with coefficients of at least zero, by coordinate descent on columns of equal size."""
    scale = np.linalg.norm(columns, axis=0)
    scale[scale == 0] = 1.0
    a = columns / scale
    gram, pull = a.T @ a, a.T @ target
    solution = np.zeros(a.shape[1])
    for _ in range(_SWEEPS):
        for j in range(len(solution)):
            if gram[j, j] > 0:
                solution[j] = max(0.0, solution[j] + (pull[j] - gram[j] @ solution) / gram[j, j])
    return np.asarray(solution / scale)


def _hyperparameters(places: FloatArray, residuals: FloatArray) -> tuple[float, float, float]:
    """Length, amplitude and noise with the best leave-one-out likelihood."""
    amplitude = max(float(np.std(residuals)), 0.02)
    if len(residuals) < 4:
        return _LENGTHS[-1], amplitude, _NOISES[-1]
    best = (-np.inf, _LENGTHS[-1], _NOISES[-1])
    for length in _LENGTHS:
        for noise in _NOISES:
            inverse, weights = _solved(places, residuals, length, amplitude, noise)
            variance = 1.0 / np.diag(inverse)
            likelihood = float(-0.5 * np.sum(np.log(variance) + (weights * variance) ** 2 / variance))
            best = max(best, (likelihood, length, noise))
    return best[1], amplitude, best[2]


def _solved(
    places: FloatArray, residuals: FloatArray, length: float, amplitude: float, noise: float
) -> tuple[FloatArray, FloatArray]:
    if not len(residuals):
        return np.zeros((0, 0)), np.zeros(0)
    inverse: FloatArray = np.asarray(np.linalg.inv(_covariance(places, length, amplitude, noise)), dtype=np.float64)
    return inverse, inverse @ residuals


def _covariance(places: FloatArray, length: float, amplitude: float, noise: float) -> FloatArray:
    return np.asarray(amplitude**2 * _alike(places, places, length) + noise**2 * np.eye(len(places)))


def _alike(left: FloatArray, right: FloatArray, length: float) -> FloatArray:
    """How alike shapes are, from 1 (equal) to 0: once differentiable in the distance, as real kernels are rough."""
    distance = np.sqrt(3.0) * np.linalg.norm(left[:, None, :] - right[None, :, :], axis=2) / length
    return np.asarray((1.0 + distance) * np.exp(-distance))
