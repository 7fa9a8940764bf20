"""Transformers by description: the layout of GPUs that the fields of a scenario describe, and their steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from traincast.ir.workload import Workload
from traincast.models.transformers.description import Transformer
from traincast.models.transformers.program.step import build_inference_workload
from traincast.models.transformers.reading import load_transformer
from traincast.simulator.parallelism.groups import make_style
from traincast.simulator.parallelism.layout import Layout, complete_layout
from traincast.simulator.parallelism.program import build_parallel_workload
from traincast.simulator.scenario.kinds import check_sharing, parse_offload
from traincast.simulator.scenario.scenario import Scenario
from traincast.utils.errors import TraincastError, make_unknown_error

SHARDING = {1: "zero1", 2: "zero2", 3: "zero3"}
"""What data-parallel ranks share, by DeepSpeed's number of it (`zero`)."""
OVERLAPS = ("gradients", "parameters", "tp", "experts", "stages")
"""Communication that may overlap kernels."""
_SAME = ("tp", "pp", "vp", "cp", "ep", "etp", "global_batch", "shard_group", "checkpoint_every", "checkpoint_layers",
         "expert_imbalance", "schedule",
         "optimizer_state", "loss", "checkpoint", "seq_len", "frozen_layers", "document_len", "dispatch")  # fmt: skip
_ADAM = {None: "adam", "fused": "adam", "foreach": "adam-foreach", "loop": "adam-loop"}
_RENAMED = {
    "lora_rank": "adapter_rank",
    "fp8_scaling": "scaling",
    "lora_base": "frozen_type",
    "lora_targets": "adapters",
}
"""What may be kept in host memory."""


def make_layout(scenario: Scenario) -> Layout:
    """The layout that a scenario describes; its `dtype` must be known."""
    _check_layout_fields(scenario)
    fields = {name: name for name in _SAME} | _RENAMED
    chosen: dict[str, Any] = {
        field: value for name, field in fields.items() if (value := getattr(scenario, name)) is not None
    }  # fmt: skip
    if scenario.stage_layers is not None:
        chosen["stage_layers"] = _parse_stage_layers(scenario.stage_layers)
    if scenario.graph_modules is not None:
        chosen["graphed"] = tuple(part.strip() for part in scenario.graph_modules.split(","))
    kernels = scenario.launches
    return Layout(
        gpus=scenario.gpus or 1,
        micro_batch=scenario.micro_batch or scenario.batch_size or 1,
        sharding="zero3" if scenario.fsdp else SHARDING.get(scenario.zero or 0, "none"),
        reshard=not scenario.no_reshard,
        sequence=not scenario.no_sequence_parallel,
        quantised_gather=scenario.fp8_gather,
        offload=parse_offload(scenario.offload),
        update_in_backward=scenario.update_in_backward,
        precision=scenario.dtype or "bf16",
        optimizer=_ADAM[scenario.optimizer_impl] if scenario.optimizer != "none" else "none",
        dropout=scenario.dropout,
        autocast=scenario.autocast,
        kernels=kernels,
        joined=kernels in ("fused", "graph"),
        attention="unfused" if scenario.attention == "eager" else "flash",
        cp_exchange=scenario.cp_exchange or "ring",
        **chosen,
        **_parse_overlaps(scenario),
    )


def list_layout_fields(layout: Layout) -> dict[str, Any]:
    """The fields of a scenario that choose the degrees, sharding, micro-batch and recomputation of a layout."""
    degrees = {name: getattr(layout, name) for name in ("tp", "pp", "vp", "cp", "ep") if getattr(layout, name) > 1}
    shared = {"fsdp": 2} if layout.sharding == "zero3" else {}
    zero = next((number for number, name in SHARDING.items() if name == layout.sharding), None)
    if zero is not None and not shared:
        shared = {"zero": zero}
    again = {"checkpoint": layout.checkpoint} if layout.checkpoint != "none" else {}
    return {**degrees, **shared, **again, "micro_batch": layout.micro_batch, "global_batch": layout.global_batch}


def _check_layout_fields(scenario: Scenario) -> None:
    """Rejects fields that contradict each other, or that no layout has."""
    s = scenario
    check_sharing(s)
    if s.optimizer not in (None, "none", "adam"):
        raise TraincastError(f"`optimizer={s.optimizer}` has no layout of GPUs; give adam or none")
    if s.optimizer == "none" and s.optimizer_impl is not None:
        raise TraincastError(
            "`optimizer_impl` says how Adam runs, and `optimizer=none` leaves it out; give one of them"
        )
    if s.autocast and s.dtype not in ("fp16", "bf16"):
        raise TraincastError(f"`autocast` casts to 16 bits (`dtype` bf16 or fp16), not to {s.dtype}; leave it out")
    for name in ("fp8_scaling", "fp8_gather"):
        if getattr(s, name) and s.dtype != "fp8":
            raise TraincastError(f"`{name}` is for 8-bit arithmetic (`dtype=fp8`), not {s.dtype}; leave it out")


def _parse_stage_layers(text: str) -> tuple[int, ...]:
    """Layers of each stage, such as "15,16,16,15"."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and len(part) < 7 for part in parts):
        raise TraincastError(f"`stage_layers` '{text[:80]}' are no integers; give such as 15,16,16,15")
    return tuple(int(part) for part in parts)


def _parse_overlaps(scenario: Scenario) -> dict[str, Any]:
    """Which communication overlaps kernels: the layout's own rules where nothing was given."""
    text, none = scenario.overlap, scenario.no_overlap
    if text is None and not none:
        return {}
    if text is not None and none:
        raise TraincastError("`overlap` and `no_overlap` contradict each other; give one of them")
    named = [] if none or text == "none" else str(text).split(",")
    for name in named:
        if name not in OVERLAPS:
            raise make_unknown_error("communication", name, OVERLAPS, f"Choose from {', '.join(OVERLAPS)}, or none.")
    return {
        "overlap_gradients": "gradients" in named, "overlap_parameters": "parameters" in named,
        "overlap_tp": "all" if "tp" in named else "none", "overlap_ep": "experts" in named,
        "overlap_pp": "stages" in named,
    }  # fmt: skip


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
