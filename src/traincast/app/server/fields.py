"""What can be asked: every field of a question with its kind and limits. Queries are checked by it; the form of the
live page and the description of the API are written from it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from typing import Any

from traincast.app.server.refusals import Refusal
from traincast.costs.host.profile import profile_names
from traincast.hardware.catalog import platform_keys
from traincast.models.catalog import list_models
from traincast.models.published import published_programs
from traincast.models.transformers.reading import built_in_names
from traincast.planner.what_if.edits.registry import parse_edits
from traincast.simulator.parallelism.layout import CHECKPOINTS, LAUNCHES, MAX_GPUS, SCHEDULES
from traincast.simulator.prediction.scaling import SCALINGS
from traincast.simulator.scenario.layouts import SHARDING
from traincast.simulator.scenario.programs import PROGRAMS
from traincast.simulator.scenario.variant import ATTENTIONS, DTYPES, EMBEDDINGS, MODES, OPTIMIZERS
from traincast.utils.errors import TraincastError, shown

KINDS = ("prediction", "plan", "sharding", "advice")
UPLOAD = "upload:"
"""How a field names a file that was uploaded: this and its id."""
MOST_CHARACTERS = 200  # of a value; the longest honest one is a list of GPUs
_MOST = 10**9
_MOST_POINTS = 16  # of a scaling curve


@dataclass(frozen=True, kw_only=True)
class Field:
    """A field: `kind` is "choice", "whole", "wholes" (several with commas between), "number", "flag", "edits", or
    "source" (a name or an upload); `low` and `high` are limits of numbers, `group` where the form has it."""

    name: str
    label: str
    kind: str
    group: str
    help: str = ""
    choices: tuple[str, ...] = ()
    low: float = 1
    high: float = _MOST

    def parsed(self, text: str) -> Any:
        """The value that a text stands for; what it cannot stand for is refused by the field's name."""
        if len(text) > MOST_CHARACTERS or not text.isprintable():
            raise self.refusal(f"{shown(text)}: give at most {MOST_CHARACTERS} printable characters")
        if self.kind == "choice":
            return self._chosen(text)
        if self.kind == "flag":
            return self._flag(text)
        if self.kind == "wholes":
            return [self._whole(part.strip()) for part in self._parts(text)]
        if self.kind == "whole":
            return self._whole(text)
        if self.kind == "edits":
            return [self._edit(part.strip()) for part in self._parts(text)]
        return self._number(text) if self.kind == "number" else text

    def refusal(self, message: str) -> Refusal:
        """A refusal that names this field."""
        return Refusal(422, f"{self.name}: {message}", self.name)

    def _chosen(self, text: str) -> str:
        if text in self.choices:
            return text
        near = get_close_matches(text, self.choices, n=3, cutoff=0.4)
        hint = f"did you mean {', '.join(near)}?" if near else f"give one of {', '.join(self.choices[:12])}"
        raise self.refusal(f"{shown(text)} is unknown; {hint}")

    def _flag(self, text: str) -> bool:
        if text not in ("0", "1", "true", "false"):
            raise self.refusal(f"{shown(text)}: give 1 or 0")
        return text in ("1", "true")

    def _parts(self, text: str) -> list[str]:
        parts = text.split(",")
        if len(parts) > _MOST_POINTS:
            raise self.refusal(f"{len(parts)} numbers; give at most {_MOST_POINTS}")
        return parts

    def _edit(self, text: str) -> str:
        """An edit that names nothing on this machine: places and hosts are built in, plans are searched for."""
        try:
            parse_edits([text])
        except TraincastError as error:
            raise self.refusal(str(error)) from None
        name, _, value = text.partition("=")
        allowed = {"on": platform_keys(), "host": profile_names(), "plan": ("search",)}.get(name)
        if allowed is not None and value not in allowed:
            raise self.refusal(f"{shown(text)}: give one of {', '.join(allowed[:12])}")
        return text

    def _whole(self, text: str) -> int:
        if not (text.isascii() and text.isdecimal() and len(text) <= 12):
            raise self.refusal(f"{shown(text)}: give a whole number")
        return int(self._within(int(text)))

    def _number(self, text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise self.refusal(f"{shown(text)}: give a number") from None
        if not math.isfinite(value):
            raise self.refusal(f"{shown(text)}: give a finite number")
        return self._within(value)

    def _within(self, value: float) -> float:
        if not self.low <= value <= self.high:
            raise self.refusal(f"{value:,.12g} is out of range; give {self.low:,.12g} to {self.high:,.12g}")
        return value

    def schema(self) -> dict[str, Any]:
        """The field as JSON Schema has it."""
        if self.kind == "choice":
            return {"type": "string", "enum": list(self.choices)}
        if self.kind == "flag":
            return {"type": "string", "enum": ["0", "1"]}
        if self.kind in ("whole", "number"):
            kind = "integer" if self.kind == "whole" else "number"
            return {"type": kind, "minimum": self.low, "maximum": self.high}
        if self.kind == "wholes":
            return {"type": "string", "pattern": r"^[0-9]{1,7}(,[0-9]{1,7}){0,15}$"}
        return {"type": "string", "minLength": 1, "maxLength": MOST_CHARACTERS}


@cache
def model_names() -> tuple[str, ...]:
    """Every built-in model, published program and described Transformer."""
    return tuple(
        dict.fromkeys([*(info.name for info in list_models()), *published_programs(), *built_in_names()])
    )  # fmt: skip


@cache
def fields() -> dict[str, Field]:
    """All fields by name, in the order of the form."""
    listed = [*_main_fields(), *_variant_fields(), *_layout_fields()]
    return {field.name: field for field in listed}


def _main_fields() -> Iterable[Field]:
    yield Field(name="of", label="Question", kind="choice", group="main", choices=KINDS,
                help="a prediction, a search for layouts or for places of embedding tables, advice")  # fmt: skip
    yield Field(name="workload", label="Model", kind="source", group="main",
                help="a built-in model, or an uploaded workload, description or trace")  # fmt: skip
    yield Field(name="on", label="Platform", kind="choice", group="main", choices=tuple(platform_keys()))
    yield Field(name="gpus", label="GPUs", kind="wholes", group="main", high=MAX_GPUS,
                help="several with commas between give a scaling curve")  # fmt: skip
    yield Field(name="batch_size", label="Batch size", kind="whole", group="main", help="samples per GPU")
    yield Field(name="dtype", label="Type", kind="choice", group="main", choices=(*DTYPES, "fp8"))
    yield Field(name="edits", label="What if", kind="edits", group="main",
                help="edits with commas between: batch-size=4096,cuda-graph")  # fmt: skip
    yield Field(name="price", label="Price", kind="number", group="main", low=0, high=1e6 - 1,
                help="dollars of one GPU for an hour")  # fmt: skip


def _variant_fields() -> Iterable[Field]:
    yield Field(name="seq_len", label="Tokens per sample", kind="whole", group="step", help="Transformers")
    yield Field(name="mode", label="Mode", kind="choice", group="step", choices=MODES)
    yield Field(name="optimizer", label="Optimizer", kind="choice", group="step", choices=OPTIMIZERS)
    yield Field(name="attention", label="Attention", kind="choice", group="step", choices=ATTENTIONS)
    yield Field(name="embedding", label="Embedding op", kind="choice", group="step", choices=EMBEDDINGS)
    yield Field(name="program", label="Program", kind="choice", group="step", choices=PROGRAMS,
                help="what trains a DLRM on several GPUs")  # fmt: skip
    yield Field(name="scaling", label="Scaling", kind="choice", group="step", choices=SCALINGS)
    yield Field(
        name="compiled", label="Compiled", kind="flag", group="step", help="as torch.compile(model) would run it"
    )
    yield Field(name="cuda_graph", label="CUDA graph", kind="flag", group="step")
    yield Field(name="loader_ms", label="Loader, ms a batch", kind="number", group="step", low=0, high=1e6)
    yield Field(name="workers", label="Loader workers", kind="whole", group="step", low=0, high=4096)
    yield Field(name="clock_mhz", label="SM clock, MHz", kind="number", group="step", low=1, high=1e5)
    yield Field(name="host", label="Host profile", kind="choice", group="step", choices=tuple(profile_names()))
    yield Field(name="against", label="Against trace", kind="source", group="step",
                help="an uploaded trace to compare an uploaded trace with")  # fmt: skip


LAYOUT_COUNTS = {
    "tp": "Tensor parallel", "pp": "Pipeline stages", "vp": "Chunks a stage", "cp": "Context parallel",
    "ep": "Expert parallel", "etp": "Expert tensor parallel", "micro_batch": "Micro-batch",
    "global_batch": "Global batch", "shard_group": "Shard group", "lora_rank": "LoRA rank",
}  # fmt: skip


def _layout_fields() -> Iterable[Field]:
    for name, label in LAYOUT_COUNTS.items():
        yield Field(name=name, label=label, kind="whole", group="layout")
    yield Field(name="fsdp", label="FSDP", kind="whole", group="layout", high=2, help="1 or 2")
    yield Field(name="zero", label="ZeRO", kind="whole", group="layout", high=max(SHARDING), help="1, 2 or 3")
    yield Field(name="schedule", label="Schedule", kind="choice", group="layout", choices=SCHEDULES)
    yield Field(name="checkpoint", label="Recompute", kind="choice", group="layout", choices=CHECKPOINTS)
    yield Field(name="kernels", label="Launches", kind="choice", group="layout", choices=LAUNCHES)
    yield Field(name="no_overlap", label="No overlap", kind="flag", group="layout")
