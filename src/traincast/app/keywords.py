"""The fields of `Scenario` as typed keywords of the Python calls; a test holds them to the declaration."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar

if TYPE_CHECKING:
    from traincast.simulator.scenario.scenario import (
        Attention,
        Checkpoint,
        Costs,
        Dtype,
        Embedding,
        Host,
        Kernels,
        Mode,
        Optimizer,
        OptimizerState,
        ProgramName,
        Schedule,
    )


class VariantFields(TypedDict, total=False):
    """Fields that say which step of a model it is, wherever it runs."""

    batch_size: int | None
    seq_len: int | None
    dtype: Dtype | None
    mode: Mode | None
    optimizer: Optimizer | None
    attention: Attention | None
    embedding: Embedding | None
    compiled: bool


class StepFields(VariantFields, total=False):
    """Every field of `Scenario` but the workload, the platform and its number of GPUs."""

    clock_mhz: float | None
    power_limit_w: float | None
    micro_batch: int | None
    global_batch: int | None
    fp8_scaling: Literal["tensor", "row", "block", "mx"] | None
    fp8_gather: bool
    autocast: bool
    optimizer_impl: Literal["fused", "foreach", "loop"] | None
    dropout: bool
    kernels: Kernels | None
    cuda_graph: bool
    program: ProgramName | None
    allocator: str | None
    optimizer_state: OptimizerState | None
    lora_base: Literal["nf4"] | None
    offload: str | None
    loss: Literal["chunked", "fused"] | None
    update_in_backward: bool
    checkpoint: Checkpoint | None
    checkpoint_every: int | None
    checkpoint_layers: int | None
    tp: int | None
    pp: int | None
    vp: int | None
    cp: int | None
    ep: int | None
    etp: int | None
    expert_imbalance: float | None
    fsdp: bool | Literal[1, 2] | None
    zero: Literal[1, 2, 3] | None
    shard_group: int | None
    no_reshard: bool
    no_sequence_parallel: bool
    schedule: Schedule | None
    stage_layers: str | Sequence[int] | None
    cp_exchange: Literal["ring", "gather", "all-to-all"] | None
    dispatch: Literal["each", "once"] | None
    graph_modules: str | Sequence[str] | None
    overlap: str | Sequence[str] | None
    no_overlap: bool
    lora_rank: int | None
    lora_targets: Literal["attention", "all"] | None
    frozen_layers: int | None
    document_len: int | None
    plan: str | Path | None
    dense: str | Path | None
    host: Host | None
    skew_ms: float | None
    jitter: float | None
    seed: int | None
    loader_ms: float | None
    workers: int | None
    pageable: bool
    costs: Costs | None
    roofline_only: bool


class ScenarioFields(StepFields, total=False):
    """Every field of `Scenario` but the workload and the platform; see there for units, ranges and defaults."""

    gpus: int | None


Call = TypeVar("Call", bound=Callable[..., Any])


def spell_out_keywords(call: Call) -> Call:
    """Gives a call that takes fields by `Unpack` a signature with each of them, for `help` and notebooks."""
    signature = inspect.signature(call)
    *plain, packed = signature.parameters.values()
    fields = globals()[str(packed.annotation).removeprefix("Unpack[").removesuffix("]")].__annotations__
    named = [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=getattr(kind, "__forward_arg__", kind)
        )
        for name, kind in fields.items()
    ]
    call.__signature__ = signature.replace(parameters=[*plain, *named])  # type: ignore[attr-defined]
    return call
