"""Published training steps of large Transformers as questions. What a source leaves out is assumed by one rule for all
of its rows (docs/evidence/many-gpus.md lists them); nothing is chosen per row."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from hashlib import sha256
from typing import Any

from traincast.hardware.platform import Platform, add_default_links, load_device, load_platform
from traincast.models.transformers.description import Experts, Transformer
from traincast.models.transformers.reading import list_built_in_names, load_transformer
from traincast.simulator.parallelism.layout import Layout
from traincast.utils.errors import TraincastError
from traincast_evaluation.suites.machines import find_named_device, fit_node
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
    "GH200": ("gh200-alps", "gh200"),
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
    "MI355": ("mi355x-platform", ""),
    "MI300A": ("mi300a-node", ""),
    "MI300": ("mi300x-platform", ""),
}
_FAMILIES = {  # how a model's name begins, letters and digits alone -> the built-in model whose structure it has
    "deepseekv3": "deepseek-v3", "deepseekr1": "deepseek-v3", "deepseekv2lite": "deepseek-v2-lite",
    "deepseekv2": "deepseek-v2", "moonlight": "moonlight-16b", "kimik2": "kimi-k2", "kimi1t": "kimi-k2",
    "gptoss20b": "gpt-oss-20b", "gptoss": "gpt-oss-120b", "glm45air": "glm-4.5-air",
    "glm47flash": "", "glm4": "glm-4.5",
    "minimaxm2": "minimax-m2",
    "llama4e16": "llama4-scout", "llama4e128": "llama4-maverick", "llama4maverick": "llama4-maverick",
    "llama4": "llama4-scout", "llama3": "llama3-8b", "llama234b": "codellama-34b", "llama2": "llama2-7b",
    "mpt": "mpt-1b", "nemotron3nano": "nemotron-3-nano", "nemotronv3nano": "nemotron-3-nano",
    "nemotronnanov3": "nemotron-3-nano", "nemotron3super": "nemotron-3-super", "nemotronv3super": "nemotron-3-super",
    "nemotronsuperv3": "nemotron-3-super", "nemotronh8b": "nemotron-h-8b", "nemotronh47b": "nemotron-h-47b",
    "nemotronh": "nemotron-h-56b", "nemotronnano12b": "nemotron-nano-12b-v2", "nemotronnano": "nemotron-nano-9b-v2",
    "nemotron4": "nemotron4-15b", "nemotron": "nemotron4-15b", "gpt315b": "nemotron4-15b", "gpt3": "gpt3-175b",
    "bloom": "gpt3-175b", "qwen3235b": "qwen3-235b-a22b", "qwen3moe235b": "qwen3-235b-a22b",
    "qwen3vl235b": "qwen3-235b-a22b", "qwen330b": "qwen3-30b-a3b", "qwen3moe30b": "qwen3-30b-a3b",
    "qwen3vl30b": "qwen3-30b-a3b", "qwen3next": "qwen3-next-80b-a3b", "qwen3moe": "qwen3-30b-a3b",
    "qwen314b": "qwen3-14b", "qwen332b": "qwen3-32b", "qwen3": "qwen3-8b", "qwen2": "qwen2.5-7b",
    "mixtral8x22b": "mixtral-8x22b", "mixtral": "mixtral-8x7b", "mistral": "mistral-7b", "t5": "t5-11b",
    "gpt": "gpt3-175b",
}  # fmt: skip
_OF_MANY_SIZES = ("llama2-7b", "llama3-8b", "mpt-1b", "gpt3-175b", "qwen2.5-7b", "qwen3-8b", "nemotron4-15b")
"""Families whose rows must state their dimensions, or a size that is built in."""
_USUAL = "llama3-8b"
"""Whose structure a model has whose name says nothing, where the row states its dimensions."""
_STATED = ("layers", "hidden", "heads")
DOUBT = 0.1
"""Log-sigma that a step has besides for each thing that its row leaves open and no rule of its source fills."""
UNMEASURED = 4
"""How many such things layers count for whose kernels nobody has measured (Mamba): set with both of their steps in
view."""
_DEGREES = ("tp", "pp", "vp", "cp", "ep")
_VTRAIN_ADAPTERS, _VTRAIN_ADAPTER_GBS = 4, 25.0  # per node, and of each: `inter_node_bandwidth_gbps: 800`
_NVIDIA_CHUNKS = 6  # of a stage: what most rows that say it have
_GRAPHED = {"attn": "attention", "moe_router": "router", "mlp": "feed_forward", "mamba": "mamba"}
"""Transformer Engine's names of modules that are CUDA graphs -> ours."""
_VOCAB_PART = 128  # words: Megatron pads vocabularies to a multiple of it on every tensor-parallel rank
_CI_DECODER_LEN = 128  # tokens of a decoder in Megatron's tests of T5
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
    base = load_transformer(find_family(row) or _USUAL)
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
    if changed.get("kv_heads", base.kv_heads) > changed.get("heads", base.heads):
        changed["kv_heads"] = changed.get("heads", base.heads)
    experts = _read_experts(row, base.experts)
    if experts is not None and "tokendrop" in name:  # beyond an even share dropped, and places without a token padded
        experts = replace(experts, capacity=1.0)
    if base.latent is not None:
        changed["kv_heads"] = changed.get("heads", base.heads)
    return replace(base, name=row.label("model"), experts=experts, **changed)


def _read_experts(row: Row, base: Experts | None) -> Experts | None:
    """The experts of a row's family with the numbers that the row states, in columns or in its notes."""
    notes, stated = row["notes"], dict[str, int]()
    for field, column, word in (
        ("count", "moe_experts", "experts"), ("top_k", "moe_topk", "topk"), ("ffn", "moe_ffn", "moe_ffn"),
        ("shared_ffn", "moe_shared_ffn", "shared"),
    ):  # fmt: skip
        told = re.search(rf"\b{word}=(\d+)", notes)
        if row.cells.get(column):
            stated[field] = row.count(column)
        elif told:
            stated[field] = int(told[1])
    if dense := re.search(r"dense layers (\d+)", notes):
        stated["dense_layers"] = int(dense[1])
    if base is not None:
        return replace(base, **stated)
    return Experts(**stated) if {"count", "top_k", "ffn"} <= stated.keys() else None


def find_family(row: Row) -> str:
    """The built-in model whose structure, or whose dimensions too, a row's has; "" where its name says nothing and the
    row states its dimensions."""
    name = re.sub(r"^\w+:|^nvidia ", "", row["model"].lower())
    plain = re.sub("[^a-z0-9]", "", name)
    family = next((built_in for prefix, built_in in _FAMILIES.items() if plain.startswith(prefix)), "")
    stated = all(row[column] for column in _STATED)
    if not family and not stated:
        raise TraincastError(f"'{row.file}', row {row.number}: no description of model '{row.label('model')}'")
    if family in _OF_MANY_SIZES and not stated:
        size = re.search(r"(\d+)b\b", name)
        known = list_built_in_names()
        version = re.search(r"(\d\.\d)", name)
        stems = [family.rpartition("-")[0], f"llama{version[1] if version else 3}"]
        family = next((f"{stem}-{size[1]}b" for stem in stems if size and f"{stem}-{size[1]}b" in known), "")
        if not family:
            raise TraincastError(f"'{row.file}', row {row.number}: no dimensions of model '{row.label('model')}'")
    return family


def read_platform(row: Row) -> Platform:
    """Node and GPU of a row, as many to a node as it says; a device nobody described is rejected by name."""
    name = row["device"]
    node, device = next((known for word, known in _DEVICES.items() if word in name), ("", ""))
    if not (node or (node := find_named_device(name))):
        raise TraincastError(f"'{row.file}', row {row.number}: no sheet of device '{row.label('device')}'")
    platform = add_default_links(load_platform(node))
    platform = replace(platform, device=load_device(device)) if device else platform
    if not row.cells.get("gpus_per_node") or platform.topology is None:
        return platform
    topology = fit_node(platform.topology, row.count("gpus_per_node"))
    return replace(platform, gpus_per_node=topology.gpus_per_node, topology=topology)


def make_request(row: Row) -> TrainingRequest:
    """What a row of `llm_training.csv` asks."""
    model = read_model(row)
    doubts = [not find_family(row), "ambiguous" in row["precision"], UNMEASURED * bool(model.pattern)]
    notes = row["notes"].lower()
    options: dict[str, Any] = {
        "gpus": row.count("gpus"), "seq_len": model.seq_len, "precision": _read_precision(row),
        "checkpoint": read_checkpointing(row), **_read_degrees(row),
    }  # fmt: skip
    options["global_batch"] = row.count("global_batch") if row["global_batch"] else 0
    doubts.append(not row["global_batch"])
    source = {
        "llm_foundry_mpt": _read_foundry_options,
        "torchtitan_torchao": _read_titan_options,
        "simumax_b200": _read_simumax_options,
        "megatron_lm_ci_golden": _read_ci_options,
    }.get(row["set"], _read_nvidia_options)
    options |= source(row, options, notes)
    if row["set"] == "megatron_lm_ci_golden":
        model = _describe_as_megatron(model)
        part = _VOCAB_PART * options.get("tp", 1)
        model = replace(model, vocab=-(-model.vocab // part) * part)
    if row["set"] == "torchtitan_torchao" and row["date"] < _TITAN_FUSES_NORM and model.norm == "rms":
        model = replace(model, norm="rms_by_ops")
    if "lora" in row["model"].lower():
        options["adapter_rank"] = 16
        if "NVIDIA" in row["device"]:  # its submissions set `cp_comm_type` so
            options["cp_exchange"] = "all-to-all"
    if "every 2nd" in row["activation_checkpointing"]:
        options["checkpoint_every"] = 2
    if layers := re.match(r"full, (\d+) layers", row["activation_checkpointing"]):
        options["checkpoint_layers"] = int(layers[1])
    return TrainingRequest(
        model=model, on=read_platform(row), layout=Layout(**options), doubt=DOUBT * math.sqrt(sum(doubts))
    )


def _read_degrees(row: Row) -> dict[str, int]:
    """How the model is laid out: in columns, or in the name of the row's configuration (MLPerf's submitters write it
    there)."""
    told = {name: row.count(name) for name in _DEGREES if row[name]}
    if "tp" in told:
        return told
    named = re.search(r"tp(\d+)_?pp(\d+)_?cp(\d+)", row.cells.get("config_path", ""))
    if not named:
        raise TraincastError(f"'{row.file}', row {row.number}: the source does not say how the model is laid out")
    return {**told, **{name: int(text) for name, text in zip(("tp", "pp", "cp"), named.groups(), strict=True)}}


def _read_foundry_options(row: Row, options: dict[str, Any], notes: str) -> dict[str, Any]:
    """LLM Foundry: FSDP of PyTorch, op by op; Composer's own AdamW, one parameter after the other."""
    pure, older = "PURE" in row["precision"], re.search(r"(torch |pytorch:)(1\.|2\.0)", row.cells.get("software", ""))
    return {
        "checkpoint": "whole" if older and options["checkpoint"] == "full" else options["checkpoint"],
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
        "scaling": _read_scaling(row),
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


def _read_ci_options(row: Row, options: dict[str, Any], notes: str) -> dict[str, Any]:
    """Tests of Megatron-LM, as their `model_config.yaml` and Megatron's defaults say: deterministic, which leaves the
    second flash attention; dropout; every token on every tensor-parallel rank; a loss op by op. What the table calls
    virtual stages are layers of each."""
    pp = options.get("pp", 1)
    chunks = read_model(row).layers // (pp * row.count("vp")) if row["vp"] and pp > 1 else 1
    return {
        "micro_batch": row.count("micro_batch") if row["micro_batch"] else 1, "kernels": "fused", "attention": "flash2",
        "sharding": "zero1" if "ZeRO-1" in row["zero_or_fsdp_stage"] else "none", "sequence": False, "dropout": True,
        "loss": "eager", "overlap_tp": "none", "overlap_gradients": "ZeRO-1" in row["zero_or_fsdp_stage"],
        "vp": max(1, chunks),
    }  # fmt: skip


def _describe_as_megatron(model: Transformer) -> Transformer:
    """A model of Megatron's tests, which takes Megatron's defaults whatever its name."""
    if model.experts is not None or model.gated or model.pattern:
        return model
    plain = replace(model, norm="layer", activation="gelu", position="learned", bias=True, tied=False)
    crossed = model.encoder_layers > 0
    return replace(
        plain, head_dim=model.hidden // model.heads, tied=crossed, decoder_len=_CI_DECODER_LEN if crossed else 0
    )


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
    shards = "fsdp" in f"{row['zero_or_fsdp_stage']} {notes}".lower()
    return {
        "micro_batch": micro, "sharding": "zero3" if shards else "zero1", "reduce_bytes": 2,
        "kernels": "graph" if graph else "fused", "graphed": graphed,
        "overlap_tp": "all", "overlap_ep": "a2a_overlap" in notes or far,
        "dispatch": "once" if "dispatcher=" in notes else "each",
        "scaling": _read_scaling(row), **chunks,
    }  # fmt: skip


def _choose_usual_chunks(row: Row, options: dict[str, Any]) -> int:
    """Chunks of a stage where a source does not say: six, or as many fewer as divide its layers (one if none does, or
    if micro-batches are no multiple of stages)."""
    pp, layers = options.get("pp", 1), read_model(row).layers
    copies = options["gpus"] // (options.get("tp", 1) * pp * options.get("cp", 1))
    micro = options["global_batch"] // max(1, copies * (row.count("micro_batch") if row["micro_batch"] else 1))
    if pp == 1 or micro % pp:
        return 1
    return next(chunks for chunks in range(_NVIDIA_CHUNKS, 0, -1) if layers % (pp * chunks) == 0 or chunks == 1)


def _read_precision(row: Row) -> str:
    text = row["precision"].lower()
    if "fp4" in text and "fp8" not in text:
        return "fp4"
    if not text and row["set"].startswith("mlperf"):
        return "fp8"  # as all rows of that benchmark that name one
    return "fp8" if "fp8" in text or "float8" in text else text if text in ("fp16", "fp32", "tf32") else "bf16"


def _read_scaling(row: Row) -> str:
    """What a scale of 8-bit operands belongs to, as `Layout.scaling` names it."""
    text = row["precision"].lower()
    if "mx" in text:
        return "mx"
    return "row" if "rowwise" in text else "block" if re.search(r"block|sub-?channel|-sc\b", text) else "tensor"


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
