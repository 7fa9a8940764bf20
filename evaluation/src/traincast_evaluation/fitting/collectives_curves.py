"""Curves from noisy points: medians, single spikes out, never falling, and no more points than needed."""

from __future__ import annotations

import numpy as np

from traincast.costs.collectives.model import SMALL_BYTES, Curve, CurveSet
from traincast.utils.arrays import FloatArray
from traincast_evaluation.fitting.collectives_data import Points

TOLERANCE = 0.02  # log time that dropping a point may change
_SPIKE = 0.15  # log time by which one size may stand out from both neighbours before it counts as a disturbance
_BINS_PER_OCTAVE = 4  # sizes closer than this are pooled
_LEAST_SIGMA = 0.02  # at least: what `TOLERANCE` lets a curve change
_UNMEASURED_FLOOR = 0.4  # log-sigma of a floor that nobody measured: assumed, a factor of 1.5


def fit_curve_sets(points: Points) -> dict[str, CurveSet]:
    """Every curve the points have enough sizes for, by set, kind, type and place."""
    sets: dict[str, CurveSet] = {}
    columns = zip(points.set, points.kind, points.dtype, points.ranks, points.nodes, strict=True)
    keys = np.array(["|".join(map(str, key)) for key in columns])
    for key in np.unique(keys):
        rows = np.flatnonzero(keys == key)
        if len(np.unique(points.bytes[rows])) < 2:
            continue
        name, kind, dtype = str(points.set[rows[0]]), str(points.kind[rows[0]]), str(points.dtype[rows[0]])
        place = (int(points.ranks[rows[0]]), int(points.nodes[rows[0]]))
        curve = fit_curve(points.bytes[rows], points.seconds[rows])
        sets.setdefault(name, {}).setdefault((kind, dtype), {})[place] = curve
    return sets


def fit_curve(size: FloatArray, seconds: FloatArray) -> Curve:
    """The curve through measured points; repeats of a size are pooled by their median."""
    x, t = _pool_repeats(size, seconds)
    t = np.exp(_make_rising(_smooth_spikes(np.log(t))))
    # a curve that ends flat would promise infinite bandwidth beyond its end
    keep = _choose_knots(x, t)
    if t[keep[-1]] <= t[keep[-2]] * (1 + 1e-9):
        t[keep[-1]] = t[keep[-2]] * 1.001
    curve = Curve(x[keep], t[keep], (0.0, 0.0), (float(size.min()), float(size.max())))
    return Curve(curve.bytes, curve.seconds, _compute_curve_spread(x, t, size, seconds), curve.measured)


def remove_host_floor(curve: Curve, floor: float) -> Curve:
    """A host-inclusive curve as device time: the host's floor replaced by a device's (seconds), known less well."""
    sigma = (_UNMEASURED_FLOOR, float(np.hypot(curve.sigma[1], 0.1)))
    # near the floor the host hid the device: only messages whose own time shows are measured
    visible = curve.bytes[np.searchsorted(curve.seconds, 1.5 * curve.floor).clip(max=len(curve.bytes) - 1)]
    return Curve(curve.bytes, curve.seconds - curve.floor + floor, sigma, (float(visible), curve.measured[1]))


def set_curve_floor(curve: Curve, floor: float) -> Curve:
    """A curve measured on large messages only, led down to a floor (seconds) at one byte."""
    size = np.concatenate([[1.0], curve.bytes])
    seconds = np.concatenate([[min(floor, curve.floor)], curve.seconds])
    return Curve(size, seconds, (_UNMEASURED_FLOOR, curve.sigma[1]), curve.measured)


def _pool_repeats(size: FloatArray, seconds: FloatArray) -> tuple[FloatArray, FloatArray]:
    sizes = np.unique(size)
    place = np.round(np.log2(sizes) * _BINS_PER_OCTAVE).astype(int)
    x, t = [], []
    for bin_ in np.unique(place):
        members = sizes[place == bin_]
        rows = np.isin(size, members)
        middle = float(np.exp(np.mean(np.log(members))))
        # within a bin time goes with size once bandwidth decides; a single size needs no such shift
        shift = middle / size[rows] if len(members) > 1 else np.ones(int(rows.sum()))
        x.append(middle)
        t.append(float(np.median(seconds[rows] * shift)))
    return np.array(x), np.array(t)


def _smooth_spikes(log_time: FloatArray) -> FloatArray:
    """Single sizes that stand out from both neighbours, up or down, take the neighbours' nearer value."""
    clean = log_time.copy()
    for i in range(1, len(clean) - 1):
        middle = float(np.median(log_time[i - 1 : i + 2]))
        if abs(log_time[i] - middle) > _SPIKE:
            clean[i] = middle
    return clean


def _make_rising(values: FloatArray) -> FloatArray:
    """Nearest sequence that never falls (pool adjacent violators)."""
    blocks: list[tuple[float, int]] = []
    for value in values:
        blocks.append((float(value), 1))
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            (a, m), (b, n) = blocks[-2], blocks[-1]
            blocks[-2:] = [((a * m + b * n) / (m + n), m + n)]
    return np.concatenate([np.full(n, value) for value, n in blocks])


def _choose_knots(x: FloatArray, t: FloatArray) -> list[int]:
    """Points without which the curve would change by more than the tolerance; drops the least needed first."""
    keep = list(range(len(x)))
    stretch = [0.0] * (len(x) - 1)  # what the points dropped so far have cost, between each two that are kept
    merged = [
        _compute_segment_loss(x, t, i - 1, i + 1) for i in range(1, len(x) - 1)
    ]  # what dropping each kept point costs around it
    while len(keep) > 2:
        below, above = np.maximum.accumulate(stretch), np.maximum.accumulate(stretch[::-1])[::-1]
        elsewhere = np.maximum(np.append(0.0, below[:-2]), np.append(above[2:], 0.0))
        losses = np.maximum(merged, elsewhere)
        best = int(np.argmin(losses))
        if losses[best] > TOLERANCE:
            break
        del keep[best + 1]
        stretch[best : best + 2] = [merged.pop(best)]
        for i in (best, best + 1):
            if 1 <= i < len(keep) - 1:
                merged[i - 1] = _compute_segment_loss(x, t, keep[i - 1], keep[i + 1])
    return keep


def _compute_segment_loss(x: FloatArray, t: FloatArray, start: int, end: int) -> float:
    """Largest change of log time if the points between these two were dropped."""
    inside = slice(start, end + 1)
    line = np.interp(x[inside], x[[start, end]], t[[start, end]])
    return float(np.abs(np.log(line / t[inside])).max())


def _compute_curve_spread(x: FloatArray, t: FloatArray, size: FloatArray, seconds: FloatArray) -> tuple[float, float]:
    """Log-time spread below and above 64 KiB: of each point from the line between its neighbours, and of repeats."""
    centre = np.interp(size, x, t)
    for i in range(1, len(x) - 1):
        left_out = t[i - 1] + (t[i + 1] - t[i - 1]) * (x[i] - x[i - 1]) / (x[i + 1] - x[i - 1])
        centre = np.where(np.abs(np.log(size / x[i])) < 0.5 * np.log(2) / _BINS_PER_OCTAVE, left_out, centre)
    error = np.clip(np.abs(np.log(seconds / centre)), 0, 0.7)
    bands = [error[size <= SMALL_BYTES], error[size > SMALL_BYTES]]
    all_of_it = float(np.sqrt(np.mean(error**2)))
    small, large = (float(np.sqrt(np.mean(b**2))) if len(b) > 2 else all_of_it for b in bands)
    return max(small, _LEAST_SIGMA), max(large, _LEAST_SIGMA)
