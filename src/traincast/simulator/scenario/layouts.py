"""A layout of GPUs by the names that the command line and the server have for its parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from traincast.simulator.parallelism.layout import Layout
from traincast.utils.errors import TraincastError, unknown

SHARDING = {1: "zero1", 2: "zero2", 3: "zero3"}
"""What data-parallel ranks share, by DeepSpeed's number of it (`zero`)."""
OVERLAPS = ("gradients", "parameters", "tp", "experts", "stages")
"""Exchanges that may run beside kernels."""
_FIELDS = {
    name: name
    for name in ("tp", "pp", "vp", "cp", "ep", "etp", "global_batch", "shard_group", "checkpoint_every", "schedule",
                 "checkpoint", "seq_len", "frozen_layers", "document_len", "dispatch")
} | {"lora_rank": "adapter_rank", "fp8_scaling": "scaling", "fp8_gather": "quantised_gather"}  # fmt: skip
"""Fields of a layout by the names of their options."""


def layout_from(options: Mapping[str, Any], gpus: int) -> Layout:
    """The layout of `gpus` GPUs that options describe; those that are absent or None are as usual."""
    given = {name: value for name, value in options.items() if value is not None}
    _check(given)
    sharded = bool(given.get("fsdp")) or given.get("zero") == 3
    chosen = {field: given[name] for name, field in _FIELDS.items() if name in given}
    if "stage_layers" in given:
        chosen["stage_layers"] = _stages(given["stage_layers"])
    return Layout(
        gpus=gpus,
        micro_batch=given.get("micro_batch") or given.get("batch_size") or 1,
        sharding="zero3" if sharded else SHARDING.get(given.get("zero", 0), "none"),
        reshard=not given.get("no_reshard"),
        sequence=not given.get("no_sequence_parallel"),
        precision=given.get("dtype") or "bf16",
        optimizer=given.get("optimizer") or "adam",
        kernels=_launched(given, sharded=sharded),
        joined=not sharded,
        attention="unfused" if given.get("attention") == "eager" else "flash",
        cp_gather=given.get("cp_exchange") == "gather",
        **chosen,
        **_overlaps(given),
    )


def _check(given: Mapping[str, Any]) -> None:
    """Refuses options that contradict each other, or that no layout has."""
    zero, dtype, optimizer = given.get("zero"), given.get("dtype", "bf16"), given.get("optimizer")
    if given.get("fsdp") and zero not in (None, 3):
        raise TraincastError(f"`fsdp` shares all that `zero=3` does; `zero={zero}` says otherwise; give one of them")
    if optimizer not in (None, "none", "adam"):
        raise TraincastError(f"optimizer '{optimizer}' has no layout of GPUs; give adam or none")
    for name in ("fp8_scaling", "fp8_gather"):
        if given.get(name) and dtype != "fp8":
            raise TraincastError(f"`{name}` is for 8-bit arithmetic (dtype fp8), not {dtype}; leave it out")


def _launched(given: Mapping[str, Any], *, sharded: bool) -> str:
    """Who launches kernels."""
    kernels = given.get("kernels")
    for option, kind in (("compiled", "compiled"), ("cuda_graph", "graph")):
        if given.get(option):
            if kernels not in (None, kind):
                raise TraincastError(f"`{option}` and kernels '{kernels}' say different things; give one of them")
            return kind
    return str(kernels or ("eager" if sharded else "fused"))


def _stages(text: Any) -> tuple[int, ...]:
    """Layers of each stage, such as "15,16,16,15"."""
    parts = [part.strip() for part in str(text).split(",")] if isinstance(text, str) else [str(part) for part in text]
    if not all(part.isdecimal() and len(part) < 7 for part in parts):
        raise TraincastError(f"stage layers '{str(text)[:80]}' are no whole numbers; give such as 15,16,16,15")
    return tuple(int(part) for part in parts)


def _overlaps(given: Mapping[str, Any]) -> dict[str, Any]:
    """Which exchanges run beside kernels: the layout's own rules where nothing was said."""
    text, none = given.get("overlap"), bool(given.get("no_overlap"))
    if text is None and not none:
        return {}
    if text is not None and none:
        raise TraincastError("`overlap` and `no_overlap` say different things; give one of them")
    named = [] if none or text == "none" else str(text).split(",")
    for name in named:
        if name not in OVERLAPS:
            raise unknown("exchange", name, OVERLAPS, f"Choose from {', '.join(OVERLAPS)}, or none.")
    return {
        "overlap_gradients": "gradients" in named, "overlap_parameters": "parameters" in named,
        "overlap_tp": "all" if "tp" in named else "none", "overlap_ep": "experts" in named,
        "overlap_pp": "stages" in named,
    }  # fmt: skip
