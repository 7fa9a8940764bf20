"""Measured steps, how to predict them, and what comes out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np

from traincast.simulator.prediction.result import Prediction
from traincast.simulator.scenario.predict import predict
from traincast.simulator.scenario.resolved import Resolved
from traincast.simulator.scenario.scenario import Scenario
from traincast.simulator.timeline import Timeline
from traincast.utils.errors import TraincastError
from traincast.utils.metrics import ErrorRow, compute_error_row
from traincast_evaluation.suites.training_request import TrainingRequest, predict_peak_bytes, predict_training


@dataclass(frozen=True, kw_only=True)
class Repeated:
    """A step that runs this many `times` before the one that is asked for (gradients are added up); what was measured
    is one of `per` equal parts of all of them."""

    question: Scenario
    times: int
    per: int = 1


@dataclass(frozen=True, kw_only=True)
class Case:
    """One measured step: how to predict it (a function where that takes long), what was measured, and what others
    predicted (signed error in %).

    `stops_at` is the top-level op before which the measurement's clock stopped ("": it ran to the end of the step).
    `fitted` says that shared constants may have been fitted on it.
    `note` says why predicted and measured must differ, where they must.
    `spread_percent` is how far repeated measurements of it are apart (a robust standard deviation), where known.
    `repeated` are the steps without an update that come before it. `tags` are what else cases are grouped by.
    """

    name: str
    group: str
    question: Scenario | TrainingRequest | Callable[[], Scenario | Resolved]
    measured_ms: float
    measured_active_ms: float | None = None
    measured_memory_gb: float | None = None
    others: dict[str, float] = field(default_factory=dict)
    stops_at: str = ""
    fitted: bool = False
    note: str = ""
    spread_percent: float | None = None
    repeated: Repeated | None = None
    tags: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """A measured step that cannot be predicted, and why in one line. `group` is "" where the row does not tell it."""

    name: str
    reason: str
    group: str = ""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A case with its prediction, in milliseconds."""

    case: Case
    predicted_ms: float
    low_ms: float
    high_ms: float
    active_ms: float
    memory_gb: float = 0.0
    exposed_comm_ms: float = 0.0

    @property
    def covered(self) -> bool:
        """Whether the measured step is inside the predicted 90 % interval."""
        return self.low_ms <= self.case.measured_ms <= self.high_ms

    @property
    def half_width_percent(self) -> float:
        """Half the 90 % interval, percent of the prediction."""
        return 50 * (self.high_ms - self.low_ms) / self.predicted_ms

    @property
    def error_percent(self) -> float:
        """Signed error of the step time."""
        return 100 * (self.predicted_ms / self.case.measured_ms - 1)

    @property
    def active_error_percent(self) -> float | None:
        """Signed error of the device's active time, where it was measured."""
        measured = self.case.measured_active_ms
        return None if measured is None else 100 * (self.active_ms / measured - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """Something measured, on a device, beside its prediction and the 90 % interval (None: the model has none of its
    own), in seconds."""

    device: str
    name: str
    measured: float
    predicted: float
    interval: tuple[float, float] | None

    def to_dict(self) -> dict[str, Any]:
        """As plain data, with the keys that cases of every suite have."""
        interval = self.interval
        return {
            "device": self.device,
            "case": self.name,
            "measured_ms": 1e3 * self.measured,
            "predicted_ms": 1e3 * self.predicted,
            "interval_ms": [1e3 * bound for bound in interval] if interval else [],
            "covered": interval[0] <= self.measured <= interval[1] if interval else None,
            "error_percent": 100 * (self.predicted / self.measured - 1),
        }


@dataclass(frozen=True, slots=True)
class ComparedRow(ErrorRow):
    """A line of an accuracy table with what stands behind it."""

    cases: tuple[Compared, ...] = ()

    def to_error_row(self) -> ErrorRow:
        """The line alone."""
        return ErrorRow(**{entry.name: getattr(self, entry.name) for entry in fields(ErrorRow)})


def compare(suite: str, group: str, cases: Sequence[Compared], reference: str = "") -> ComparedRow:
    """A line over these cases, each called by its name behind the group's."""
    if not cases:
        raise TraincastError(f"{suite}: no row of the tables is of '{group}'; give the whole tables")
    bounds = [case.interval for case in cases if case.interval]
    whole = len(bounds) == len(cases)
    predicted, measured = (np.array([getattr(case, name) for case in cases]) for name in ("predicted", "measured"))
    low, high = np.array(bounds).T if whole else (predicted, predicted)
    row = compute_error_row(
        suite, group, predicted, measured, [case.name for case in cases], reference,
        inside=(measured >= low) & (measured <= high) if whole else None,
        half_widths=50 * (high - low) / predicted if whole else None,
    )  # fmt: skip
    named = tuple(replace(case, name=f"{group}: {case.name}") for case in cases)
    return ComparedRow(**{entry.name: getattr(row, entry.name) for entry in fields(ErrorRow)}, cases=named)


def run_cases(
    cases: Sequence[Case | LeftOut], *, roofline_only: bool = False, until: float | None = None,
    progress: Callable[[float], None] = lambda _: None,
) -> list[Outcome | LeftOut]:  # fmt: skip
    """Predicts every case that can be predicted, the others keep their reason; `progress` hears the fraction done. Ends
    early, with at least one case, when the monotonic clock says `until`."""
    outcomes: list[Outcome | LeftOut] = []
    known: dict[object, list[Outcome]] = {}  # steps that several releases published are simulated once
    for done, case in enumerate(cases):
        if isinstance(case, LeftOut):
            outcomes.append(case)
        else:
            equal = known.setdefault(_make_request_key(case), [])
            again = next((one for one in equal if one.case.question == case.question), None)
            outcome = replace(again, case=case) if again else _predict_case(case, roofline_only=roofline_only)
            equal += [outcome] if isinstance(outcome, Outcome) else []
            outcomes.append(outcome)
        progress((done + 1) / len(cases))
        if until is not None and monotonic() > until:
            break
    return outcomes


def _make_request_key(case: Case) -> object:
    """What equal requests have in common and can be looked up by; a case of another kind is equal to itself only."""
    request = case.question
    return (request.model, request.layout) if isinstance(request, TrainingRequest) else id(case)


def _predict_case(case: Case, *, roofline_only: bool) -> Outcome | LeftOut:
    try:
        if isinstance(case.question, TrainingRequest):
            return _make_training_outcome(case, predict_training(replace(case.question, roofline_only=roofline_only)))
        asked = case.question if isinstance(case.question, Scenario) else case.question()
        scenario = asked if isinstance(asked, Scenario) else asked.scenario
        scenario = scenario.replace(roofline_only=roofline_only)
        result = predict(scenario if isinstance(asked, Scenario) else replace(asked, scenario=scenario))
        before = case.repeated and predict(case.repeated.question.replace(roofline_only=roofline_only))
    except TraincastError as error:
        return LeftOut(name=case.name, group=case.group, reason=str(error))
    timed = _compute_seconds_until_op(result.timeline, case.stops_at) if case.stops_at else result.iteration
    active = result.device_active
    if case.repeated and before:
        timed = (timed + case.repeated.times * before.iteration) / case.repeated.per
        active = (active + case.repeated.times * before.device_active) / case.repeated.per
    scale = 1e3 * timed / result.iteration
    return Outcome(
        case=case,
        predicted_ms=1e3 * timed,
        low_ms=scale * result.interval[0],
        high_ms=scale * result.interval[1],
        active_ms=1e3 * active,
        exposed_comm_ms=1e3 * result.exposed_comm,
    )


def _make_training_outcome(case: Case, result: Prediction) -> Outcome:
    low, high = result.interval
    assert isinstance(case.question, TrainingRequest)
    return Outcome(
        case=case,
        predicted_ms=1e3 * result.iteration,
        low_ms=1e3 * low,
        high_ms=1e3 * high,
        active_ms=1e3 * result.device_active,
        memory_gb=predict_peak_bytes(case.question) / 1e9 if case.measured_memory_gb else 0.0,
    )


def _compute_seconds_until_op(timeline: Timeline, name: str) -> float:
    """Seconds from the start of the step until the host begins the top-level op of this name."""
    program = timeline.program
    (scope, *_) = [scope.index for scope in program.scopes if scope.name == name]
    first = int(np.searchsorted(timeline.schedule.scope, scope))
    return float(timeline.times.host_after[first - 1]) - timeline.origin


def summarise(suite: str, outcomes: Sequence[Outcome], data: Path | None = None) -> list[ErrorRow]:
    """Step and active time over all cases, then step time per device, each alongside what others score."""
    rows = [summarise_outcomes(suite, "all: step", outcomes)]
    active = [o for o in outcomes if o.case.measured_active_ms]
    if active:
        predicted = [o.active_ms for o in active]
        measured = [o.case.measured_active_ms or 0.0 for o in active]
        rows.append(compute_error_row(suite, "all: device active", predicted, measured, [o.case.name for o in active]))
    groups = sorted({o.case.group for o in outcomes})
    if len(groups) > 1:
        rows += [summarise_outcomes(suite, group, [o for o in outcomes if o.case.group == group]) for group in groups]
    return rows


def summarise_outcomes(suite: str, group: str, outcomes: Sequence[Outcome]) -> ErrorRow:
    """One line for these cases, alongside what others score on them."""
    others: dict[str, list[float]] = {}
    for outcome in outcomes:
        for name, error in outcome.case.others.items():
            others.setdefault(name, []).append(abs(error))
    reference = ", ".join(f"{name.strip('|')} {sum(errors) / len(errors):.1f}" for name, errors in others.items())
    return compute_error_row(
        suite,
        group,
        [o.predicted_ms for o in outcomes],
        [o.case.measured_ms for o in outcomes],
        [o.case.name for o in outcomes],
        reference=f"MAPE: {reference}" if reference else "",
        inside=np.array([o.covered for o in outcomes], dtype=np.bool_),
        half_widths=np.array([o.half_width_percent for o in outcomes]),
    )
