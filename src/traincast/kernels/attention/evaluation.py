"""How well fused attention is predicted: unseen shapes, unseen GPUs."""

from __future__ import annotations

from pathlib import Path

from traincast.kernels.attention.model import AttentionModel
from traincast.kernels.attention.training import TRAINING
from traincast.kernels.evaluation import device_rows, unseen_chip_rows
from traincast.kernels.model import load_state
from traincast.kernels.shipped import PROFILES
from traincast.measurements.metrics import ErrorRow


def evaluate_attention(data: Path) -> list[ErrorRow]:
    """Causal prefill in bfloat16, per device, and every device from the others."""
    samples = TRAINING.read(data)
    held = samples.held_out
    shipped = AttentionModel.from_state(load_state(PROFILES / "attention"))
    unseen = "attention forward: GPU never seen (data sheet only)"
    return [
        *device_rows("attention forward: shapes never seen", samples, held, shipped.predict_served),
        *unseen_chip_rows(unseen, samples, held, lambda others: TRAINING.fit(others).predict_served),
    ]
