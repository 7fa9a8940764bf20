"""Training steps of NVIDIA's DeepLearningExamples, captured from programs written in their style, against their own
tables."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from traincast.hardware.platform import (
    Platform,
    add_default_links,
    find_device_by_name,
    list_device_names,
    load_device,
    load_platform,
)
from traincast.ir.formula import read_op_costs
from traincast.ir.workload import Workload
from traincast.simulator.scenario.scenario import Scenario
from traincast.utils.errors import TraincastError
from traincast.utils.metrics import ErrorRow
from traincast_evaluation.suites.cases import Case, LeftOut, Outcome, Repeated, summarise_outcomes
from traincast_evaluation.suites.published import Row, read_cases

HELD_BACK = "(held back)"


class _Program(NamedTuple):
    """The example of a model: its name here, the PyTorch of its container, whether the host waits after each step, and
    the milliseconds that the training process itself takes to read a sample."""

    model: str
    framework: str
    synchronised: bool = False
    reading_ms: float = 0.0


_EXAMPLES = {
    "BERT-large": _Program("bert-large", "1.11"),
    "Mask R-CNN R50-FPN": _Program("mask-rcnn", "1.11", reading_ms=3.3),  # as measured, see `zoo.define.examples.coco`
    "Transformer-XL base": _Program("transformer-xl", "1.6"),
    "Transformer-XL large": _Program("transformer-xl-large", "1.6"),
    "NCF": _Program("ncf", "1.8"),
    "SSD300": _Program("ssd300", "1.11", synchronised=True),
}
_NODES = {  # node, device
    "A100-40GB": ("dgx-a100", "a100-40gb"),
    "A100-80GB": ("dgx-a100", "a100-80gb"),
    "H100-80GB": ("dgx-h100", "h100"),
    "V100-16GB": ("dgx1-v100", "v100"),
    "V100-32GB": ("dgx1-v100", "v100-32gb"),
    "V100-32GB (DGX-2H)": ("dgx2-v100", "v100-sxm3"),
}
_PRECISIONS = {"AMP fp16": "amp", "TF32": "fp32", "FP32": "fp32"}
_UPDATE = re.compile(r"optimizer_batch_size=(\d+)")  # of the ConvNets example: smaller batches are added up to it
_MARKS = re.compile(r"[^a-z0-9]+")


def captured_cases(data: Path) -> list[Case | LeftOut]:
    """Every row of the examples' tables."""
    if find_spec("torch") is None:
        raise TraincastError("evaluate captured captures its programs, and torch is missing: pip install '.[capture]'")
    return read_cases(data / "iterations" / "dle_models.csv", _make_case)


def is_held_back(row: Row) -> bool:
    """Whether a row's configuration (model, device, precision) was set aside before any error was looked at."""
    text = "|".join(row[column] for column in ("model", "device", "precision"))
    return hashlib.sha256(text.encode()).digest()[0] % 2 == 1


def _make_case(row: Row) -> Case:
    program = _find_program(row)
    platform = _load_node_with_device(row)
    precision, batch, gpus = row.known("precision", _PRECISIONS), row.count("micro_batch"), row.count("gpus")
    steps = _count_accumulated_steps(row, program.model, batch, gpus)
    request = Scenario(
        workload=_capture_example(program, precision, batch, update=True),
        on=platform,
        dtype="tf32" if row["precision"] == "TF32" else "fp32",
        gpus=gpus,
        loader_ms=batch * program.reading_ms if program.reading_ms else None,
    )
    repeated = None
    if steps > 1:
        alone = program.model == "bert-large"  # only BERT's program leaves exchanges to the last step of an update
        micro = request.replace(
            workload=_capture_example(program, precision, batch, update=False), gpus=1 if alone else gpus
        )
        repeated = Repeated(question=micro, times=steps - 1, per=1 if alone else steps)
    mark = f" {HELD_BACK}" if is_held_back(row) else ""
    return Case(
        name=f"{row.label('model')} {row.label('precision')} {gpus} x {row.label('device')}, batch {batch}{mark}",
        group=row.label("model"),
        question=request,
        measured_ms=row.positive("iteration_ms"),
        repeated=repeated,
    )


def _count_accumulated_steps(row: Row, model: str, batch: int, gpus: int) -> int:
    """Forward and backward passes of one update."""
    if model in ("bert-large", "mask-rcnn", "transformer-xl"):
        return row.count("grad_accum")
    samples = _UPDATE.search(row["notes"])
    return max(1, int(samples[1]) // (batch * gpus)) if samples else 1


def _find_program(row: Row) -> _Program:
    """The example that a row names, however it writes the name."""
    from traincast_evaluation.zoo.define.examples.convnets import list_convnets

    nets = {name: _Program(name, "1.9", synchronised=True) for name in list_convnets()}
    known = {_MARKS.sub("", name.lower()): program for name, program in (_EXAMPLES | nets).items()}
    name = _MARKS.sub("", row["model"].lower())
    return known[name] if name in known else row.known("model", _EXAMPLES | nets)


def _load_node_with_device(row: Row) -> Platform:
    """The DGX that a row's words for its GPU mean, or a GPU as drivers name it with its usual links."""
    if row["device"] not in _NODES and row["device"] in list_device_names():
        return add_default_links(load_platform(find_device_by_name(row["device"]).key))
    node, device = row.known("device", _NODES)
    return load_platform(node).with_device(load_device(device))


@cache
def _capture_example(program: _Program, precision: str, batch: int, *, update: bool) -> Workload:
    from traincast.capturing import capture_step
    from traincast_evaluation.zoo.build.examples import make_example_step
    from traincast_evaluation.zoo.define.examples.detection_ops import DETECTION_COSTS

    workload = capture_step(
        make_example_step(program.model, precision, update=update), batch_size=batch, name=program.model, rebatch=False,
        framework_version=program.framework, synchronised=program.synchronised,
    )  # fmt: skip
    return replace(workload, costs=read_op_costs(DETECTION_COSTS, "the examples"))


def summarise_captured(suite: str, outcomes: Sequence[Outcome], data: Path) -> list[ErrorRow]:
    """All rows, those looked at and those held back, then model by model."""
    kept = [o for o in outcomes if o.case.name.endswith(HELD_BACK)]
    parts = [("all: step", list(outcomes)), ("rows looked at", [o for o in outcomes if o not in kept])]
    parts += [("rows held back", kept)]
    groups = list(dict.fromkeys(o.case.group for o in outcomes))
    parts += [(group, [o for o in outcomes if o.case.group == group]) for group in groups]
    return [summarise_outcomes(suite, label, members) for label, members in parts if members]
