"""How well convolutions are predicted: unseen shapes, unseen GPUs."""

from __future__ import annotations

from pathlib import Path

from traincast.costs.kernels.contract import load_state
from traincast.costs.kernels.conv.model import ConvModel
from traincast.costs.kernels.families import PROFILES
from traincast.utils.metrics import ErrorRow
from traincast_evaluation.kernels.conv.fit import TRAINING, physics_predictor
from traincast_evaluation.kernels.evaluate import summarise_by_device, summarise_samples, summarise_unseen_chips

_LONG_SECONDS = 1.5e-3  # beyond which the host's delay hardly shows


def evaluate_conv(data: Path) -> list[ErrorRow]:
    """3x3 forward (NeuSight) per device; DeepBench per direction and type; devices left out."""
    samples = TRAINING.read(data)
    samples = TRAINING.prepare(samples, ~samples.held_out)
    shipped = ConvModel.from_state(load_state(PROFILES / "conv")).predict
    held, calls = samples.held_out, samples.calls
    timed = held & samples.event_timed
    suite = "conv 3x3 forward: shapes never seen"
    table = [
        summarise_samples(suite, "all devices", samples.take(timed), shipped),
        summarise_samples(
            suite, "all devices, above 1.5 ms", samples.take(timed & (samples.seconds > _LONG_SECONDS)), shipped
        ),
        *summarise_by_device(suite, samples, timed, shipped),
    ]
    for compute in ("fp32", "fp16"):
        for kind in calls.family.kinds:
            chosen = samples.take(held & ~samples.event_timed & calls.is_kind(kind) & calls.is_compute(compute))
            table.append(summarise_samples("conv DeepBench: shapes never seen", f"{kind} {compute}", chosen, shipped))
    unseen = "conv fp32: GPU never seen (data sheet only)"
    return table + summarise_unseen_chips(unseen, samples, held & calls.is_compute("fp32"), physics_predictor)
