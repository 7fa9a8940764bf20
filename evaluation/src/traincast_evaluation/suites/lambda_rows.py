"""Lambda's training benchmark: NVIDIA's examples on 27 GPUs with named hosts, one to sixteen at a time."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from traincast.costs.host.profile import find_cpu
from traincast.hardware.platform import Platform, add_default_links, find_device_by_name, load_platform
from traincast.ir.workload import Workload
from traincast.simulator.scenario.resolved import Resolved, resolve
from traincast.simulator.scenario.scenario import Scenario
from traincast.utils.errors import TraincastError
from traincast.utils.metrics import ErrorRow
from traincast_evaluation.suites.cases import Case, LeftOut, Outcome, summarise_outcomes
from traincast_evaluation.suites.machines import load_node_of_size
from traincast_evaluation.suites.published import Row, read_cases

FILE = "lambda_training.csv"
HELD_BACK = "(board held back)"
_HELD_BACK_BOARDS = frozenset((
    "NVIDIA RTX A5000", "Quadro RTX 8000", "NVIDIA A100 80GB PCIe", "NVIDIA GeForce RTX 3090", "Quadro RTX 6000",
    "GeForce GTX 1080 Ti", "NVIDIA H100 PCIe", "NVIDIA RTX A4000", "NVIDIA A100-PCIE-40GB",
))  # fmt: skip
"""A third of the boards, the first by the hash of their names, set aside before any error was looked at."""
_MODELS = {  # samples that the program is captured with, whether the host waits for every step, ms to read a sample
    "transformerxlbase": (16, False, 0.0), "transformerxllarge": (16, False, 0.0),
    "bert_base_squad": (16, False, 0.02), "bert_large_squad": (16, False, 0.02),  # five tensors indexed in the process
    "resnet50": (16, True, 0.0), "SSD": (16, True, 0.0), "ncf": (1 << 16, False, 0.0),
}  # fmt: skip
_APART = ("transformerxlbase", "transformerxllarge")  # run without `--multi_gpu`: processes exchange nothing
_REDUCED_LAST = ("bert_base_squad", "bert_large_squad")
"""Programs whose gradients are reduced after backward: steps on boards that are not held back get longer by the whole
all-reduce, over NVLink and PCIe alike."""
_WHOLE_MB = 1e5  # a bucket that holds all gradients
_PRECISIONS = {"amp_fp16": "amp", "apex_O2_fp16": "amp", "tf32": "fp32", "fp32": "fp32"}
_NODES = {  # of GPUs that are joined by more than PCIe; bridges only where a row says so
    "a100-40gb": "dgx-a100", "a100-80gb": "dgx-a100", "h100": "dgx-h100", "v100": "dgx1-v100", "v100-32gb": "dgx1-v100",
    "a100-40gb-pcie": "pcie-a100", "a100-80gb-pcie": "pcie-a100", "h100-pcie": "pcie-h100-pairs",
}  # fmt: skip
_BRIDGED = "NVLink bridge"  # between two cards
_UNUSABLE = "C:"  # how the quality of rows begins that hold an epoch of one to five iterations
_VERSION = re.compile(r"(\d+)\.(\d+)")


def lambda_cases(data: Path) -> list[Case | LeftOut]:
    """Every row of Lambda's table."""
    if find_spec("torch") is None:
        raise TraincastError("evaluate lambda captures its programs, and torch is missing: pip install '.[capture]'")
    return read_cases(data / "iterations" / FILE, _make_case)


def _make_case(row: Row) -> Case:
    model, gpus, batch = row["model"], round(row.positive("num_gpus")), round(row.positive("batch_per_gpu"))
    samples, waits, reading_ms = row.known("model", _MODELS)
    mark = f" {HELD_BACK}" if row["device"] in _HELD_BACK_BOARDS else ""
    kind = f"{model} {row.label('precision_label')} {gpus} x {row.label('device')}"
    name = f"{kind}, batch {batch}, {row.label('host_cpu')}"
    if row["quality"].startswith(_UNUSABLE):
        raise TraincastError(f"{name}: its epoch has one to five iterations, set-up included")
    scenario = Scenario(
        workload=_capture_program(model, _choose_precision(row), samples, _read_version(row), synchronised=waits),
        on=_load_board(row, gpus),
        batch_size=batch,
        gpus=1 if model in _APART else gpus,
        dtype="tf32" if row["precision"] == "tf32" else "fp32",
        loader_ms=batch * reading_ms or None,
        host=row["host_cpu"] if find_cpu(row["host_cpu"]) else None,  # a virtual machine may not say
    )
    return Case(
        name=name + mark,
        group=model,
        question=_reduce_last(scenario) if gpus > 1 and model in _REDUCED_LAST else scenario,
        measured_ms=row.positive("iteration_ms"),
        tags={"board": row["device"], "host": row["host_cpu"], "gpus": str(gpus), "quality": row["quality"][:1]},
    )


def _reduce_last(scenario: Scenario) -> Callable[[], Resolved]:
    return lambda: replace(resolve(scenario), bucket_mb=_WHOLE_MB)


def _choose_precision(row: Row) -> str:
    """ResNet-50's "FP16" are half weights, not autocast."""
    precision = row.known("precision", _PRECISIONS)
    return (
        "half" if (row["model"], row["precision_label"]) == ("resnet50", "FP16") and precision == "amp" else precision
    )


def _read_version(row: Row) -> str:
    found = _VERSION.match(row["torch_version"])
    if found is None:
        raise TraincastError(f"'{row.file}', row {row.number}: '{row.label('torch_version')}' is no version of PyTorch")
    return f"{found[1]}.{found[2]}"


def _load_board(row: Row, gpus: int) -> Platform:
    """The row's GPU alone, or in the node that it is sold in."""
    device = find_device_by_name(row["device"])
    if gpus == 1 or row["model"] in _APART:
        return Platform(key=device.key, device=device)
    if device.key in _NODES:
        return load_node_of_size(_NODES[device.key], device.key, max(gpus, 8))
    platform = add_default_links(load_platform(device.key))
    assert platform.topology is not None
    per_node = max(gpus, platform.gpus_per_node)
    topology = replace(platform.topology, gpus_per_node=per_node)
    if row["nvlink_note"] == _BRIDGED:
        topology = replace(topology, island=2, link_bandwidth=device.nvlink_bandwidth / 2)
    return replace(platform, topology=topology, gpus_per_node=per_node)


@cache
def _capture_program(model: str, precision: str, samples: int, version: str, *, synchronised: bool) -> Workload:
    return replace(_capture_any_version(model, precision, samples, synchronised), framework_version=version)


@cache
def _capture_any_version(model: str, precision: str, samples: int, synchronised: bool) -> Workload:
    from traincast.capturing import capture_step
    from traincast_evaluation.zoo.build.kept_captures import load_kept_capture
    from traincast_evaluation.zoo.build.lambda_steps import make_lambda_step

    name, make_step = f"{model}-{precision}", make_lambda_step(model, precision)
    return load_kept_capture(
        "lambda", name, lambda: capture_step(make_step, batch_size=samples, name=name, synchronised=synchronised)
    )


def summarise_lambda(suite: str, outcomes: Sequence[Outcome], data: Path) -> list[ErrorRow]:
    """One GPU and several, boards seen and held back, then by program, board and host."""
    rows = []
    for words, chosen in (
        ("one GPU", [o for o in outcomes if o.case.tags["gpus"] == "1"]),
        ("several GPUs", [o for o in outcomes if o.case.tags["gpus"] != "1"]),
    ):
        kept = [o for o in chosen if o.case.name.endswith(HELD_BACK)]
        parts = [(words, chosen), (f"{words}, boards held back", kept)]
        parts.append((f"{words}, other boards", [o for o in chosen if o not in kept]))
        parts.append((f"{words}, quality A", [o for o in chosen if o.case.tags["quality"] == "A"]))
        parts += [(f"{words}, {model}", [o for o in chosen if o.case.group == model]) for model in _MODELS]
        rows += [summarise_outcomes(suite, label, members) for label, members in parts if members]
    for tag in ("board", "host"):
        names = sorted({o.case.tags[tag] for o in outcomes})
        rows += [
            summarise_outcomes(suite, f"{tag} {name}", [o for o in outcomes if o.case.tags[tag] == name])
            for name in names
        ]
    return rows
