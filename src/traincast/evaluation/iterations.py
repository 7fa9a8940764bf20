"""Whole steps, predicted against published measurements: the DLRM and CNN study, and NeuSight's Transformers."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from traincast.errors import TraincastError
from traincast.measurements.metrics import ErrorRow, error_row
from traincast.platform.catalog import device_by_name
from traincast.questions.predict import Question, predict
from traincast.questions.variant import Variant
from traincast.walk.timeline import Timeline

# the study locked its SM clocks; see the notes on the papers' machines
_STUDY_CLOCK_MHZ = {"Tesla V100-SXM2-16GB": 1297.0, "Tesla P100-PCIE-16GB": 1189.0, "NVIDIA TITAN Xp": 1404.0}
_TRANSFORMERS = {
    "bert_large": "bert-large", "gpt2_large": "gpt2-large", "gpt3_xl": "gpt3-xl", "gpt3_27": "gpt3-2.7b",
    "opt_13": "opt-1.3b", "switchxl4": "switch-xl4",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Case:
    """One measured step: how to predict it, what was measured, and what others predicted (signed error in %).

    `stops_at` is the top-level op before which the measurement's clock stopped ("": it ran to the end of the step).
    """

    name: str
    group: str
    question: Question
    measured_ms: float
    measured_active_ms: float | None = None
    others: dict[str, float] = field(default_factory=dict)
    stops_at: str = ""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A case with its prediction, in milliseconds."""

    case: Case
    predicted_ms: float
    low_ms: float
    high_ms: float
    active_ms: float

    @property
    def covered(self) -> bool:
        """Whether the measured step lies inside the predicted 90 % interval."""
        return self.low_ms <= self.case.measured_ms <= self.high_ms

    @property
    def error_percent(self) -> float:
        """Signed error of the step time."""
        return 100 * (self.predicted_ms / self.case.measured_ms - 1)

    @property
    def active_error_percent(self) -> float | None:
        """Signed error of the device's active time, where it was measured."""
        measured = self.case.measured_active_ms
        return None if measured is None else 100 * (self.active_ms / measured - 1)


def dlrm_cases(data: Path) -> list[Case]:
    """The DLRM study: three models at four batch sizes."""
    names = {"DLRM_default": "dlrm-default", "DLRM_MLPerf": "dlrm-mlperf", "DLRM_DDP": "dlrm-ddp"}
    return [
        Case(
            name=f"{row['model']} {row['batch']}",
            group=row["device"],
            question=_study(row, names),
            measured_ms=float(row["iteration_ms"]),
            measured_active_ms=float(row["gpu_active_ms_implied"]),
            others={"reference": float(row["ref_err_e2e_pct"]), "kernels only": float(row["ref_err_kernel_only_pct"])},
        )
        for row in _rows(data / "iterations" / "dlrm_single_gpu.csv")
    ]


def cnn_cases(data: Path) -> list[Case]:
    """The CNN part of the study: ResNet-50 and Inception-v3, timed from forward to the end of the update."""
    names = {"ResNet50": "resnet50", "Inception-V3": "inception-v3"}
    return [
        Case(
            name=f"{row['model']} {row['batch']}",
            group=row["device"],
            question=_study(row, names),
            measured_ms=float(row["iteration_ms"]),
            others={"|reference|": float(row["ref_abs_err_pct"]), "|Habitat|": float(row["habitat_abs_err_pct"])},
            stops_at="Optimizer.zero_grad#SGD.zero_grad",
        )
        for row in _rows(data / "iterations" / "cnn_single_gpu.csv")
    ]


def transformer_cases(data: Path) -> list[Case]:
    """NeuSight's Transformers; four of them ran under torch.compile."""
    cases = []
    for row in _rows(data / "iterations" / "transformers_single_gpu.csv"):
        measured = float(row["e2e_ms"])
        others = {
            name: 100 * (float(row[column]) / measured - 1)
            for name, column in (("NeuSight", "neusight_pred_e2e_ms"), ("roofline", "roofline_pred_e2e_ms"))
            if row[column]
        }
        variant = Variant(
            batch_size=int(row["batch"]),
            seq_len=int(row["seq_len"]),
            mode="inference" if row["mode"] == "inf" else "training",
            optimizer=None if row["mode"] == "inf" else "none",
            compiled=row["compiled"] == "true",
        )
        question = Question(workload=_TRANSFORMERS[row["model"]], on=device_by_name(row["device"]).key, variant=variant)
        name = f"{row['model']} {row['mode']} {row['batch']}x{row['seq_len']}" + " compiled" * variant.compiled
        cases.append(Case(name=name, group=row["device"], question=question, measured_ms=measured, others=others))
    return cases


SUITES: dict[str, Callable[[Path], list[Case]]] = {
    "dlrm": dlrm_cases,
    "cnn": cnn_cases,
    "transformers": transformer_cases,
}


def run_cases(
    cases: Sequence[Case], *, roofline_only: bool = False, progress: Callable[[float], None] = lambda _: None
) -> list[Outcome]:
    """Predicts every case; `progress` hears the fraction done."""
    outcomes = []
    for done, case in enumerate(cases):
        answer = predict(replace(case.question, roofline_only=roofline_only))
        timed = _reached(answer.timeline, case.stops_at) if case.stops_at else answer.iteration
        scale = 1e3 * timed / answer.iteration
        outcomes.append(
            Outcome(
                case=case,
                predicted_ms=1e3 * timed,
                low_ms=scale * answer.interval[0],
                high_ms=scale * answer.interval[1],
                active_ms=1e3 * answer.device_active,
            )
        )
        progress((done + 1) / len(cases))
    return outcomes


def _reached(timeline: Timeline, name: str) -> float:
    """Seconds from the start of the step until the host begins the top-level op of this name."""
    program = timeline.program
    (scope, *_) = [scope.index for scope in program.scopes if scope.name == name]
    first = int(np.searchsorted(timeline.schedule.scope, scope))
    return float(timeline.times.host_after[first - 1]) - timeline.origin


def summarise(suite: str, outcomes: Sequence[Outcome]) -> list[ErrorRow]:
    """Step and active time over all cases, then step time per device, each beside what others score."""
    rows = [outcomes_row(suite, "all: step", outcomes)]
    active = [o for o in outcomes if o.case.measured_active_ms]
    if active:
        predicted = [o.active_ms for o in active]
        measured = [o.case.measured_active_ms or 0.0 for o in active]
        rows.append(error_row(suite, "all: device active", predicted, measured, [o.case.name for o in active]))
    groups = sorted({o.case.group for o in outcomes})
    if len(groups) > 1:
        rows += [outcomes_row(suite, group, [o for o in outcomes if o.case.group == group]) for group in groups]
    return rows


def outcomes_row(suite: str, group: str, outcomes: Sequence[Outcome]) -> ErrorRow:
    """One line for these cases, beside what others score on them."""
    others: dict[str, list[float]] = {}
    for outcome in outcomes:
        for name, error in outcome.case.others.items():
            others.setdefault(name, []).append(abs(error))
    reference = ", ".join(f"{name.strip('|')} {sum(errors) / len(errors):.1f}" for name, errors in others.items())
    return error_row(
        suite,
        group,
        [o.predicted_ms for o in outcomes],
        [o.case.measured_ms for o in outcomes],
        [o.case.name for o in outcomes],
        reference=f"MAPE: {reference}" if reference else "",
    )


def _study(row: dict[str, str], names: dict[str, str]) -> Question:
    return Question(
        workload=names[row["model"]],
        on=device_by_name(row["device"]).key,
        variant=Variant(batch_size=int(row["batch"])),
        clock_mhz=_STUDY_CLOCK_MHZ[row["device"]],
    )


def _rows(path: Path) -> list[dict[str, str]]:
    if not path.is_file():
        raise TraincastError(f"'{path}' is missing; point `data` at the folder of measurements")
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))
