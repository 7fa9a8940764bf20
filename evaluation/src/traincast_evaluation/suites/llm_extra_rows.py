"""Rows of `llm_training_extra.csv` as requests: programs that no constant was fitted on. What a source leaves out is
assumed by one rule for all of its rows."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

from traincast.hardware.platform import Platform, add_default_links
from traincast.models.transformers.description import Transformer
from traincast.simulator.parallelism.layout import Layout
from traincast.simulator.parallelism.predict import estimate_used_bytes
from traincast.utils.errors import TraincastError
from traincast_evaluation.suites.llm_rows import (
    DOUBT,
    UNMEASURED,
    find_family,
    read_checkpointing,
    read_model,
    read_platform,
)
from traincast_evaluation.suites.published import Row
from traincast_evaluation.suites.training_request import TrainingRequest

_RANK = 16  # of adapters where a source does not say
_UNMODELLED = ("unpacked", "schedule v-")
"""Words of settings that no layout describes: samples of unknown lengths, pipelines that keep half as much."""
_ZERO_BUBBLE = ("zero-bubble", "zbb", "zbv")
"""What sources call schedules that fill their bubbles; others are told from their chunks."""
_MICRO_BATCHES = 8  # of a pipeline's stage in a step, where a source does not say
_USUAL_SEQ = 4096


def make_extra_request(row: Row) -> TrainingRequest:
    """What a row asks."""
    told = f"{row['task']}; {row['notes']}"
    found = next((word.strip() for word in _UNMODELLED if word in told), None)
    if found:
        raise TraincastError(f"'{row.file}', row {row.number}: '{found}' is not modelled")
    # RMSNorm of these frameworks' own classes (or of PyTorch before 2.9), where nothing compiles it
    model, platform = read_model(row), _read_network(row)
    model = replace(model, norm="rms_by_ops") if model.norm == "rms" else model
    gpus, pp = row.count("gpus"), row.count("pp") if row["pp"] else 1
    options: dict[str, Any] = {
        "gpus": gpus, "seq_len": row.count("seq_len") if row["seq_len"] else _USUAL_SEQ,
        "micro_batch": row.count("micro_batch") if row["micro_batch"] else 1,
        "precision": "fp8" if "fp8" in row["precision"].lower() else "bf16",
        "checkpoint": read_checkpointing(row), "joined": False, **_read_framework(row),
    }  # fmt: skip
    options |= {name: row.count(name) for name in ("tp", "pp", "vp", "cp", "ep") if row[name]}
    if model.experts is not None and not row["ep"]:
        options["ep"] = min(gpus // pp, platform.gpus_per_node)
    copies = gpus // (options.get("tp", 1) * pp * options.get("cp", 1))
    options["global_batch"] = (
        row.count("global_batch")
        if row["global_batch"]
        else copies * options["micro_batch"] * (_MICRO_BATCHES * pp if pp > 1 else 1)
    )
    if any(f"schedule {name}" in told for name in _ZERO_BUBBLE):
        options |= {"schedule": "zero-bubble", "vp": 1}
    options |= _read_memory_options(told)
    layout = _recompute_if_needed(model, platform, Layout(**options), stated=bool(row["activation_checkpointing"]))
    doubts = (
        not find_family(row), not row["global_batch"], not row["seq_len"], UNMEASURED * bool(model.pattern),
        "schedule" in told, not row["activation_checkpointing"],
    )  # fmt: skip
    return TrainingRequest(model=model, on=platform, layout=layout, doubt=DOUBT * math.sqrt(sum(doubts)))


def _read_memory_options(told: str) -> dict[str, Any]:
    """What saves memory, and what is trained, in a row's words."""
    options: dict[str, Any] = {"update_in_backward": "optimizer in backward" in told}
    if "lora" in told.lower():
        options["adapter_rank"] = _RANK
    if "QLoRA" in told:
        options["frozen_type"] = "nf4"
    if "8-bit AdamW" in told:
        options["optimizer_state"] = "int8"
    if "offload" in told:
        options["offload"] = ("activations",)
    return options


def read_step_ms(row: Row, layout: Layout) -> float:
    """Milliseconds of a step as measured: in its column, or from the tokens that a GPU takes a second."""
    if row["iteration_ms"]:
        return row.positive("iteration_ms")
    return 1e3 * layout.global_batch * layout.seq_len / (row.positive("tokens_per_s_per_gpu") * layout.gpus)


def _read_framework(row: Row) -> dict[str, Any]:
    """Who launches kernels, and what ranks share: FSDP2 under Transformer Engine's modules where the row names them
    (NeMo Automodel), or PyTorch's own kernels, compiled where it says so."""
    sharded = row.count("gpus") > 1
    common = {"sharding": "zero3" if sharded else "none"}
    if row["set"] == "nemo_automodel":
        once, lora = "EP" in row["software"].replace("TE", ""), {"adapters": "all"} if "LoRA" in row["task"] else {}
        vendor = {"kernels": "fused", "dispatch": "once" if once else "each"} if "TE" in row["software"] else {}
        return {**common, "kernels": "eager", "attention": "flash2", **vendor, **lora}
    if row["set"].startswith("primus"):  # Megatron
        return {"kernels": "fused", "sharding": "zero3" if row["zero_or_fsdp_stage"] == "FSDP" else "zero1"}
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
