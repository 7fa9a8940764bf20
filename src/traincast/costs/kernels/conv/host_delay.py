"""The host's part of convolutions timed between events.

NeuSight times one call at a time, and what its stopwatch shows is late by up to 0.3 ms (A100, V100) or 0.7 ms (P4,
P100), whatever the size. The delay of a shape is the same share of every machine's longest (rank correlation 0.95
between machines), any share is about equally likely, and no size explains it: it is the host's, not the device's. A
fit therefore finds the share of every shape it may see, from all machines at once; for any other shape the typical
share is all that is known.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from traincast.costs.kernels.conv.fitting import fit_weights
from traincast.costs.kernels.conv.measured import ConvSamples
from traincast.costs.kernels.conv.model import ConvModel
from traincast.utils.arrays import BoolArray, FloatArray, IndexArray

_SHORTEST_KERNEL_SECONDS = 10e-6  # in the quickest rows, which show a device's least host part
_SHORT = 0.3  # of a device's median time: rows that show the delay best
_SHARE_VARIANCE = 1 / 12  # of a share anywhere between none and all
_COMMON_ERROR = 0.08  # log-sigma of the physics for a shape on all devices, and on one
_OWN_ERROR = 0.08  # as above; both set by hand
_JITTER_SECONDS = 15e-6  # of a host's delay; assumed
_SURE_VARIANCE = 0.002  # of the shares that tell the typical one
_ROUNDS = 3  # of shares and weights found in turn; set by hand


@dataclass(frozen=True, slots=True)
class _Shares:
    """Of every shape: the share of the longest delay, 0 to 1, and its variance."""

    share: FloatArray
    variance: FloatArray


def with_host_parts(samples: ConvSamples, seen: BoolArray) -> ConvSamples:
    """Samples with the host's part of every event-timed reading: found where `seen`, typical elsewhere."""
    timed = np.flatnonzero(samples.event_timed & seen)
    if not len(timed):
        return samples
    physics = ConvModel(fit_weights(samples.take(seen & ~samples.event_timed).measurements()))
    least, longest = _delays(samples, timed, _physical_seconds(physics, samples, timed))
    shape = np.unique(samples.calls.values[timed], axis=0, return_inverse=True)[1].ravel()
    offset, unsure = np.zeros(len(samples.seconds)), np.zeros(len(samples.seconds))
    typical = 0.5
    for round_ in range(_ROUNDS + 1):
        device_seconds = _physical_seconds(physics, samples, timed)
        late = samples.seconds[timed] - device_seconds - least[samples.device[timed]]
        estimate = _shares(shape, late, device_seconds, longest[samples.device[timed]], typical)
        sure = estimate.variance < _SURE_VARIANCE
        typical = float(estimate.share[sure].mean()) if sure.any() else typical
        offset[timed] = least[samples.device[timed]] + estimate.share[shape] * longest[samples.device[timed]]
        unsure[timed] = np.hypot(_JITTER_SECONDS, np.sqrt(estimate.variance[shape]) * longest[samples.device[timed]])
        if round_ < _ROUNDS:
            physics = ConvModel(fit_weights(replace(samples, offset=offset, unsure=unsure).take(seen).measurements()))
    other = samples.event_timed & ~seen
    offset[other] = (least + typical * longest)[samples.device[other]]
    unsure[other] = np.sqrt(_SHARE_VARIANCE) * longest[samples.device[other]]
    return replace(samples, offset=offset, unsure=unsure)


def _delays(samples: ConvSamples, timed: IndexArray, device_seconds: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Least host part and longest delay of every device, in seconds, where `device_seconds` owes nothing to `timed`."""
    least, longest = np.zeros(len(samples.devices)), np.zeros(len(samples.devices))
    for index in np.unique(samples.device[timed]):
        mine = samples.device[timed] == index
        measured, physical = samples.seconds[timed][mine], device_seconds[mine]
        least[index] = max(float(np.quantile(measured, 0.001)) - _SHORTEST_KERNEL_SECONDS, 0.0)
        short = physical <= max(_SHORT * float(np.median(physical)), float(np.quantile(physical, 0.1)))
        left = measured[short] - physical[short] - least[index]
        longest[index] = max(2 * float(np.median(left)), _JITTER_SECONDS)
    return least, longest


def _shares(
    shape: IndexArray, late: FloatArray, device_seconds: FloatArray, longest: FloatArray, typical: float
) -> _Shares:
    """What `late` seconds say of the share, when the physics may be wrong for a shape everywhere, or on a device.

    The answer lies between what the shape's rows say and the `typical` share, whichever is surer.
    """
    weight = 1 / (np.square(_OWN_ERROR * device_seconds) + _JITTER_SECONDS**2)
    beyond = late - typical * longest

    def total(values: FloatArray) -> FloatArray:
        return np.asarray(np.bincount(shape, weight * values), dtype=np.float64)

    share_share = total(longest**2) + 1 / _SHARE_VARIANCE
    error_error = total(device_seconds**2) + 1 / _COMMON_ERROR**2
    cross = total(longest * device_seconds)
    determinant = share_share * error_error - cross**2
    share = (error_error * total(longest * beyond) - cross * total(device_seconds * beyond)) / determinant
    return _Shares(np.clip(typical + share, 0.0, 1.0), error_error / determinant)


def _physical_seconds(model: ConvModel, samples: ConvSamples, chosen: IndexArray) -> FloatArray:
    return samples.take(chosen).kernel_seconds(model.predict)[0]
