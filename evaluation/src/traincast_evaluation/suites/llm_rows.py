"""Published training steps of large Transformers as questions. What a source leaves out is assumed by one rule for all
of its rows (docs/evidence/many-gpus.md lists them); nothing is chosen per row."""

from __future__ import annotations

import re
from dataclasses import replace
from hashlib import sha256
from typing import Any

from traincast.hardware.platform import Platform, load_device, load_platform
from traincast.models.transformers.description import Experts, Transformer
from traincast.models.transformers.reading import list_built_in_names, load_transformer
from traincast.simulator.parallelism.layout import Layout
from traincast.utils.errors import TraincastError
from traincast_evaluation.suites.published import Row
from traincast_evaluation.suites.training_request import TrainingRequest

_SEED = "llm steps 2026-11"
_KEY = (
    "set", "model", "layers", "hidden", "seq_len", "device", "gpus", "precision", "tp", "pp", "vp", "cp", "ep",
    "micro_batch", "global_batch", "activation_checkpointing", "compile",
)  # fmt: skip
_VTRAIN_KEY = ("tp", "dp", "pp", "global_batch", "micro_batch", "num_layers", "hidden_size", "num_heads", "seq_len")
_DEVICES = {  # a word of the device's name -> node, GPU ("": the node's own)
    "A100-80GB": ("dgx-a100", "a100-80gb"),
    "A100-40GB": ("dgx-a100", ""),
    "A100": ("dgx-a100", "a100-80gb"),
    "H100-96GB": ("dgx-h100", "h100-96gb"),
    "H100-95GB": ("dgx-h100", "h100-96gb"),
    "H100": ("dgx-h100", ""),
    "H200-NVL": ("pcie-h200-nvl", ""),
    "H200": ("hgx-h200", ""),
    "GB200": ("gb200-nvl72", ""),
    "GB300": ("gb300-nvl72", ""),
    "B200": ("hgx-b200", ""),
    "B300": ("hgx-b300", ""),
    "RTX A6000": ("rtx-a6000", ""),
    "MI300X": ("mi300x-platform", ""),
    "MI325X": ("mi325x-platform", ""),
    "MI350X": ("mi350x-platform", ""),
    "MI355X": ("mi355x-platform", ""),
}
_FAMILIES = {  # how a model's name begins, letters and digits alone -> the built-in model whose structure it has
    "deepseekv3": "deepseek-v3", "deepseekv2": "deepseek-v2", "gptoss20b": "gpt-oss-20b", "gptoss": "gpt-oss-120b",
    "kimik2": "kimi-k2", "llama3": "llama3-8b", "llama234b": "codellama-34b", "llama2": "llama2-7b", "mpt": "mpt-1b",
    "gpt3": "gpt3-175b", "gptgpt3": "gpt3-175b", "qwen3235b": "qwen3-235b-a22b", "qwen3moe235b": "qwen3-235b-a22b",
    "qwen330b": "qwen3-30b-a3b", "qwen3moe30b": "qwen3-30b-a3b", "qwen38b": "qwen3-8b", "qwen314b": "qwen3-14b",
    "qwen332b": "qwen3-32b", "qwen25": "qwen2.5-7b", "mixtral8x7b": "mixtral-8x7b", "mixtral8x22b": "mixtral-8x22b",
    "t5": "t5-11b",
}  # fmt: skip
_OF_MANY_SIZES = ("llama2-7b", "llama3-8b", "mpt-1b", "gpt3-175b", "qwen2.5-7b")
"""Families whose rows must state their dimensions, or a size that is built in."""
_VTRAIN_ADAPTERS, _VTRAIN_ADAPTER_GBS = 4, 25.0  # per node, and of each: `inter_node_bandwidth_gbps: 800`
_NVIDIA_CHUNKS = 6  # of a stage: what most rows that say it have
_GRAPHED = {"attn": "attention", "moe_router": "router", "mlp": "feed_forward", "mamba": "mamba"}
"""Transformer Engine's names of modules that are CUDA graphs -> ours."""
_TITAN_CHUNKS = 2  # of an interleaved schedule that does not say how many
_TITAN_COMPILES_LOSS = "2025-02"  # when torchtitan began to, after its commit d1f62be
_TITAN_FUSES_NORM = "2025-10"  # PyTorch 2.9: RMSNorm is one kernel


def is_fitted(row: Row) -> bool:
    """Whether a row is in the half on which shared constants may be fitted, told from its configuration alone."""
    names = _KEY if "set" in row.cells else _VTRAIN_KEY
    text = "|".join(row[name] for name in names)
    return sha256(f"{_SEED}|{text}".encode()).digest()[0] % 2 == 0


def read_model(row: Row) -> Transformer:
    """The Transformer of a row: the structure of its family, its own dimensions where the row names them."""
    name = row["model"].lower()
    base = load_transformer(_find_family(row))
    changed: dict[str, Any] = {
        field: row.count(column)
        for field, column in (
            ("layers", "layers"), ("hidden", "hidden"), ("heads", "heads"), ("kv_heads", "kv_heads"), ("ffn", "ffn"),
            ("vocab", "vocab"), ("seq_len", "seq_len"),
        )
        if row[column]
    }  # fmt: skip
    if "ffn" not in changed and base.ffn == 4 * base.hidden:  # a family whose width follows from another
        changed["ffn"] = 4 * changed.get("hidden", base.hidden)
    if base.latent is None and base.head_dim * base.heads == base.hidden:
        changed["head_dim"] = changed.get("hidden", base.hidden) // changed.get("heads", base.heads)
    if "tokendrop" in name:  # tokens beyond an expert's even share are dropped, and places without one are padded
        changed["experts"] = replace(_require_experts(base), capacity=1.0)
    stated = re.search(r"dense layers (\d+)", row["notes"])
    if stated and base.experts is not None:
        changed["experts"] = replace(changed.get("experts", base.experts), dense_layers=int(stated[1]))
    if base.latent is not None:
        changed["kv_heads"] = changed.get("heads", base.heads)
    return replace(base, name=row.label("model"), **changed)


def _find_family(row: Row) -> str:
    """The built-in model whose structure, or whose dimensions too, a row's has."""
    name = row["model"].lower()
    plain = re.sub("[^a-z0-9]", "", name)
    family = next((built_in for prefix, built_in in _FAMILIES.items() if plain.startswith(prefix)), "")
    if not family:
        raise TraincastError(f"'{row.file}', row {row.number}: no description of model '{row.label('model')}'")
    if family in _OF_MANY_SIZES and not row["layers"]:
        size = re.search(r"(\d+)b\b", name)
        family = f"{family.rpartition('-')[0]}-{size[1]}b" if size else ""
        if family not in list_built_in_names():
            raise TraincastError(f"'{row.file}', row {row.number}: no dimensions of model '{row.label('model')}'")
    return family


def _require_experts(model: Transformer) -> Experts:
    assert model.experts is not None
    return model.experts


def read_platform(row: Row) -> Platform:
    """Node and GPU of a row; a device nobody described is rejected by name."""
    name = row["device"]
    word = next((word for word in _DEVICES if word in name), None)
    if word is None:
        raise TraincastError(f"'{row.file}', row {row.number}: no sheet of device '{row.label('device')}'")
    node, device = _DEVICES[word]
    platform = load_platform(node)
    return replace(platform, device=load_device(device)) if device else platform


def make_request(row: Row) -> TrainingRequest:
    """What a row of `llm_training.csv` asks."""
    model = read_model(row)
    notes = row["notes"].lower()
    options: dict[str, Any] = {
        "gpus": row.count("gpus"), "global_batch": row.count("global_batch"), "seq_len": row.count("seq_len"),
        "precision": _read_precision(row), "checkpoint": read_checkpointing(row),
    }  # fmt: skip
    options |= {name: row.count(name) for name in ("tp", "pp", "vp", "cp", "ep") if row[name]}
    if not row["tp"]:
        raise TraincastError(f"'{row.file}', row {row.number}: the source does not say how the model is laid out")
    source = {
        "llm_foundry_mpt": _read_foundry_options,
        "torchtitan_torchao": _read_titan_options,
        "simumax_b200": _read_simumax_options,
    }.get(row["set"], _read_nvidia_options)
    options |= source(row, options, notes)
    if row["set"] == "torchtitan_torchao" and row["date"] < _TITAN_FUSES_NORM:
        model = replace(model, norm="rms_by_ops")
    if "lora" in row["model"].lower():
        options["adapter_rank"] = 16
    if "every 2nd" in row["activation_checkpointing"]:
        options["checkpoint_every"] = 2
    if layers := re.match(r"full, (\d+) layers", row["activation_checkpointing"]):
        options["checkpoint_layers"] = int(layers[1])
    return TrainingRequest(model=model, on=read_platform(row), layout=Layout(**options))


def _read_foundry_options(row: Row, options: dict[str, Any], notes: str) -> dict[str, Any]:
    """LLM Foundry: FSDP of PyTorch, op by op; Composer's own AdamW, one parameter after the other."""
    pure = "PURE" in row["precision"]
    return {
        "micro_batch": row.count("micro_batch"), "sharding": "zero3", "kernels": "eager", "joined": True,
        "reshard": "FULL_SHARD" in row["zero_or_fsdp_stage"], "reduce_bytes": 2, "gather_bytes": 2 if pure else 4,
        "optimizer": "adam-loop", "attention": "triton",
    }  # fmt: skip


def _read_titan_options(row: Row, options: dict[str, Any], notes: str) -> dict[str, Any]:
    """torchtitan: FSDP2, gradients reduced in fp32; as many micro-batches as stages where the table does not say."""
    pp = options.get("pp", 1)
    local = options["global_batch"] * options.get("tp", 1) * pp * options.get("cp", 1) // options["gpus"]
    asynchronous = "async" in notes and "vanilla" not in notes
    return {
        "micro_batch": row.count("micro_batch") if row["micro_batch"] else max(1, local // pp),
        "sharding": "zero3", "joined": False, "attention": "flash2",
        "kernels": "compiled" if row["compile"] == "yes" else "eager",
        "reshard": pp == 1, "reduce_bytes": 4, "overlap_tp": "all" if asynchronous else "none",
        "scaling": "row" if "rowwise" in row["precision"] else "tensor",
        "wide_gradients": "gw_hp" in row["precision"],
        "quantised_tokens": "tensorwise" in row["precision"],
        "quantised_gather": "fp8 FSDP" in row["precision"] or "fp8 all-gather" in row["precision"],
        "vp": _TITAN_CHUNKS if "interleaved" in notes else 1,
        "loss": "eager" if "" < row["date"] < _TITAN_COMPILES_LOSS else "",
    }  # fmt: skip


def _read_simumax_options(row: Row, options: dict[str, Any], notes: str) -> dict[str, Any]:
    """SimuMax's runs of Megatron-LM: nothing overlaps."""
    return {
        "micro_batch": row.count("micro_batch"), "sharding": "zero1", "kernels": "fused", "overlap_tp": "none",
        "overlap_gradients": False, "overlap_parameters": False, "overlap_pp": False,
    }  # fmt: skip


def _read_nvidia_options(row: Row, options: dict[str, Any], notes: str) -> dict[str, Any]:
    """Megatron as NeMo, Megatron-Bridge and MLPerf run it: distributed optimizer, gradients reduced in 16 bits, every
    exchange alongside kernels; experts' exchanges only where the preset says so."""
    graph = "full_iteration" in notes or row["set"].startswith("mlperf")
    modules = re.search(r"cuda_graph=transformer_engine/\S*?(\[[^]]*\]|\w+)", notes)
    graphed = tuple(ours for theirs, ours in _GRAPHED.items() if modules and theirs in modules[1])
    chunks = {} if row["vp"] else {"vp": _choose_usual_chunks(row, options)}
    # tokens of experts on other nodes travel beside kernels, which takes interleaved stages
    far = options.get("ep", 1) > read_platform(row).gpus_per_node and options.get("vp", 1) > 1
    micro = row.count("micro_batch") if row["micro_batch"] else 1
    return {
        "micro_batch": micro, "sharding": "zero1", "kernels": "graph" if graph else "fused", "graphed": graphed,
        "reduce_bytes": 2,
        "overlap_tp": "all", "overlap_ep": "a2a_overlap" in notes or far,
        "dispatch": "once" if "dispatcher=" in notes else "each",
        "scaling": "mx" if "mx" in row["precision"].lower() else "tensor", **chunks,
    }  # fmt: skip


def _choose_usual_chunks(row: Row, options: dict[str, Any]) -> int:
    """Chunks of a stage where a source does not say: six, or as many fewer as divide its layers (one if none does, or
    if micro-batches are no multiple of stages)."""
    pp, layers = options.get("pp", 1), row.count("layers")
    copies = options["gpus"] // (options.get("tp", 1) * pp * options.get("cp", 1))
    micro = options["global_batch"] // max(1, copies * (row.count("micro_batch") if row["micro_batch"] else 1))
    if pp == 1 or micro % pp:
        return 1
    return next(chunks for chunks in range(_NVIDIA_CHUNKS, 0, -1) if layers % (pp * chunks) == 0 or chunks == 1)


def _read_precision(row: Row) -> str:
    text = row["precision"].lower()
    if text.startswith("ambiguous"):
        raise TraincastError(f"'{row.file}', row {row.number}: the source does not say which arithmetic it ran in")
    if "fp4" in text:
        return "fp4"
    if not text and row["set"].startswith("mlperf"):
        return "fp8"  # as all rows of that benchmark that name one
    return "fp8" if "fp8" in text or "float8" in text else "bf16"


def read_checkpointing(row: Row) -> str:
    """What backward computes again, as `Layout.checkpoint` names it."""
    text = row["activation_checkpointing"].lower()
    if "full" in text or "every 2nd" in text:
        return "full"
    if "(op)" in text:
        return "selective"
    return "light" if "selective" in text else "none"


def make_vtrain_request(row: Row) -> TrainingRequest:
    """What a row of `gpt_megatron_a100.csv` asks: Megatron-DeepSpeed as `gpt_megatron_config.yaml` describes it."""
    hidden, heads, layers = row.count("hidden_size"), row.count("num_heads"), row.count("num_layers")
    base = load_transformer("gpt3-175b")
    model = replace(
        base, name=f"gpt {layers} x {hidden}", layers=layers, hidden=hidden, heads=heads, kv_heads=heads,
        head_dim=hidden // heads, ffn=4 * hidden, vocab=50304, seq_len=row.count("seq_len"),
    )  # fmt: skip
    layout = Layout(
        gpus=row.count("num_gpus"), tp=row.count("tp"), pp=row.count("pp"), sequence=False, precision="fp16",
        micro_batch=row.count("micro_batch"), global_batch=row.count("global_batch"), seq_len=row.count("seq_len"),
        checkpoint="full", kernels="fused", attention="unfused", dropout=True, reduce_bytes=2, overlap_tp="none",
        overlap_gradients=False, overlap_pp=False,
    )  # fmt: skip
    platform = read_platform(row)
    assert platform.topology is not None
    network = replace(platform.topology, adapters=_VTRAIN_ADAPTERS, adapter_bandwidth=1e9 * _VTRAIN_ADAPTER_GBS)
    return TrainingRequest(model=model, on=replace(platform, topology=network), layout=layout)
