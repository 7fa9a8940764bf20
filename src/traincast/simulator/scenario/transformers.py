"""Transformers by description as workloads of one GPU, written when they are asked for."""

from __future__ import annotations

from pathlib import Path

from traincast.ir.workload import Workload
from traincast.models.transformers.description import Transformer
from traincast.models.transformers.program.step import transformer_workload
from traincast.models.transformers.program.style import Style
from traincast.models.transformers.reading import load_transformer
from traincast.simulator.scenario.scenario import Scenario
from traincast.utils.errors import TraincastError

_OPTIMIZERS = (None, "adam", "none")


def described_transformer(source: str | Path | Transformer | Workload) -> Transformer:
    """A described Transformer: by name, in a file, or itself."""
    return source if isinstance(source, Transformer) else load_transformer(str(source))


def described_step(source: str | Path | Transformer | Workload, scenario: Scenario) -> Workload:
    """One step of a described Transformer (by name, in a file, or itself) as a scenario asks for it."""
    model = described_transformer(source)
    if scenario.optimizer not in _OPTIMIZERS:
        raise TraincastError(
            f"{model.name} is written with adam; give `optimizer` adam or none, not {scenario.optimizer}"
        )
    style = Style(
        precision=scenario.dtype or "bf16",
        attention="unfused" if scenario.attention == "eager" else "flash",
        fused=scenario.is_compiled,
        together=scenario.is_compiled,
        joined=False,
    )
    return transformer_workload(
        model, batch_size=scenario.batch_size or 1, seq_len=scenario.seq_len or model.seq_len, style=style,
        optimizer=scenario.optimizer or "adam", training=scenario.mode != "inference",
    )  # fmt: skip
