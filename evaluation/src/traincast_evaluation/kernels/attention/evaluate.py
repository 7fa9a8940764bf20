"""How well fused attention is predicted: unseen shapes, unseen GPUs."""

from __future__ import annotations

from pathlib import Path

from traincast.costs.kernels.attention.model import AttentionModel
from traincast.costs.kernels.contract import load_state
from traincast.costs.kernels.families import PROFILES
from traincast.utils.metrics import ErrorRow
from traincast_evaluation.kernels.attention.fit import TRAINING, predict_as_served
from traincast_evaluation.kernels.attention.measurements import read_encoder, read_pointwise, read_trained
from traincast_evaluation.kernels.evaluate import summarise_by_device, summarise_samples, summarise_unseen_chips

_LONG_SECONDS = 1e-4  # below, launches and tails decide, and frameworks differ


def evaluate_attention(data: Path) -> list[ErrorRow]:
    """In bfloat16: causal prefill per device, and every device from the others; training runs on B200; no mask."""
    samples = TRAINING.read(data)
    held = samples.held_out
    shipped = AttentionModel.from_state(load_state(PROFILES / "attention"))
    unseen = "attention forward: GPU never seen (data sheet only)"
    return [
        *summarise_by_device("attention forward: shapes never seen", samples, held, predict_as_served(shipped)),
        *summarise_unseen_chips(unseen, samples, held, lambda others: TRAINING.predictor(TRAINING.fit(others))),
        *_in_training(data, shipped),
        *_without_mask(data, shipped),
    ]


def _in_training(data: Path, shipped: AttentionModel) -> list[ErrorRow]:
    """B200 in training runs: forward was never fitted to them, backward to four fifths of the shapes. HSTU on H100:
    backward fitted to the rows of 4 heads."""
    samples = read_trained(data)
    backward = samples.calls.is_kind("backward")
    suite = "attention in training runs"
    parts = {
        "b200 forward, never fitted": ~backward,
        "b200 backward, shapes fitted": backward & ~samples.held_out,
        "b200 backward, shapes never seen": backward & samples.held_out,
    }
    rows = [summarise_samples(suite, group, samples.take(part), shipped.predict) for group, part in parts.items()]
    pointwise = read_pointwise(data)
    backward = pointwise.calls.is_kind("backward")
    parts = {
        "h100 (HSTU) forward, never fitted": ~backward,
        "h100 (HSTU) backward, 4 heads, fitted": backward & ~pointwise.held_out,
        "h100 (HSTU) backward, 8 heads, never seen": backward & pointwise.held_out,
    }
    rows += [summarise_samples(suite, group, pointwise.take(part), shipped.predict) for group, part in parts.items()]
    return rows


def _without_mask(data: Path, shipped: AttentionModel) -> list[ErrorRow]:
    """Encoders, from what causal rows taught: nothing was fitted to them."""
    samples = read_encoder(data)
    long = samples.held_out & (samples.seconds > _LONG_SECONDS)
    return [
        *summarise_by_device("attention forward, no mask, never fitted", samples, samples.held_out, shipped.predict),
        *summarise_by_device("attention forward, no mask, above 100 us", samples, long, shipped.predict),
    ]
