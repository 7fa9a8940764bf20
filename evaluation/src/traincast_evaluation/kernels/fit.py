"""Fitting a family: one protocol from measured samples to a profile with its provenance.

Samples are read and checked; a fifth of them, told by a hash of their shape, is held out. What the host added to the
others is found, the model is fitted, and its spread judged on another fifth that a second fit leaves out, and on chips
left out one by one. Errors in the provenance are those of the held-out fifth alongside those of the fitted samples.
"""

from __future__ import annotations

import json
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeAlias, TypeVar

import numpy as np

from traincast.costs.kernels.contract import Calls, Estimate, KernelModel, State
from traincast.hardware.device import Device
from traincast.utils.arrays import BoolArray, FloatArray
from traincast.utils.metrics import compute_mean_error_percent, is_within_interval
from traincast_evaluation.kernels.samples import Samples
from traincast_evaluation.solve import compute_spread_90

Progress: TypeAlias = Callable[[str, float], None]
"""Hears what is being done, and the share of the whole (0 to 1) that is done."""
UNJUDGED_SPREAD = 0.3
"""Log-sigma for unseen devices when the measurements hold only one chip, so that none can be left out."""
SEED = "shape hash, see traincast.fit.measurements.held_out"
"""How samples are held out, in the words of the shipped profiles (today `measurements.tables.held_out`)."""
_MOST_JUDGED = 200  # samples of a device that tell the spread of chips never seen: every device counts alike
Predictor: TypeAlias = Callable[[Calls, Device], Estimate]
AnySamples = TypeVar("AnySamples", bound=Samples)
Fitted = TypeVar("Fitted")


def ignore_progress(what: str, share: float) -> None:
    """A progress that nobody follows."""


Training: TypeAlias = Callable[[Path, Path, Progress], dict[str, Any]]
"""Fits from a folder of measurements, writes a profile into another folder, returns the profile's provenance."""


def save_state(state: State, provenance: Mapping[str, Any], path: Path) -> None:
    """Writes `path`.npz (numbers) and `path`.json (sources, licence, rows, errors); the same bytes every time.

    The date comes later, from what is shipped: see `traincast_evaluation.fitting.dates`.
    """
    with zipfile.ZipFile(path.with_suffix(".npz"), "w", zipfile.ZIP_DEFLATED) as archive:
        for name in sorted(state):
            info = zipfile.ZipInfo(f"{name}.npy", date_time=(1980, 1, 1, 0, 0, 0))
            info.compress_type = zipfile.ZIP_DEFLATED
            with archive.open(info, "w") as member:
                np.lib.format.write_array(member, np.ascontiguousarray(state[name]), allow_pickle=False)
    text = json.dumps(provenance, indent=1, sort_keys=True)
    path.with_suffix(".json").write_text(text + "\n", encoding="utf-8")


class FamilyTraining(ABC, Generic[AnySamples, Fitted]):
    """How the profile of a family is fitted. `Fitted` is what a fit gives: a model, or its parameters."""

    profile: ClassVar[str]
    sources: ClassVar[tuple[str, ...]]
    files: ClassVar[tuple[str, ...]]

    @abstractmethod
    def read(self, data: Path) -> AnySamples:
        """All samples under the folder `data`, checked, with those that no fit may see marked."""

    def prepare(self, samples: AnySamples, seen: BoolArray) -> AnySamples:
        """The samples with the host's part of their times, found from the `seen` ones alone."""
        return samples

    @abstractmethod
    def fit(self, samples: AnySamples) -> Fitted:
        """What these samples, as prepared, teach. Spreads are placeholders."""

    @abstractmethod
    def predictor(self, fitted: Fitted) -> Predictor:
        """Estimates of calls on a device."""

    @abstractmethod
    def calibrate(self, fitted: Fitted, samples: AnySamples, seen: BoolArray) -> Fitted:
        """The same with spreads, told by `seen` samples that a second fit leaves out."""

    @abstractmethod
    def model(self, fitted: Fitted, data: Path) -> KernelModel:
        """The model to ship."""

    def provenance(self, fitted: Fitted, samples: AnySamples) -> dict[str, Any]:
        """Where the profile comes from and how far off it is."""
        used, held = ~samples.held_out & samples.telling, samples.held_out & samples.telling
        shown, sigma = samples.predicted(self.predictor(fitted))
        inside = is_within_interval(shown[held], samples.seconds[held], sigma[held])
        return {
            "sources": list(self.sources),
            "files": list(self.files),
            "rows_fitted": int(used.sum()),
            "rows_held_out": int(held.sum()),
            "mean_error_percent_fitted": compute_mean_error_percent(shown[used], samples.seconds[used]),
            "mean_error_percent_held_out": compute_mean_error_percent(shown[held], samples.seconds[held]),
            "interval_coverage_held_out": float(np.mean(inside)),
            "devices": [device.key for i, device in enumerate(samples.devices) if (used & (samples.device == i)).any()],
            "seed": SEED,
        }

    def __call__(self, data: Path, out: Path, progress: Progress) -> dict[str, Any]:
        """Writes the profile (`.npz` and `.json`) into the folder `out` and returns its provenance."""
        progress(f"reading measurements of {self.profile}", 0.0)
        samples = self.read(data)
        seen = ~samples.held_out
        samples = self.prepare(samples, seen)
        progress(f"fitting {self.profile}", 0.1)
        fitted = self.fit(samples.take(seen & samples.telling))
        progress(f"judging {self.profile}", 0.4)
        fitted = self.calibrate(fitted, samples, seen)
        provenance = self.provenance(fitted, samples)
        save_state(self.model(fitted, data).state(), provenance, out / self.profile)
        progress(f"{self.profile} done", 1.0)
        return provenance


AnyModel = TypeVar("AnyModel", bound=KernelModel)


class ModelTraining(FamilyTraining[AnySamples, AnyModel]):
    """Where a fit gives the model that is shipped, and samples show what it predicts."""

    def predictor(self, fitted: AnyModel) -> Predictor:
        """As the model predicts."""
        return fitted.predict

    def model(self, fitted: AnyModel, data: Path) -> KernelModel:
        """The fitted model itself."""
        return fitted


def leave_one_chip_out(
    samples: Samples, seen: BoolArray, *, generation: bool = False
) -> Iterator[tuple[int, BoolArray]]:
    """The position of every device with samples, and the `seen` ones of other chips (or of other generations) that it
    is predicted from."""
    archs = np.array([device.arch for device in samples.devices])
    for index in np.unique(samples.device).tolist():
        alike = archs[samples.device] == archs[index] if generation else samples.same_chip(index)
        elsewhere = seen & ~alike
        if elsewhere.any():
            yield index, elsewhere


def compute_unseen_spread(
    samples: AnySamples, seen: BoolArray, judged: BoolArray, fit: Callable[[AnySamples], Predictor]
) -> float:
    """Log-sigma for devices never measured: the `judged` samples of each, predicted from `seen` ones of other chips."""
    shown, measured = [], []
    for index, elsewhere in leave_one_chip_out(samples, seen):
        mine = samples.take(judged & (samples.device == index))
        seconds, _ = mine.predicted(fit(samples.take(elsewhere)))
        keep = slice(None, None, max(1, len(seconds) // _MOST_JUDGED))
        shown.append(seconds[keep])
        measured.append(mine.seconds[keep])
    return compute_spread_90(np.concatenate(shown), np.concatenate(measured)) if shown else UNJUDGED_SPREAD


def compute_device_spreads(
    samples: Samples, judged: BoolArray, predict: Predictor, keys: Sequence[str], least: float = 0.0
) -> FloatArray:
    """Log-sigma of the devices of these keys, from `judged` samples that the prediction has not seen."""
    shown, _ = samples.predicted(predict)
    position = [device.key for device in samples.devices]
    masks = [judged & (samples.device == position.index(key)) for key in keys]
    return np.array([max(compute_spread_90(shown[mine], samples.seconds[mine]), least) for mine in masks])
