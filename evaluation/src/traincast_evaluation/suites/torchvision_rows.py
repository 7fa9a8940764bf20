"""Steps of torchvision's classifiers at batch 12 on graphics cards of 2017 and 2018, many bound by their host."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path

from traincast.hardware.platform import find_device_by_name
from traincast.ir.workload import SEARCHED, Workload
from traincast.simulator.scenario.scenario import Mode, Scenario
from traincast.utils.errors import TraincastError
from traincast.utils.metrics import ErrorRow
from traincast_evaluation.suites.cases import Case, LeftOut, Outcome, summarise_outcomes
from traincast_evaluation.suites.published import Row, read_cases

FILE = "torchvision_batch12.csv"
HELD_BACK = "(net held back)"
_RELEASES = (
    (12.4, "2.4"), (12.1, "2.1"), (11.8, "2.0"), (11.7, "1.13"), (11.6, "1.12"), (11.3, "1.10"), (11.1, "1.8"),
    (11.0, "1.7"), (10.2, "1.5"), (10.1, "1.4"), (0.0, "1.2"),
)  # fmt: skip
"""The first PyTorch that came with a CUDA; its kernels are searched for."""
_CUDA = 10.1  # of rows that do not name theirs: cards of 2017 and 2018, by nets of 2019
_HALF = {"fp32": False, "fp16 (model.half)": True}


def list_torchvision_cases(data: Path) -> list[Case | LeftOut]:
    """Every row of the table."""
    if find_spec("torch") is None:
        raise TraincastError(
            "evaluate torchvision captures its programs, and torch is missing: pip install '.[capture]'"
        )
    return read_cases(data / "iterations" / FILE, _make_case)


def _make_case(row: Row) -> Case:
    from traincast_evaluation.zoo.build.torchvision_steps import list_torchvision_nets

    net, mode = row["model"], row["mode"].split(" ")[0]
    row.known("model", list_torchvision_nets())
    half, batch, pixels = row.known("precision", _HALF), row.count("batch"), row.count("img_size")
    device = find_device_by_name(row["device"])
    mark = f" {HELD_BACK}" if _is_held_back(net) else ""
    modes: dict[str, Mode] = {"inference": "inference", "train": "training"}
    if mode not in modes:
        raise TraincastError(
            f"'{row.file}', row {row.number}: mode '{row.label('mode')}' is neither train nor inference"
        )
    return Case(
        name=f"{net} {mode} {'fp16' if half else 'fp32'}, batch {batch}, {row.label('device')}{mark}",
        group=row["device"],
        question=partial(_make_scenario, net, half, modes[mode], pixels, batch, device.key, _find_release(row)),
        measured_ms=row.positive("iteration_ms"),
        tags={"mode": mode, "precision": "fp16" if half else "fp32"},
    )


def _is_held_back(net: str) -> bool:
    """Whether a net was set aside before any error was looked at."""
    return hashlib.sha256(net.encode()).digest()[0] % 2 == 1


def _find_release(row: Row) -> str:
    cuda = row.signed("cuda_version") if row.cells.get("cuda_version") else _CUDA
    return next(release for first, release in _RELEASES if cuda >= first)


def _make_scenario(net: str, half: bool, mode: Mode, pixels: int, batch: int, device: str, release: str) -> Scenario:
    captured = _capture_net(net, half, mode, pixels, batch)
    return Scenario(
        workload=replace(captured, framework_version=release, meta={**captured.meta, SEARCHED: "1"}), on=device
    )


@cache
def _capture_net(net: str, half: bool, mode: Mode, pixels: int, batch: int) -> Workload:
    from traincast.capturing import capture_step
    from traincast_evaluation.zoo.build.kept_captures import load_kept_capture
    from traincast_evaluation.zoo.build.torchvision_steps import make_torchvision_step

    name = f"{net}-{'fp16' if half else 'fp32'}-{mode}-{batch}-{pixels}"
    make_step = make_torchvision_step(net, half=half, training=mode == "training", pixels=pixels)
    return load_kept_capture(
        "torchvision", name,
        lambda: capture_step(make_step, batch_size=batch, name=net, mode=mode, rebatch=False, synchronised=True),
    )  # fmt: skip


def summarise_torchvision(suite: str, outcomes: Sequence[Outcome], data: Path) -> list[ErrorRow]:
    """All rows, nets looked at and held back, then by mode, precision and board."""
    kept = [o for o in outcomes if o.case.name.endswith(HELD_BACK)]
    parts = [("all: step", list(outcomes)), ("nets held back", kept)]
    parts += [("nets looked at", [o for o in outcomes if o not in kept])]
    for tag, words in (("mode", ("train", "inference")), ("precision", ("fp32", "fp16"))):
        parts += [(word, [o for o in outcomes if o.case.tags[tag] == word]) for word in words]
    boards = sorted({o.case.group for o in outcomes})
    parts += [(board, [o for o in outcomes if o.case.group == board]) for board in boards]
    return [summarise_outcomes(suite, label, members) for label, members in parts if members]
