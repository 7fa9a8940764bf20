"""A family of samples small enough to see through: copies at a share of the sheet's rate."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import numpy as np

from traincast.costs.kernels.contract import Calls, Estimate, KernelModel
from traincast.costs.kernels.streaming import MEMCPY
from traincast.hardware import load_device
from traincast_evaluation.kernels.fit import FamilyTraining, compute_device_spreads, compute_unseen_spread
from traincast_evaluation.kernels.samples import Samples

KEYS = ("v100-pcie", "v100", "t4")  # two cards with one chip, and another


@dataclass(frozen=True, eq=False, slots=True)
class TimedSamples(Samples):
    """Copies whose stopwatch adds `offset` seconds, and shows nothing of those marked `hidden`."""

    offset: np.ndarray
    hidden: np.ndarray

    @property
    def telling(self):
        return ~self.hidden

    @property
    def device_seconds(self):
        return self.seconds - self.offset

    def shown(self, seconds, sigma):
        return self.offset + seconds, sigma


def made_up_samples(share=(0.5, 0.5, 0.8), offset=5e-6, count=40):
    """Every card's copies of growing size; every fifth is held out, the first of each card is hidden."""
    devices = tuple(load_device(key) for key in KEYS)
    size = np.tile(1e6 * np.arange(1.0, count + 1), len(devices))
    device = np.repeat(np.arange(len(devices)), count)
    rate = np.array([s * d.dram_bandwidth for s, d in zip(share, devices, strict=True)])[device]
    calls = Calls.from_columns(MEMCPY, ["d2d"] * len(size), ["int8"] * len(size), size[:, None])
    number = np.tile(np.arange(count), len(devices))
    added = np.full(len(size), offset)
    return TimedSamples(devices, device, calls, size / rate + offset, number % 5 == 4, added, number == 0)


@dataclass
class Rates:
    """What a fit gives: the mean share of the sheet's rate, and spreads."""

    share: float
    sigma: np.ndarray | None = None
    unseen: float = 0.0


class RateModel(KernelModel):
    """Copies at a share of the sheet's rate."""

    family = MEMCPY

    def __init__(self, rates):
        self.rates = rates

    def predict(self, calls, device):
        seconds = calls["bytes"] / (self.rates.share * device.dram_bandwidth)
        return Estimate(seconds, np.full(len(calls), 0.1), np.ones(len(calls), dtype=np.bool_))

    def state(self):
        return {"share": np.array([self.rates.share]), "sigma": self.rates.sigma, "unseen": np.array(self.rates.unseen)}

    @classmethod
    def from_state(cls, state):
        return cls(Rates(float(state["share"][0])))


class RateTraining(FamilyTraining[TimedSamples, Rates]):
    """The protocol over made-up samples; remembers which samples its fits have seen."""

    profile: ClassVar[str] = "rates"
    sources: ClassVar[tuple[str, ...]] = ("made up (no licence)",)
    files: ClassVar[tuple[str, ...]] = ("none.csv",)

    def __init__(self, samples):
        self.samples, self.seen = samples, []

    def read(self, data: Path):
        return self.samples

    def fit(self, samples):
        self.seen.append(samples)
        data = samples.measurements()
        peak = np.array([device.dram_bandwidth for device in data.devices])[data.device]
        return Rates(float(np.mean(samples.calls["bytes"] / data.seconds / peak)))

    def predictor(self, fitted):
        return RateModel(fitted).predict

    def calibrate(self, fitted, samples, seen):
        keys = [device.key for device in samples.devices]
        use = seen & samples.telling
        sigma = compute_device_spreads(samples, use, self.predictor(fitted), keys, least=0.01)
        unseen = compute_unseen_spread(samples, use, use, lambda others: self.predictor(self.fit(others)))
        return replace(fitted, sigma=sigma, unseen=unseen)

    def model(self, fitted, data):
        return RateModel(fitted)
