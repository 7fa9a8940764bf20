"""How often kernels outside of what was fitted are inside their interval: `python scripts/check_domains.py --data DIR`.

Every group is of rows that no fit saw and that are really outside: GPUs left out of a fit, whose spreads are then those
of the others; GPUs of later tables; sizes beyond the fitted ones; kinds that were never fitted. The widening that
`OUTSIDE_SIGMA` adds is set on every second group, and shown on the others; a group counts with at most 200 rows.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data_option import run_on_data
from traincast.costs.kernels.attention.model import AttentionModel
from traincast.costs.kernels.contract import load_state
from traincast.costs.kernels.cost import OUTSIDE_SIGMA
from traincast.costs.kernels.families import PROFILES
from traincast.costs.kernels.gemm.model import GemmModel
from traincast.utils.arrays import BoolArray, FloatArray
from traincast.utils.display.text import format_table
from traincast.utils.metrics import is_within_interval
from traincast_evaluation.kernels.attention.fit import TRAINING as ATTENTION
from traincast_evaluation.kernels.attention.measurements import read_encoder, read_trained
from traincast_evaluation.kernels.fit import AnySamples, FamilyTraining, Fitted, Predictor, leave_one_chip_out
from traincast_evaluation.kernels.gemm.evaluate import PROFILE
from traincast_evaluation.kernels.gemm.fit import EXTENDED, compare, engine_rows, is_fittable, without_later_devices
from traincast_evaluation.kernels.gemm.measurements import BLACKWELL_FILE, GemmSamples, read_gemm
from traincast_evaluation.kernels.rowwise.fit import SOFTMAX_TRAINING
from traincast_evaluation.kernels.samples import Samples
from traincast_evaluation.kernels.streaming.fit import TRAINING as STREAMS
from traincast_evaluation.solve import compute_spread_90

BEFORE = 0.25  # log-sigma that was added before it was calibrated
MOST = 200  # rows of a group that count, so that no table outvotes the others
HOST_BOUND = 3.0  # GEMM readings below this many floors of their machine tell of its host


class Group(NamedTuple):
    """Rows outside of what was fitted: what they took, what was predicted, and the model's own log-sigma."""

    case: str
    device: str
    shown: FloatArray
    measured: FloatArray
    sigma: FloatArray

    def share_inside(self, added: float) -> float:
        """Of the rows, those inside the 90 % interval with this log-sigma added."""
        return float(np.mean(is_within_interval(self.shown, self.measured, np.hypot(self.sigma, added))))


def groups(data: Path) -> Iterator[Group]:
    """All of them."""
    model = GemmModel.from_state(load_state(PROFILE))
    products = read_gemm(data, "gemm_fp32")
    yield from _products("GEMM fp32, sizes or GPU", model, products.take(~is_fittable(products)))
    later = read_gemm(data, BLACKWELL_FILE)
    held = later.take(later.held_out & engine_rows(later, *EXTENDED))
    yield from _products("GEMM bf16 and fp8, GPU", without_later_devices(model), held)
    attention = AttentionModel.from_state(load_state(PROFILES / "attention"))
    encoders = read_encoder(data)
    yield from _outside("attention without mask, kind", encoders.take(encoders.held_out), attention.predict)
    yield from _outside("attention in training, kind", read_trained(data), attention.predict)
    yield from _left_out("attention forward, GPU", ATTENTION, data)
    yield from _left_out("softmax, GPU", SOFTMAX_TRAINING, data)
    yield from _left_out("element-wise, GPU", STREAMS, data)


def _products(case: str, model: GemmModel, samples: GemmSamples) -> Iterator[Group]:
    """Products as their machine's stopwatch shows them, where it is the kernel that it shows."""
    stopwatch = json.loads(PROFILE.with_suffix(".json").read_text(encoding="utf-8"))["stopwatch_us"]
    shown = compare(model, samples, stopwatch).shown
    floors = np.array([1e-6 * stopwatch.get(str(machine), [0.0])[0] for machine in samples.machine])
    telling = samples.seconds > HOST_BOUND * floors
    yield from _outside(case, samples, model.predict, telling, shown)


def _outside(
    case: str, samples: Samples, predict: Predictor, chosen: BoolArray | None = None, shown: FloatArray | None = None
) -> Iterator[Group]:
    """By device, the rows that the model itself calls outside."""
    for index in np.unique(samples.device).tolist():
        mine = np.flatnonzero((samples.device == index) & (True if chosen is None else chosen))
        estimate = predict(samples.calls.take(mine), samples.devices[index])
        out = ~estimate.in_domain
        if out.any():
            rows = mine[out]
            predicted = estimate.seconds[out] if shown is None else shown[rows]
            yield Group(case, samples.devices[index].key, predicted, samples.seconds[rows], estimate.sigma[out])


def _left_out(case: str, training: FamilyTraining[AnySamples, Fitted], data: Path) -> Iterator[Group]:
    """Every GPU from fits, spreads included, that never saw its chip."""
    samples = training.read(data)
    samples = training.prepare(samples, ~samples.held_out)
    for index, elsewhere in leave_one_chip_out(samples, ~samples.held_out):
        others = samples.take(~samples.same_chip(index))
        fitted = training.fit(samples.take(elsewhere & samples.telling))
        predict = training.predictor(training.calibrate(fitted, others, ~others.held_out))
        mine = samples.take((samples.device == index) & samples.held_out & samples.telling)
        if len(mine):
            shown, sigma = mine.predicted(predict)
            yield Group(case, samples.devices[index].key, shown, mine.seconds, sigma)


def _thinned(group: Group) -> Group:
    """At most `MOST` of its rows, evenly over the table."""
    rows = np.unique(np.linspace(0, len(group.measured) - 1, MOST).astype(np.int64))
    return group._replace(shown=group.shown[rows], measured=group.measured[rows], sigma=group.sigma[rows])


def _together(parts: list[Group]) -> Group:
    columns = (np.concatenate([getattr(part, name) for part in parts]) for name in ("shown", "measured", "sigma"))
    return Group("", "", *columns)


def main(data: Path) -> None:
    """Prints the table, the widening that one half of the groups asks for and what both halves make of it."""
    found = sorted(groups(data), key=lambda group: (group.case, group.device))
    levels = (0.0, BEFORE, OUTSIDE_SIGMA)
    rows = [
        (f"{'set on' if number % 2 == 0 else 'shown'}", group.case, group.device, f"{len(group.measured):,}",
         *(f"{group.share_inside(level):.0%}" for level in levels))
        for number, group in enumerate(found)
    ]  # fmt: skip
    halves = [_together([_thinned(group) for group in found[start::2]]) for start in (0, 1)]
    for half, said in zip(halves, ("set on", "shown"), strict=True):
        shares = (f"{half.share_inside(level):.1%}" for level in levels)
        rows.append((said, "all, 200 rows of each at most", "", f"{len(half.measured):,}", *shares))
    header = ("half", "rows outside by", "GPU", "n", *(f"+{level:g}" for level in levels))
    print(format_table(header, rows, right=(3, 4, 5, 6)))
    wanted = compute_spread_90(halves[0].shown, halves[0].measured, halves[0].sigma)
    print(f"the first half asks for {wanted:.3f}")


if __name__ == "__main__":
    run_on_data(main, __doc__)
