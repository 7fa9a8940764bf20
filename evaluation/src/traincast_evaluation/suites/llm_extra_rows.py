"""Rows of `llm_training_extra.csv` as requests: programs that no constant was fitted on. What a source leaves out is
assumed by one rule for all of its rows."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from traincast.hardware.platform import Platform, add_default_links
from traincast.models.transformers.description import Transformer
from traincast.simulator.parallelism.layout import Layout
from traincast.simulator.parallelism.predict import estimate_used_bytes
from traincast.utils.errors import TraincastError
from traincast_evaluation.suites.llm_rows import read_checkpointing, read_model, read_platform
from traincast_evaluation.suites.published import Row
from traincast_evaluation.suites.training_request import TrainingRequest

_RANK = 16  # of adapters where a source does not say
_UNMODELLED = ("offload", "QLoRA", "8-bit AdamW", "unpacked", "schedule ")
"""Words of settings that no layout describes."""


def make_extra_request(row: Row) -> TrainingRequest:
    """What a row asks."""
    told = f"{row['task']}; {row['notes']}"
    found = next((word.strip() for word in _UNMODELLED if word in told), None)
    if found:
        raise TraincastError(f"'{row.file}', row {row.number}: '{found}' is not modelled")
    if not row["seq_len"] or not row["global_batch"]:
        raise TraincastError(f"'{row.file}', row {row.number}: the source does not say how large its batch is")
    # RMSNorm of these frameworks' own classes (or of PyTorch before 2.9), where nothing compiles it
    model, platform = replace(read_model(row), norm="rms_by_ops"), _read_network(row)
    options: dict[str, Any] = {
        "gpus": row.count("gpus"), "global_batch": row.count("global_batch"), "seq_len": row.count("seq_len"),
        "micro_batch": row.count("micro_batch"), "precision": "fp8" if "fp8" in row["precision"].lower() else "bf16",
        "checkpoint": read_checkpointing(row), "joined": False, **_read_framework(row),
    }  # fmt: skip
    options |= {name: row.count(name) for name in ("tp", "pp", "vp", "cp", "ep") if row[name]}
    options["update_in_backward"] = "optimizer in backward" in told
    if "lora" in row["task"].lower():
        options["adapter_rank"] = _RANK
    layout = _recompute_if_needed(model, platform, Layout(**options), stated=bool(row["activation_checkpointing"]))
    return TrainingRequest(model=model, on=platform, layout=layout)


def _read_framework(row: Row) -> dict[str, Any]:
    """Who launches kernels, and what ranks share: FSDP2 under Transformer Engine's modules where the row names them
    (NeMo Automodel), or PyTorch's own kernels, compiled where it says so."""
    sharded = row.count("gpus") > 1
    common = {"sharding": "zero3" if sharded else "none"}
    if row["set"] == "nemo_automodel" and "TE" in row["software"]:
        once = "DeepEP" in row["software"]
        return {**common, "kernels": "fused", "dispatch": "once" if once else "each"}
    kernels = "compiled" if row["compile"] == "yes" else "eager"
    group = row.count("gpus_per_node") if row["zero_or_fsdp_stage"] == "HSDP" else 0
    # fms-fsdp's "selective" is the share of layers that are recomputed whole, all unless told
    again = {"checkpoint": "full"} if row["set"] == "fms_fsdp" and row["activation_checkpointing"] != "none" else {}
    return {**common, "kernels": kernels, "attention": "flash2", "shard_group": group, **again}


def _read_network(row: Row) -> Platform:
    """The platform of a row, with the network that it states."""
    platform = add_default_links(read_platform(row))
    told = re.match(r"(\d+) Gb/s a node", row["interconnect"])
    if not told or platform.topology is None:
        return platform
    each = 1e9 * int(told[1]) / 8 / platform.topology.adapters
    return replace(platform, topology=replace(platform.topology, adapter_bandwidth=each))


def _recompute_if_needed(model: Transformer, platform: Platform, layout: Layout, *, stated: bool) -> Layout:
    """Full recomputation where a source does not say what it recomputes and the step would not fit without."""
    if stated or estimate_used_bytes(model, platform, layout) <= platform.device.memory_bytes:
        return layout
    return replace(layout, checkpoint="full")
