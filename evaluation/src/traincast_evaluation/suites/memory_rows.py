"""Published peak memory of Transformers as layouts. What a source leaves out is assumed by one rule for its rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

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
_ALPACA_TOKENS = 256  # of a usual pair of Alpaca's samples, padded; torchtune's peak is that of the last step
_SEED = "memory 2026-11"


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
            settings=AllocatorSettings(expandable_segments=row["set"] != "simumax_b200"),  # torchtitan's script sets it
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
            layout=Layout(gpus=1, micro_batch=2, global_batch=2, **options),
        )  # fmt: skip


_TORCHTUNE_ORDER = (
    "baseline", "packed dataset", "compile", "chunked cross", "activation checkpointing", "optimizer in backward",
    "activation offloading", "8-bit", "LoRA", "QLoRA",
)  # fmt: skip


def _read_torchtune_options(row: Row) -> dict[str, Any]:
    text = row["notes"].partition("this row: ")[2].partition(";")[0]
    place = max(
        (number for number, word in enumerate(_TORCHTUNE_ORDER) if word in text and (word != "LoRA" or text == word)),
        default=0,
    )
    options: dict[str, Any] = {
        "seq_len": 4096 if place else _ALPACA_TOKENS, "kernels": "compiled" if place >= 2 else "eager",
        "optimizer_state": "bf16", "joined": False,
        "loss": "chunked" if place >= 3 else "eager", "checkpoint": "full" if place >= 4 else "none",
        "update_in_backward": 5 <= place < 8, "offload": ("activations",) if place >= 6 else (),
    }  # fmt: skip
    if place == 7:
        options["optimizer_state"] = "int8"
    if place >= 8:
        options["adapter_rank"] = 16
    if place == 9:
        options["frozen_type"] = "nf4"
    return options
