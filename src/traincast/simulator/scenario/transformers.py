"""Transformers by description as workloads of one GPU, written when they are asked for."""

from __future__ import annotations

from pathlib import Path

from traincast.ir.workload import Workload
from traincast.models.transformers.description import Transformer
from traincast.models.transformers.program.step import build_inference_workload
from traincast.models.transformers.reading import load_transformer
from traincast.simulator.parallelism.groups import make_style
from traincast.simulator.parallelism.layout import complete_layout
from traincast.simulator.parallelism.program import build_parallel_workload
from traincast.simulator.scenario.layouts import make_layout
from traincast.simulator.scenario.scenario import Scenario


def load_described_transformer(source: str | Path | Transformer | Workload) -> Transformer:
    """A described Transformer: by name, in a file, or itself."""
    return source if isinstance(source, Transformer) else load_transformer(str(source))


def build_described_step(source: str | Path | Transformer | Workload, scenario: Scenario) -> Workload:
    """One step of a described Transformer (by name, in a file, or itself) as a scenario asks for it."""
    model = load_described_transformer(source)
    alone = scenario.replace(gpus=None, mode=None)
    if scenario.mode == "inference":  # CUDA graphs are made of its ops
        alone = alone.replace(kernels="compiled" if scenario.is_compiled else None, compiled=False, cuda_graph=False)
    layout = complete_layout(make_layout(alone), model)
    if scenario.mode == "inference":
        style = make_style(layout)
        return build_inference_workload(model, batch_size=layout.micro_batch, seq_len=layout.seq_len, style=style)
    return build_parallel_workload(model, layout, (), gpus_per_node=1, micro_batches=layout.accumulation)
