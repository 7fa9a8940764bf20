"""Transformers by description as workloads of one GPU, written when they are asked for."""

from __future__ import annotations

from pathlib import Path

from traincast.ir.workload import Workload
from traincast.models.transformers.description import Transformer
from traincast.models.transformers.program.step import build_inference_workload
from traincast.models.transformers.reading import load_transformer
from traincast.simulator.parallelism.groups import make_style
from traincast.simulator.parallelism.layout import Layout, complete_layout
from traincast.simulator.parallelism.program import build_parallel_workload
from traincast.simulator.scenario.scenario import Scenario
from traincast.utils.errors import TraincastError

_OPTIMIZERS = (None, "adam", "none")


def load_described_transformer(source: str | Path | Transformer | Workload) -> Transformer:
    """A described Transformer: by name, in a file, or itself."""
    return source if isinstance(source, Transformer) else load_transformer(str(source))


def build_described_step(source: str | Path | Transformer | Workload, scenario: Scenario) -> Workload:
    """One step of a described Transformer (by name, in a file, or itself) as a scenario asks for it."""
    model = load_described_transformer(source)
    if scenario.optimizer not in _OPTIMIZERS:
        raise TraincastError(
            f"{model.name} is written with adam; give `optimizer` adam or none, not {scenario.optimizer}"
        )
    layout = Layout(
        gpus=1,
        micro_batch=scenario.batch_size or 1,
        global_batch=scenario.batch_size or 1,
        seq_len=scenario.seq_len or model.seq_len,
        precision=scenario.dtype or "bf16",
        attention="unfused" if scenario.attention == "eager" else "flash",
        kernels="compiled" if scenario.is_compiled else "eager",
        optimizer=scenario.optimizer or "adam",
    )
    layout = complete_layout(layout, model)
    if scenario.mode == "inference":
        style = make_style(layout)
        return build_inference_workload(model, batch_size=layout.micro_batch, seq_len=layout.seq_len, style=style)
    return build_parallel_workload(model, layout, (), gpus_per_node=1, micro_batches=1)
