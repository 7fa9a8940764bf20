"""The built-in models and published programs: which there are, and loading one as a `Workload`. Needs no torch.

They are written by other distributions, which name them by the entry point `traincast.programs`: `published`, a
function that gives programs by name.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from traincast.ir.editor import remove_phase, rename_dtypes
from traincast.ir.file import load_workload
from traincast.ir.ops import Phase
from traincast.ir.workload import Workload
from traincast.utils.errors import TraincastError, make_unknown_error
from traincast.utils.plugins import PROGRAMS, load_plugin, missing_evaluation


class PublishedProgram(Protocol):
    """One program. Published runs train `global_batch` samples on all GPUs together, in one of `dtypes`; `host` names
    the host profile it runs with ("": the platform's), `note` is what a result must say."""

    name: str
    description: str
    global_batch: int
    dtypes: tuple[str, ...]
    optimizer: str
    host: str
    note: str

    @property
    def parameters(self) -> int:
        """Parameters of the whole model, every row of every table counted."""
        ...

    def dtype_for(self, dtype: str) -> str:
        """The type it runs in when `dtype` is asked for; types that it does not have are rejected."""
        ...

    def step(
        self, *, gpus: int = 1, global_batch: int | None = None, dtype: str = "fp32", gpus_per_node: int = 8
    ) -> Workload:
        """One training step of `global_batch` samples (default: as published) on `gpus` GPUs together."""
        ...


def list_published_programs() -> Mapping[str, PublishedProgram]:
    """Every published program by name; none where no distribution brings them."""
    programs = load_plugin(PROGRAMS, "published")
    found: Mapping[str, PublishedProgram] = {} if programs is None else programs()
    return found


def find_published_program(name: str) -> PublishedProgram:
    """The program of this name; where no distribution brings it, an error that says what to install."""
    programs = list_published_programs()
    if name not in programs:
        raise missing_evaluation(f"the program {name}")
    return programs[name]


DATA = Path(__file__).parent / "data"
INDEX = DATA / "catalog.json"

MODES = ("training", "inference")
_STORED_PRECISION = {"fp32": "fp32", "tf32": "fp32", "amp": "half", "bf16": "half", "fp16": "half"}


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelInfo:
    """A built-in model. `axis` ("attention", "embedding" or "") names what `choices` choose between.

    Defaults come first in `choices` and `optimizers`. `seq_len` is 0 for a model without sequences;
    `ops` counts the ops of one default training step (0: written when asked for).
    """

    name: str
    description: str
    batch_size: int
    seq_len: int
    parameters: int
    ops: int
    axis: str
    choices: tuple[str, ...]
    optimizers: tuple[str, ...]
    files: tuple[str, ...]


def file_name(*, mode: str, choice: str, optimizer: str, precision: str) -> str:
    """Name of a variant's data file: `training-eager-adam-fp32.tc`, `inference-eager-half.tc`."""
    parts = [mode, choice, optimizer, precision] if mode == "training" else [mode, choice, precision]
    return "-".join(parts) + ".tc"


@cache
def list_models() -> tuple[ModelInfo, ...]:
    """Every built-in model, in the order of the documentation."""
    entries: list[dict[str, Any]] = json.loads(INDEX.read_text(encoding="utf-8"))["models"]
    return tuple(
        ModelInfo(**{key: _convert_lists_to_tuples(value) for key, value in entry.items()}) for entry in entries
    )


def _convert_lists_to_tuples(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def load_model(
    name: str,
    *,
    mode: str = "training",
    optimizer: str | None = None,
    precision: str = "fp32",
    attention: str | None = None,
    embedding: str | None = None,
) -> Workload:
    """A built-in model at its default size. `None` takes the model's own default.

    `precision` is fp32, tf32 (the same ops as fp32), amp or bf16 (training under bfloat16 autocast, inference with
    bfloat16 weights) or fp16 (the same with float16). `optimizer` may be "none": the step without its update.
    """
    info = _find_model_info(name)
    _check_choice("mode", mode, MODES)
    stored = _STORED_PRECISION[_check_choice("precision", precision, _STORED_PRECISION)]
    choice = _choose_variant(info, {"attention": attention, "embedding": embedding})
    drop = optimizer == "none"
    chosen = info.optimizers[0] if optimizer is None or drop else optimizer
    if mode == "inference" and optimizer not in (None, "none"):
        raise TraincastError("inference has no optimizer; leave it out")
    if chosen not in info.optimizers:
        raise make_unknown_error(
            "optimizer", chosen, info.optimizers, f"{name} has {', '.join((*info.optimizers, 'none'))}."
        )
    file = file_name(mode=mode, choice=choice, optimizer=chosen, precision=stored)
    if file not in info.files:
        raise TraincastError(
            f"{name} is not there with {info.axis or 'variant'} '{choice}', optimizer '{chosen}' and precision "
            f"'{precision}' together; its default optimizer '{info.optimizers[0]}' is"
        )
    workload = load_workload(DATA / name / file)
    if precision == "fp16":
        workload = rename_dtypes(workload, {"bfloat16": "float16"})
    return remove_phase(workload, Phase.OPTIMIZER) if drop else workload


def _find_model_info(name: str) -> ModelInfo:
    models = {info.name: info for info in list_models()}
    if name not in models:
        from traincast.models.transformers.reading import list_built_in_names

        known = (*models, *list_published_programs(), *list_built_in_names())
        raise make_unknown_error("model", name, known, "`traincast models` lists the built-in models.")
    return models[name]


def _check_choice(kind: str, value: str, known: Iterable[str]) -> str:
    names = tuple(known)
    if value not in names:
        raise make_unknown_error(kind, value, names, f"Choose from {', '.join(names)}.")
    return value


def _choose_variant(info: ModelInfo, asked: dict[str, str | None]) -> str:
    """The variant asked for along the model's own axis; asking along another axis is a mistake."""
    for axis, value in asked.items():
        if value is not None and axis != info.axis:
            raise TraincastError(f"{info.name} has no {axis} variants; leave out {axis} '{value}'")
    value = asked.get(info.axis)
    return info.choices[0] if value is None else _check_choice(info.axis, value, info.choices)
