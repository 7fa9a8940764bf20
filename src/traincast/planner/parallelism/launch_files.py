"""Layouts as other tools write them: torchtitan, Megatron-LM, Megatron Bridge, DeepSpeed, Accelerate; written and read.

Every format is a table from its keys to the fields of a scenario, used in both directions. Keys that say nothing of a
layout are left alone when a file is read.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from traincast.models.transformers.description import Transformer
from traincast.simulator.parallelism.layout import Layout
from traincast.utils.errors import TraincastError
from traincast.utils.files.reading import (
    format_path,
    parse_json,
    parse_toml,
    parse_yaml,
    read_document,
    read_text,
)

TOOLS = ("torchtitan", "torchtitan-toml", "megatron", "bridge", "deepspeed", "accelerate")
"""Tools whose launch files are written; torchtitan reads TOML to release 0.2.2, and arguments alone after it."""
_MOST_BYTES = 1 << 20
_DEGREES = {"tp": "tensor", "pp": "pipeline", "cp": "context"}


def write_launch_file(tool: str, layout: Layout, model: Transformer) -> str:
    """The configuration that runs a layout of a model with a tool. A layout that the tool cannot run, or that its file
    cannot state, is rejected: what is written is read back as the same layout."""
    text = _WRITERS[tool](layout, model)
    parse: Callable[[str], Any] = _PARSERS.get(tool, _parse_words)
    stated = _list_stated(_flatten(parse(text)))
    meant: dict[str, Any] = {name: getattr(layout, name) for name in _DEGREES_READ}
    meant |= {"checkpoint": layout.checkpoint, "sharding": layout.sharding}
    for name, value in meant.items():
        if stated[name] != value:
            raise TraincastError(f"a file of {tool} cannot state {name} {value}, which {layout.described()} has; "
                                 "choose another tool")  # fmt: skip
    return text


def can_state_layout(tool: str, layout: Layout, model: Transformer) -> bool:
    """Whether `write_launch_file` writes it."""
    with suppress(TraincastError):
        return bool(write_launch_file(tool, layout, model))
    return False


def _list_stated(flat: Mapping[str, Any]) -> dict[str, Any]:
    """What a file states of a layout, with what it means by saying nothing."""
    fields = dict.fromkeys(_DEGREES_READ, 1) | {"checkpoint": "none"} | _read_fields(flat)
    sharded = "zero3" if "fsdp" in fields else f"zero{fields['zero']}" if "zero" in fields else "none"
    return fields | {"sharding": sharded}


def _list_degrees(layout: Layout) -> dict[str, Any]:
    """The table `parallelism` of torchtitan."""
    sharded = layout.sharding == "zero3"
    return {
        "data_parallel_shard_degree": layout.dp if sharded else 1,
        "data_parallel_replicate_degree": 1 if sharded else layout.dp,
        **{f"{name}_parallel_degree": getattr(layout, key) for key, name in _DEGREES.items()},
        "expert_parallel_degree": layout.ep,
        **({"pipeline_parallel_schedule": "Interleaved1F1B" if layout.vp > 1 else "1F1B"} if layout.pp > 1 else {}),
    }


def _write_torchtitan_toml(layout: Layout, model: Transformer) -> str:
    is_piped = layout.pp > 1
    local = layout.micro_batch * (layout.accumulation if is_piped else 1)
    lines = [
        f"# torchtitan to release 0.2.2: {model.name} on {layout.gpus} GPUs; add [job], [model], [optimizer] and data",
        "[training]", f"local_batch_size = {local}", f"global_batch_size = {layout.global_batch}",
        f"seq_len = {layout.seq_len}", 'mixed_precision_param = "bfloat16"', "", "[parallelism]",
        *(f"{name} = {json.dumps(value)}" for name, value in _list_degrees(layout).items()),
        *([f"pipeline_parallel_microbatch_size = {layout.micro_batch}"] if is_piped else []),
        "", "[activation_checkpoint]", f'mode = "{layout.checkpoint}"',
        "", "[compile]", f"enable = {str(layout.kernels == 'compiled').lower()}",
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def _write_torchtitan(layout: Layout, model: Transformer) -> str:
    module, config = _TITAN_CONFIGS.get(model.name, (
        "${MODULE:?torchtitan ships no such model: name the module of yours}", "${CONFIG:?and its configuration}",
    ))  # fmt: skip
    starting = {"nnodes": '"$((GPUS / NGPU))"', "nproc_per_node": '"$NGPU"', "rdzv_backend": "c10d",
                "rdzv_endpoint": '"${MASTER:-localhost}:29500"'}  # fmt: skip
    values = {
        "module": f'"{module}"', "config": f'"{config}"',
        "training.num_tokens_per_microbatch_per_dp_rank": layout.micro_batch * layout.seq_len,
        "training.num_tokens_per_train_step": layout.global_batch * layout.seq_len,
        "training.max_context_length": layout.seq_len, "training.mixed_precision_param": "bfloat16",
        **{f"parallelism.{name}": value for name, value in _list_degrees(layout).items()},
        **({"parallelism.num_pp_microbatches": layout.accumulation} if layout.pp > 1 else {}),
        **({} if layout.kernels == "graph" else {"training.disable_cuda_graphs": True}),
        f"compile.{'enable' if layout.kernels == 'compiled' else 'no_enable'}": True,
    }  # fmt: skip
    words = ["torchrun", *_format_options(starting), "-m torchtitan.train", *_format_options(values)]
    head = (
        "#!/usr/bin/env bash\n# torchtitan after release 0.2.2 (as of August 2026), for its repository on every node:\n"
        f"# {model.name} on {layout.gpus} GPUs; NGPU: those of a node; MASTER: the first node\n"
        f'set -eu\nGPUS={layout.gpus}\nNGPU="${{NGPU:-{min(layout.gpus, 8)}}}"\n'
    )
    return head + " \\\n  ".join([*words, f"activation-checkpoint:{layout.checkpoint}"]) + "\n"


def _format_options(values: Mapping[str, Any]) -> list[str]:
    """Arguments by name as a command line has them; a flag is True."""
    return [f"--{name}" if value is True else f"--{name} {value}" for name, value in values.items()]


_TITAN_CONFIGS = {
    "llama3-8b": ("llama3", "llama3_8b"), "llama3-70b": ("llama3", "llama3_70b"),
    "qwen3-14b": ("qwen3", "qwen3_14b"), "qwen3-32b": ("qwen3", "qwen3_32b"),
    "qwen3-30b-a3b": ("qwen3", "qwen3_30b_a3b"), "deepseek-v3": ("deepseek_v3", "deepseek_v3_671b"),
    "gpt-oss-20b": ("gpt_oss", "gpt_oss_20b"), "gpt-oss-120b": ("gpt_oss", "gpt_oss_120b"),
}  # fmt: skip
"""Modules and configurations that torchtitan ships for our models; its llama3_405b computes in FP8."""


def _list_megatron(layout: Layout, model: Transformer) -> dict[str, Any]:
    """Arguments of Megatron by name; a flag is True."""
    sharded = layout.sharding != "none"
    again: dict[str, dict[str, Any]] = {
        "none": {},
        "selective": {"recompute_granularity": "selective"},
        "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    }
    return {
        "tensor_model_parallel_size": layout.tp, "pipeline_model_parallel_size": layout.pp,
        **({"num_virtual_stages_per_pipeline_rank": layout.vp} if layout.vp > 1 else {}),
        **({"expert_tensor_parallel_size": layout.etp} if layout.ep > 1 or layout.etp > 1 else {}),
        "context_parallel_size": layout.cp, "expert_model_parallel_size": layout.ep,
        "micro_batch_size": layout.micro_batch, "global_batch_size": layout.global_batch,
        "seq_length": layout.seq_len, "bf16": True,
        **({"sequence_parallel": True} if layout.tp > 1 and layout.sequence else {}),
        **({"use_torch_fsdp2": True} if layout.sharding == "zero3" else {}),
        **({"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
           if sharded and layout.sharding != "zero3" else {}),
        **again.get(layout.checkpoint, {}),
    }  # fmt: skip


def _write_megatron(layout: Layout, model: Transformer) -> str:
    sizes = {
        "num_layers": model.layers, "hidden_size": model.hidden, "ffn_hidden_size": model.ffn,
        "num_attention_heads": model.heads, "max_position_embeddings": layout.seq_len,
        **({"group_query_attention": True, "num_query_groups": model.kv_heads} if model.kv_heads < model.heads else {}),
    }  # fmt: skip
    values = {name.replace("_", "-"): value for name, value in {**sizes, **_list_megatron(layout, model)}.items()}
    words = _format_options(values)
    return f"# Megatron-LM arguments: {model.name} on {layout.gpus} GPUs; add data, tokenizer and optimizer\n" + (
        " \\\n".join(words) + "\n"
    )


_BRIDGE = {"micro_batch_size": "train", "global_batch_size": "train", "seq_length": "model",
           "use_distributed_optimizer": "ddp", "overlap_grad_reduce": "ddp", "overlap_param_gather": "ddp",
           "use_torch_fsdp2": "ddp"}  # fmt: skip


def _write_bridge(layout: Layout, model: Transformer) -> str:
    values = _list_megatron(layout, model)
    if layout.vp > 1:
        values["virtual_pipeline_model_parallel_size"] = values.pop("num_virtual_stages_per_pipeline_rank")
    lines = [f"{_BRIDGE.get(name, 'model')}.{name}={value}" for name, value in values.items() if name != "bf16"]
    head = f"# Megatron Bridge overrides of a recipe: {model.name} on {layout.gpus} GPUs"
    return "\n".join([head, *lines, "mixed_precision=bf16_mixed"]) + "\n"


def _check_only_data_parallel(tool: str, layout: Layout) -> None:
    other = [name for name in ("tp", "pp", "cp", "ep") if getattr(layout, name) > 1]
    if other:
        raise TraincastError(
            f"{tool} has no {other[0]} in its file, and {layout.described()} does; choose another tool"
        )


def _write_deepspeed(layout: Layout, _: Transformer) -> str:
    _check_only_data_parallel("deepspeed", layout)
    stage = {"none": 0, "zero1": 1, "zero2": 2, "zero3": 3}[layout.sharding]
    document = {
        "train_batch_size": layout.global_batch, "train_micro_batch_size_per_gpu": layout.micro_batch,
        "gradient_accumulation_steps": layout.accumulation, "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage, "overlap_comm": layout.overlap_gradients},
        **({"activation_checkpointing": {"partition_activations": False}} if layout.checkpoint == "full" else {}),
    }  # fmt: skip
    return json.dumps(document, indent=2) + "\n"


def _write_accelerate(layout: Layout, model: Transformer) -> str:
    _check_only_data_parallel("accelerate", layout)
    document: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE", "num_processes": layout.gpus, "mixed_precision": "bf16",
        "distributed_type": "MULTI_GPU",
    }  # fmt: skip
    if layout.sharding == "zero3":
        document |= {"distributed_type": "FSDP", "fsdp_config": {
            "fsdp_version": 2, "fsdp_reshard_after_forward": layout.reshard,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_activation_checkpointing": layout.checkpoint == "full",
        }}  # fmt: skip
    elif layout.sharding != "none":
        document |= {"distributed_type": "DEEPSPEED", "deepspeed_config": {
            "zero_stage": int(layout.sharding[-1]), "gradient_accumulation_steps": layout.accumulation,
        }}  # fmt: skip
    batch = (f"per_device_train_batch_size {layout.micro_batch}, gradient_accumulation_steps {layout.accumulation}, "
             f"{layout.seq_len} tokens")  # fmt: skip
    head = f"# accelerate: {model.name} on {layout.gpus} GPUs; the batch is your script's: {batch}\n"
    return head + yaml.safe_dump(document, sort_keys=False)


_WRITERS: Mapping[str, Callable[[Layout, Transformer], str]] = {
    "torchtitan": _write_torchtitan, "torchtitan-toml": _write_torchtitan_toml, "megatron": _write_megatron,
    "bridge": _write_bridge, "deepspeed": _write_deepspeed, "accelerate": _write_accelerate,
}  # fmt: skip
_NAMED = {
    "tensor_model_parallel_size": "tp", "pipeline_model_parallel_size": "pp", "context_parallel_size": "cp",
    "expert_model_parallel_size": "ep", "micro_batch_size": "micro_batch", "global_batch_size": "global_batch",
    "seq_length": "seq_len", "train_batch_size": "global_batch", "train_micro_batch_size_per_gpu": "micro_batch",
    "per_device_train_batch_size": "micro_batch", "num_processes": "gpus", "max_seq_length": "seq_len",
    "tensor_parallel_degree": "tp", "pipeline_parallel_degree": "pp",
    "context_parallel_degree": "cp", "expert_parallel_degree": "ep", "local_batch_size": "micro_batch",
    "pipeline_parallel_microbatch_size": "micro_batch", "seq_len": "seq_len",
    "num_virtual_stages_per_pipeline_rank": "vp", "virtual_pipeline_model_parallel_size": "vp",
    "expert_tensor_parallel_size": "etp",
}  # fmt: skip
"""Keys of all tools to fields of a scenario; later ones of a file win."""
_TOML, _YAML = re.compile(r"\[[\w.]+\]\s*$"), re.compile(r"\w+:(\s|$)")
_DEGREES_READ = ("tp", "pp", "vp", "cp", "ep", "etp")
_PARSERS: Mapping[str, Callable[[str], Any]] = {
    "torchtitan-toml": lambda text: parse_toml(text, "the file"), "deepspeed": json.loads, "accelerate": yaml.safe_load,
}  # fmt: skip


def read_launch_file(path: Path) -> dict[str, Any]:
    """The fields of a scenario that a launch file states; a file of no known tool is rejected."""
    fields = _read_fields(_flatten(_read_plain(path)))
    if not set(fields) & set(_NAMED.values()):
        raise TraincastError(
            f"'{format_path(path)}' states no batch and no parallelism; give a file of {', '.join(TOOLS)}"
        )
    return {name: value for name, value in fields.items() if name not in _DEGREES_READ or value != 1}


def _read_fields(flat: Mapping[str, Any]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for key, field in _NAMED.items():
        value = flat.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            fields[field] = value
    return fields | _read_tokens(flat) | _read_choices(flat, fields.get("pp", 1))


def _read_tokens(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Batch and sequence of a torchtitan that counts in tokens; those of a step may be left to it."""
    length, micro = flat.get("max_context_length"), flat.get("num_tokens_per_microbatch_per_dp_rank")
    step = flat.get("num_tokens_per_train_step", -1)
    if micro is None and step == -1:
        return {}
    counts = [micro, *([] if step in (-1, "-1") else [step])]
    if not isinstance(length, int) or any(not isinstance(n, int) or n < 1 or n % length for n in counts):
        raise TraincastError(
            "tokens of a microbatch and of a step must be multiples of training.max_context_length; give all three"
        )
    if len(counts) == 1 and flat.get("num_pp_microbatches", 1) != 1:
        raise TraincastError("with parallelism.num_pp_microbatches give training.num_tokens_per_train_step too")
    return {"seq_len": length} | dict(zip(("micro_batch", "global_batch"), (n // length for n in counts), strict=False))


def _read_choices(flat: Mapping[str, Any], stages: int) -> dict[str, Any]:
    """Sharding, recomputation, arithmetic, and chunks of pipeline stages."""
    fields: dict[str, Any] = {}
    stage = flat.get("zero_optimization.stage", flat.get("deepspeed_config.zero_stage"))
    degree = flat.get("data_parallel_shard_degree")
    each, layers = flat.get("num_layers_per_virtual_pipeline_stage"), flat.get("num_layers")
    if stages > 1 and str(flat.get("pipeline_parallel_schedule", "")).startswith("Interleaved"):
        fields["vp"] = 2  # torchtitan's number of stages per rank
    elif isinstance(each, int) and isinstance(layers, int) and each > 0:
        fields["vp"] = max(1, layers // (stages * each))
    is_sharded = flat.get("use_torch_fsdp2") or flat.get("distributed_type") == "FSDP" or flat.get("fsdp")
    if is_sharded or (isinstance(degree, int) and degree != 1):
        fields["fsdp"] = 2
    elif stage in (1, 2, 3) or flat.get("use_distributed_optimizer"):
        fields["zero"] = stage if stage in (1, 2, 3) else 1
    mode = flat.get("recompute_granularity") or flat.get(
        "activation_checkpoint.mode", flat.get("activation-checkpoint")
    )
    if mode in ("selective", "full"):
        fields["checkpoint"] = mode
    elif any(map(flat.get, ("gradient_checkpointing", "fsdp_activation_checkpointing"))) or (
        "activation_checkpointing.partition_activations" in flat
    ):
        fields["checkpoint"] = "full"
    if flat.get("fp16") is True or flat.get("fp16.enabled") is True:
        fields["dtype"] = "fp16"
    if flat.get("torch_compile") or flat.get("compile.enable") is True:
        fields["compiled"] = True
    return fields


def _read_plain(path: Path) -> Any:
    """TOML, JSON and YAML as they are; arguments and overrides as a table. A name that ends otherwise says nothing:
    then it is how the text begins."""
    if path.suffix in (".json", ".yaml", ".yml"):
        return read_document(path)
    text = read_text(str(path), most=_MOST_BYTES)
    first = next((line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")), "")
    if path.suffix == ".toml" or _TOML.match(first):
        return parse_toml(text, f"'{format_path(path)}'")
    if first.lstrip().startswith("{"):
        return parse_json(text, format_path(path))
    if _YAML.match(first):
        return parse_yaml(text, format_path(path))
    try:
        return _parse_words(text)
    except ValueError as error:
        raise TraincastError(f"'{format_path(path)}': {error}; give a file of {', '.join(TOOLS)}") from None


def _parse_words(text: str) -> dict[str, Any]:
    """Arguments and overrides (`section.name=value`) of a command line as a table."""
    words = shlex.split(text.replace("\\\n", " "), comments=True)
    found: dict[str, Any] = {}
    for at, word in enumerate(words):
        if word.startswith("--"):
            name, _, value = word[2:].replace("-", "_").partition("=")
            if "=" not in word:
                value = words[at + 1] if at + 1 < len(words) and not words[at + 1].startswith("--") else "true"
            found[name] = found[name.rpartition(".")[2]] = _parse_value(value)
        elif word.startswith("activation-checkpoint:"):
            found["activation-checkpoint"] = word.partition(":")[2]
        elif "=" in word:
            key, _, value = word.partition("=")
            found[key.rpartition(".")[2]] = _parse_value(value)
    return found


def _parse_value(text: str) -> Any:
    if text.isascii() and text.isdecimal() and len(text) < 12:
        return int(text)
    return {"true": True, "false": False}.get(text.lower(), text)


def _flatten(document: Any, most: int = 10_000) -> dict[str, Any]:
    """The plain values of nested tables by their keys, and by those of their table and theirs (`compile.enable`)."""
    flat: dict[str, Any] = {}
    waiting: list[tuple[str, Any]] = [("", document)]
    while waiting and len(flat) < most:
        name, table = waiting.pop()
        if isinstance(table, Mapping):
            for key, value in table.items():
                waiting += [(str(key), value)] if isinstance(value, Mapping) else []
                flat |= {} if isinstance(value, Mapping) else {str(key): value, f"{name}.{key}": value}
    return flat
