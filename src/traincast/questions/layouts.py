"""A layout of GPUs by the names that the command line and the server have for its parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from traincast.errors import TraincastError
from traincast.training.layout import Layout

SHARDING = {1: "zero1", 2: "zero2", 3: "zero3"}
"""What data-parallel ranks share, by DeepSpeed's number of it (`zero`)."""
_PLAIN = (
    "tp", "pp", "vp", "cp", "ep", "etp", "global_batch", "shard_group", "checkpoint_every", "schedule", "checkpoint",
    "seq_len",
)  # fmt: skip


def layout_from(options: Mapping[str, Any], gpus: int) -> Layout:
    """The layout of `gpus` GPUs that options describe; those that are absent or None are as usual."""
    given = {name: value for name, value in options.items() if value is not None}
    zero = given.get("zero")
    if given.get("fsdp") and zero not in (None, 3):
        raise TraincastError(f"`fsdp` shares all that `zero=3` does; `zero={zero}` says otherwise; give one of them")
    sharded = bool(given.get("fsdp")) or zero == 3
    chosen = {name: given[name] for name in _PLAIN if name in given}
    if "lora_rank" in given:
        chosen["adapter_rank"] = given["lora_rank"]
    if given.get("no_overlap"):
        off = dict.fromkeys(("overlap_gradients", "overlap_parameters", "overlap_ep", "overlap_pp"), False)
        chosen |= {**off, "overlap_tp": "none"}
    usual = "compiled" if given.get("compiled") else "eager" if sharded else "fused"
    return Layout(
        gpus=gpus,
        micro_batch=given.get("micro_batch") or given.get("batch_size") or 1,
        sharding="zero3" if sharded else SHARDING[zero] if zero else "none",
        reshard=not given.get("no_reshard"),
        sequence=not given.get("no_sequence_parallel"),
        precision=given.get("dtype") or "bf16",
        optimizer="none" if given.get("optimizer") == "none" else "adam",
        kernels=given.get("kernels") or usual,
        joined=not sharded,
        **chosen,
    )
