"""Published peak memory of Transformers as layouts. What a source leaves out is assumed by one rule for its rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from traincast.hardware.catalog import load_device
from traincast.hardware.platform import Platform, load_platform
from traincast.models.transformers.description import Transformer
from traincast.models.transformers.reading import load_transformer
from traincast.simulator.memory.allocator import AllocatorSettings
from traincast.simulator.parallelism.layout import Layout
from traincast_evaluation.suites.cases import LeftOut
from traincast_evaluation.suites.llm_presets import fill_from_presets
from traincast_evaluation.suites.llm_rows import make_request
from traincast_evaluation.suites.published import Row, read_rows

_GIB = float(1 << 30)
_SEED = "memory 2026-11"
_A10G_BYTES = 22.5 * _GIB  # what an A10G of AWS gives to a process
_LITGPT_LORA_RANK = 32


@dataclass(frozen=True, kw_only=True)
class MemoryCase:
    """A measured peak: bytes of a `kind` ("allocated", "reserved"), None where the run was out of memory."""

    name: str
    source: str
    kind: str
    measured: float | None
    model: Transformer
    platform: Platform
    layout: Layout
    settings: AllocatorSettings = field(default_factory=AllocatorSettings)

    @property
    def held_back(self) -> bool:
        """Whether the row was not looked at while rules were chosen, told from its configuration alone."""
        return sha256(f"{_SEED}|{self.source}|{self.name}".encode()).digest()[0] % 3 == 0


def list_transformer_cases(data: Path) -> list[MemoryCase | LeftOut]:
    """The rows of Transformers of all tables."""
    folder = data / "iterations"
    return [
        *_list_training_cases(folder / "llm_training.csv"),
        *_list_torchtune_cases(folder / "llm_training_extra.csv"),
        *_list_litgpt_cases(folder / "litgpt_memory_a10g.csv"),
    ]


def _list_training_cases(path: Path) -> Iterator[MemoryCase | LeftOut]:
    rows = read_rows(path)
    for row in fill_from_presets(rows).values():
        if not row["memory_gb"]:
            continue
        degrees = " ".join(f"{name}{row[name]}" for name in ("tp", "pp", "cp", "ep") if row[name] not in ("", "1"))
        name = (
            f"{row.label('model')} {row['seq_len']} {row.label('precision')[:24]} {row['gpus']} x "
            f"{row.label('device')[:10]} {degrees} {row['micro_batch']} of {row['global_batch']} {row['compile']}"
        )
        if row["set"] == "megatron_lm_ci_golden":
            yield LeftOut(name=name, group=row["set"], reason="the unit of its memory is not stated")
            continue
        request = make_request(row)
        yield MemoryCase(
            name=name, source="SimuMax" if row["set"] == "simumax_b200" else "torchtitan",
            kind="allocated" if row["set"] == "simumax_b200" else "reserved", measured=row.positive("memory_gb") * _GIB,
            model=request.transformer(), platform=request.platform(), layout=request.layout,
        )  # fmt: skip


def _list_torchtune_cases(path: Path) -> Iterator[MemoryCase | LeftOut]:
    """torchtune's list of what saves memory, each row with all that the rows before it switched on."""
    base = replace(
        load_transformer("llama3-8b"), name="Llama 3.2 3B", layers=28, hidden=3072, heads=24, kv_heads=8, head_dim=128,
        ffn=8192, tied=True,
    )  # fmt: skip
    for row in read_rows(path):
        if row["set"] != "torchtune" or not row["memory_as_printed"]:
            continue
        name = f"{row.label('model')} {row['device'][:12]} {row['task'][:20]} {row.label('notes')[:90]}"
        if "this row:" not in row["notes"]:
            yield LeftOut(name=name, group="torchtune", reason="the options of its recipe are not listed")
            continue
        options = _read_torchtune_options(row)
        yield MemoryCase(
            name=row["notes"].partition("this row: ")[2].partition(";")[0], source="torchtune", kind="allocated",
            measured=float(row["memory_as_printed"].split()[0]) * _GIB, model=base,
            platform=load_platform("a100-80gb"),
            layout=Layout(gpus=1, micro_batch=2, global_batch=2, seq_len=4096, **options),
        )  # fmt: skip


_TORCHTUNE_ORDER = (
    "baseline", "packed", "compile", "chunked cross", "activation checkpointing", "optimizer in backward",
    "activation offloading", "8-bit", "LoRA", "QLoRA",
)  # fmt: skip


def _read_torchtune_options(row: Row) -> dict[str, Any]:
    text = row["notes"].partition("this row: ")[2].partition(";")[0]
    place = max(
        (number for number, word in enumerate(_TORCHTUNE_ORDER) if word in text and (word != "LoRA" or text == word)),
        default=0,
    )
    options: dict[str, Any] = {
        "kernels": "compiled" if place >= 2 else "eager", "optimizer_state": "bf16", "joined": False,
        "loss": "chunked" if place >= 3 else "", "checkpoint": "full" if place >= 4 else "none",
        "update_in_backward": 5 <= place < 8, "offload": ("activations",) if place >= 6 else (),
    }  # fmt: skip
    if place == 7:
        options["optimizer_state"] = "int8"
    if place >= 8:
        options["adapter_rank"] = 16
    if place == 9:
        options["frozen_type"] = "nf4"
    return options


def _describe_litgpt_models() -> dict[str, Transformer]:
    llama, gpt = load_transformer("llama3-8b"), load_transformer("gpt3-175b")
    gpt = replace(gpt, position="rotary", tied=False)
    small = replace(llama, heads=32, kv_heads=32)
    return {
        "tiny-llama": replace(llama, layers=22, hidden=2048, kv_heads=4, head_dim=64, ffn=5632, vocab=32000),
        "phi-2": replace(gpt, layers=32, hidden=2560, heads=32, kv_heads=32, head_dim=80, ffn=10240, vocab=51200),
        "Phi-3-mini-4k-instruct": replace(small, layers=32, hidden=3072, head_dim=96, ffn=8192, vocab=32064),
        "gemma-2b": replace(
            llama, layers=18, hidden=2048, heads=8, kv_heads=1, head_dim=256, ffn=16384, vocab=256000, tied=True
        ),
        "gemma-7b": replace(
            llama, layers=28, hidden=3072, heads=16, kv_heads=16, head_dim=256, ffn=24576, vocab=256000, tied=True
        ),
        "gemma-2-9b": replace(
            llama, layers=42, hidden=3584, heads=16, kv_heads=8, head_dim=256, ffn=14336, vocab=256000, tied=True
        ),
        "llama-2-7b": load_transformer("llama2-7b"),
        "llama-3-8b": llama,
        "llama-3.1-8b": llama,
        "llama-3.2-1b": replace(llama, layers=16, hidden=2048, head_dim=64, ffn=8192, tied=True),
        "llama-3.2-3b": replace(llama, layers=28, hidden=3072, heads=24, head_dim=128, ffn=8192, tied=True),
        "mistral-7b": load_transformer("mistral-7b"),
        "mistral-7b-v0.2": load_transformer("mistral-7b"),
        "stablelm-base-alpha-3b": replace(
            gpt, layers=16, hidden=4096, heads=32, kv_heads=32, head_dim=128, ffn=16384, vocab=50688
        ),
    }  # fmt: skip


def _list_litgpt_cases(path: Path) -> Iterator[MemoryCase | LeftOut]:
    """LitGPT on A10G: bf16 throughout, losses in chunks; on four GPUs FSDP with every layer computed again."""
    models = _describe_litgpt_models()
    platform = load_platform("a10")
    device = replace(load_device("a10"), memory_bytes=_A10G_BYTES)
    platform = replace(platform, device=device)
    for row in read_rows(path):
        kind = Path(row["config"]).stem
        name = f"{row.label('model')} {kind} {row['micro_batch']} on {row['machine']}"
        if row["model"] not in models:
            yield LeftOut(name=name, group="litgpt", reason=f"no description of model '{row.label('model')}'")
            continue
        # adapters were trained on one GPU whatever the machine: their rows have the same memory on both
        gpus = int(row["machine"][0]) if kind == "full" else 1
        options: dict[str, Any] = {
            "gpus": gpus, "micro_batch": row.count("micro_batch"), "seq_len": row.count("max_seq_len"),
            "kernels": "eager", "joined": True, "optimizer_state": "bf16", "loss": "chunked",
            "sharding": "zero3" if gpus > 1 else "none", "checkpoint": "full" if gpus > 1 else "none",
            "reduce_bytes": 2,
        }  # fmt: skip
        if kind in ("lora", "qlora"):
            options["adapter_rank"] = _LITGPT_LORA_RANK
        if kind == "qlora":
            options["frozen_type"] = "nf4"
        out = row["out_of_memory"].lower() == "true"
        if not out and not row["memory_gb"]:
            yield LeftOut(name=name, group="litgpt", reason="no memory in the table")
            continue
        yield MemoryCase(
            name=name, source="litgpt", kind="allocated", measured=None if out else row.positive("memory_gb") * 1e9,
            model=replace(models[row["model"]], name=row["model"]), platform=platform, layout=Layout(**options),
        )  # fmt: skip
