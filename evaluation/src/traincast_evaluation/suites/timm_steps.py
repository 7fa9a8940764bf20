"""Steps of timm's image models in mixed precision, on GPUs that no part of the model was fitted on: training on RTX
3090, forward passes of its convolution nets on RTX 4090."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from traincast.hardware.platform import find_device_by_name
from traincast.simulator.scenario.scenario import Scenario
from traincast.utils.errors import TraincastError
from traincast.utils.metrics import ErrorRow
from traincast_evaluation.measured_tables import read_medians
from traincast_evaluation.suites.cases import Case, LeftOut, Outcome, summarise_outcomes
from traincast_evaluation.zoo.build.timm_models import TimmStep

_FILE = "iterations/timm_train_rtx3090.parquet"
_TRAINED_BY = re.compile(r"^(tf|gluon|legacy|ssl|swsl|ig|ese|eca)_")
_INFERENCE_FILE = "iterations/timm_infer_rtx.parquet"
_TRAINED_ON = "NVIDIA GeForce RTX 3090"
_TEXTS = ("model", "memory_format", "torch_version", "device", "precision")
_NUMBERS = ("img_size", "batch")
_LAYOUTS = {"channels_last": True, "contiguous": False}
_HOST = "server-2022"
_RELEASES = ("1.10", "1.11", "1.12", "2.4.0", "2.9.1")


def list_timm_cases(data: Path) -> list[Case | LeftOut]:
    """Every configuration of the table, repeats merged to their median. Models are in the order of a hash of their
    names, so that the first ones stand for all."""
    return _list_cases(data, _FILE, training=True)


def list_timm_inference_cases(data: Path) -> list[Case | LeftOut]:
    """The same of forward passes that were not compiled."""
    return _list_cases(data, _INFERENCE_FILE, training=False)


def _list_cases(data: Path, file: str, *, training: bool) -> list[Case | LeftOut]:
    among = {"memory_format": tuple(_LAYOUTS), "precision": ("amp_fp16",)}
    texts = _TEXTS if training else (*_TEXTS, "compiled")
    without = None if training else {"device": _TRAINED_ON}
    table = read_medians(data, file, texts, _NUMBERS, "iteration_ms", among=among, without=without)
    if not training:
        table = table.take(~table.text("compiled").astype(np.bool_))
    rows = zip(*(table.text(name) for name in _TEXTS), *(table.number(name) for name in _NUMBERS), strict=True)
    measured = table.number("iteration_ms").tolist()
    ordered = sorted(zip(rows, measured, strict=True), key=lambda pair: (_hash_name(pair[0][0]), pair[0]))
    return [_make_case(row, milliseconds, training=training) for row, milliseconds in ordered]


def _make_case(row: tuple[Any, ...], milliseconds: float, *, training: bool) -> Case:
    model, image, batch, layout, version, device = (row[i] for i in (0, 5, 6, 1, 2, 3))
    step = TimmStep(str(model), int(batch), int(image), _LAYOUTS[layout], training)
    return Case(
        name=f"{model} {image:.0f} px, batch {batch:.0f}, {layout}, PyTorch {version}",
        group=find_family(str(model)),
        question=partial(_make_scenario, step, ".".join(str(version).split(".")[:2]), str(device)),
        measured_ms=milliseconds,
    )


def _make_scenario(step: TimmStep, version: str, device: str) -> Scenario:
    workload = step.load(version)
    if not step.training and any("softmax" in s.name for p in workload.programs for s in p.signatures):
        raise TraincastError("later releases of timm, which ran then, compute attention otherwise")
    return Scenario(workload=workload, on=find_device_by_name(device).key, host=_HOST)


def find_family(model: str) -> str:
    """The family of a model: the letters that its name begins with, without who trained it."""
    letters = re.match("[a-z]+", _TRAINED_BY.sub("", model))
    return letters[0] if letters else model


def is_held_back(family: str) -> bool:
    """Whether a family was set aside before any error was looked at."""
    return _hash_name(family)[0] % 2 == 1


def _hash_name(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()


def summarise_timm(suite: str, outcomes: Sequence[Outcome], data: Path) -> list[ErrorRow]:
    """All rows, families looked at and held back, then layouts and releases of PyTorch among those held back."""
    kept = [o for o in outcomes if is_held_back(o.case.group)]
    parts = [("all: step", list(outcomes)), ("families held back", kept)]
    parts += [("families looked at", [o for o in outcomes if not is_held_back(o.case.group)])]
    for word in ("contiguous", "channels_last", *(f"PyTorch {one}" for one in _RELEASES)):
        parts.append((f"held back, {word}", [o for o in kept if word in o.case.name]))
    return [summarise_outcomes(suite, label, members) for label, members in parts if members]
