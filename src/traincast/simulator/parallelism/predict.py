"""A step of a Transformer under a layout, predicted on a platform."""

from __future__ import annotations

from functools import lru_cache

from traincast.costs.host.profile import HostProfile, load_host_profile
from traincast.costs.in_step import SHIPPED, InStep
from traincast.hardware.platform import Platform
from traincast.models.transformers.description import Transformer
from traincast.models.transformers.sizes import model_flops
from traincast.simulator.parallelism.layout import Layout, completed
from traincast.simulator.parallelism.memory import peak
from traincast.simulator.parallelism.pieces import Pieces
from traincast.simulator.parallelism.result import TrainingPrediction
from traincast.simulator.parallelism.step import StepModel


def predict_training(
    model: Transformer,
    platform: Platform,
    layout: Layout,
    *,
    host: HostProfile | None = None,
    roofline_only: bool = False,
    constants: InStep = SHIPPED,
) -> TrainingPrediction:
    """Predicts one step; a layout that cannot be is refused."""
    layout = completed(layout, model)
    profile = host or load_host_profile(platform.device.host, platform.device.host_slowness)
    pieces = _pieces(model, platform.key, _Held(platform, profile), roofline_only).with_numbers(constants)
    step = StepModel(model, platform, pieces, constants)
    parts, stages = step.predict(layout)
    memory, needed = peak(layout, stages)
    device = platform.device
    rate = device.peak_flops.get(layout.precision) or device.peak_flops["fp32"]
    limit = device.memory_bytes
    warnings = []
    if needed > limit:
        warnings.append(
            f"the fullest rank needs {needed / 1e9:.1f} GB but {device.key} has {limit / 1e9:.0f} GB: "
            f"{(needed - limit) / 1e9:.1f} GB too much; it would not run as it is"
        )
    if layout.precision not in device.peak_flops:
        warnings.append(f"{device.key} has no {layout.precision} units; products run at the rate of its others")
    if platform.assumed and layout.gpus > 1:
        warnings.append(platform.assumed)
    return TrainingPrediction(
        model=model,
        platform=platform,
        layout=layout,
        host_profile=profile.name,
        parts=parts,
        memory=memory,
        needed=needed,
        flops=_arithmetic(model, layout),
        peak_flops=rate,
        warnings=tuple(warnings),
    )


def _arithmetic(model: Transformer, layout: Layout) -> float:
    """Floating-point operations of a step as MFU counts them: a frozen weight has no gradient (four a weight and token
    instead of six), and below all that is trained there is no backward pass (two)."""
    whole = model_flops(model, layout.global_batch, layout.seq_len, document_len=layout.document_len)
    if layout.adapter_rank:
        return whole * 2 / 3
    return whole * (1 - 2 / 3 * layout.frozen_layers / model.layers)


class _Held:
    """A platform and a host profile as the key of what was priced for them: equal when they are the same."""

    def __init__(self, platform: Platform, host: HostProfile) -> None:
        self.platform, self.host = platform, host

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Held) and self.platform == other.platform and self.host is other.host

    def __hash__(self) -> int:
        return hash(self.host.name)


@lru_cache(maxsize=128)
def _pieces(model: Transformer, key: str, held: _Held, roofline_only: bool) -> Pieces:
    return Pieces(model, held.platform.device, held.host, roofline_only=roofline_only)
