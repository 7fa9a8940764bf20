"""Every accuracy table by name, and what evaluating one answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

from traincast.utils.errors import TraincastError, make_unknown_error
from traincast.utils.metrics import ErrorRow
from traincast.utils.results import Records, Result, drop_nested_values
from traincast_evaluation.suites.cases import Compared, ComparedRow, LeftOut, Outcome, run_cases
from traincast_evaluation.suites.memory import MemoryEvaluation
from traincast_evaluation.suites.memory_outcome import MemoryOutcome

if TYPE_CHECKING:
    from traincast.app.pages.page import Page
    from traincast_evaluation.suites.choices import Choice


class Suite(NamedTuple):
    """Where a suite stands, as `module:function` of this package, imported when it is asked for.

    `cases(data)` gives measured steps, which `summary(suite, outcomes, data)` adds up and `notes()` comments on.
    Where cases are no steps that can be predicted one by one, `table(data, progress)` gives error rows, which may have
    their cases with them. `here(folder, options,
    progress)` measures steps on this machine and needs no data. A suite whose programs take long to capture, and are
    kept, stops after `minutes` (0: at its end) and goes on when called again.
    """

    cases: str = ""
    summary: str = "cases:summarise"
    notes: str = ""
    table: str = ""
    here: str = ""
    minutes: float = 0.0


SUITES = {
    "captured": Suite("captured:captured_cases", summary="captured:summarise_captured"),
    "cnn": Suite("single_gpu:cnn_cases"),
    "collectives": Suite(table="collectives:evaluate_collectives"),
    "distributed-embeddings": Suite("distributed_embeddings:distributed_embeddings_cases"),
    "dlrm": Suite("single_gpu:dlrm_cases"),
    "embedding-access": Suite(table="embedding_access:evaluate_embedding_access"),
    "here": Suite(here="here:evaluate_here"),
    "kernels": Suite(table="kernels:evaluate_kernels"),
    "lambda": Suite("lambda_rows:lambda_cases", summary="lambda_rows:summarise_lambda"),
    "llm": Suite("llm:llm_cases", summary="llm:summarise_llm", notes="llm:llm_notes"),
    "memory": Suite(table="memory:evaluate_memory"),
    "multi-gpu": Suite(
        "multi_gpu:multi_gpu_cases", summary="multi_gpu:summarise_multi_gpu", notes="multi_gpu:multi_gpu_notes"
    ),
    "recommenders": Suite("recommenders:list_recommender_cases", summary="recommenders:summarise_recommenders"),
    "sharding": Suite(here="here:evaluate_sharding"),
    "timm": Suite("timm_steps:list_timm_cases", summary="timm_steps:summarise_timm", minutes=30.0),
    "timm-inference": Suite("timm_steps:list_timm_inference_cases", summary="timm_steps:summarise_timm", minutes=30.0),
    "torchvision": Suite(
        "torchvision_rows:list_torchvision_cases", summary="torchvision_rows:summarise_torchvision", minutes=30.0
    ),
    "traces": Suite(table="traced:evaluate_traces"),
    "transformers": Suite("single_gpu:transformer_cases"),
}
"""Every suite by name, in the order in which they are offered."""


@dataclass(frozen=True, repr=False, kw_only=True)
class Evaluation(Result):
    """Predicted against measured. `summary` has errors in percent, one row per group, the first over all steps;
    `outcomes` are the cases (milliseconds), where they can be listed; `left_out` are rows that cannot be predicted,
    with their reasons, and `notes` say what else was left out. `choices` are those between shardings, `peaks` cases of
    memory (GB), `compared` those of tables."""

    suite: str
    summary: tuple[ErrorRow, ...]
    outcomes: tuple[Outcome, ...] = ()
    left_out: tuple[LeftOut, ...] = ()
    notes: tuple[str, ...] = ()
    choices: tuple[Choice, ...] = ()
    peaks: tuple[MemoryOutcome, ...] = ()
    compared: tuple[Compared, ...] = ()

    @property
    def mape(self) -> float:
        """Mean absolute error of the first row of the summary, in percent."""
        return self.summary[0].mape

    def to_dict(self) -> dict[str, Any]:
        """Summary and cases as plain data; keys say their units."""
        cases = [_describe_case(outcome) for outcome in self.outcomes]
        cases += [peak.to_dict() for peak in self.peaks] + [case.to_dict() for case in self.compared]
        if self.left_out:
            cases = [{**case, "reason": None} for case in cases] + [_describe_left_out(row) for row in self.left_out]
        made = {"choices": [choice.to_dict() for choice in self.choices]} if self.choices else {}
        return {"summary": [asdict(row) for row in self.summary], "cases": cases, **made}

    def headline(self) -> str:
        """The suite and the mean absolute error of its first groups."""
        groups = [f"{row.group}: MAPE {row.mape:.2f} %, n {row.n}" for row in self.summary]
        return "\n".join([self.suite, *groups])

    def to_page(self, price: float | None = None) -> Page:
        """The suite as a page of a report; money plays no part in it."""
        from traincast_evaluation.page import build_suite_page

        document = self.to_dict()
        notes = [f"left out: {row.name}: {row.reason}" for row in self.left_out] + list(self.notes)
        return build_suite_page(self.suite, document["summary"], document["cases"], notes)

    def records(self) -> Records:
        """Tables "summary" (one row per group) and "cases"."""
        document = self.to_dict()
        return {"summary": document["summary"], "cases": [drop_nested_values(case) for case in document["cases"]]}


def evaluate(
    suite: str, data: Path, *, roofline_only: bool = False, minutes: float | None = None,
    progress: Callable[[float], None] = lambda _: None,
) -> Evaluation:  # fmt: skip
    """Evaluates a suite on a folder of measurements; `progress` hears the fraction done. `minutes` is for suites that
    capture long (None: theirs)."""
    if suite not in SUITES:
        raise make_unknown_error("suite", suite, SUITES, f"Choose from {', '.join(SUITES)}.")
    parts = SUITES[suite]
    if measures_here(suite, {}, roofline_only=roofline_only):
        return evaluate_on_this_machine(suite, data, {}, progress=progress)
    if parts.table:
        if roofline_only:
            raise TraincastError(f"evaluate {suite} compares kernel models one by one; leave out `roofline_only`")
        return _make_table(suite, _import_function(parts.table)(data, progress))
    cases = _import_function(parts.cases)(data)
    until = monotonic() + 60 * (parts.minutes if minutes is None else minutes) if parts.minutes else None
    ran = run_cases(cases, roofline_only=roofline_only, progress=progress, until=until)
    outcomes = tuple(outcome for outcome in ran if isinstance(outcome, Outcome))
    left_out = tuple(row for row in ran if isinstance(row, LeftOut))
    if not outcomes:
        why = f", for the first one: {left_out[0].reason}" if left_out else "; give at least one"
        raise TraincastError(f"evaluate {suite}: none of {len(left_out)} rows can be predicted{why}")
    summary = _import_function(parts.summary)(suite, outcomes, data)
    notes = _import_function(parts.notes)() if parts.notes else ()
    if len(ran) < len(cases):
        notes += (f"{len(ran)} of {len(cases)} rows in this time; call it again, or with `minutes`, to go on",)
    return Evaluation(suite=suite, summary=tuple(summary), outcomes=outcomes, left_out=left_out, notes=notes)


def _make_table(suite: str, found: Sequence[ErrorRow] | MemoryEvaluation) -> Evaluation:
    """The evaluation of a suite that has no steps to list."""
    if isinstance(found, MemoryEvaluation):
        return Evaluation(
            suite=suite, summary=found.summary, peaks=found.outcomes, left_out=found.left_out, notes=found.notes
        )
    return Evaluation(
        suite=suite,
        summary=tuple(row.to_error_row() if isinstance(row, ComparedRow) else row for row in found),
        compared=tuple(case for row in found if isinstance(row, ComparedRow) for case in row.cases),
    )


class MachineOptions(TypedDict, total=False):
    """How a suite measures this machine. `on` is its profile ("here", or the file of a fitted one). It stops after
    `minutes` (so do suites that capture long), and goes on from there when called again; `tasks` random DLRMs are drawn
    from `seed`. None: the default.
    """

    on: str | None
    minutes: float | None
    tasks: int | None
    seed: int | None


def measures_here(suite: str, options: MachineOptions, *, roofline_only: bool) -> bool:
    """Whether a suite measures steps on this machine; options that are not for it are rejected."""
    here = suite in SUITES and bool(SUITES[suite].here)
    if here and roofline_only:
        raise TraincastError(f"evaluate {suite} predicts from this machine's own profile; leave out `roofline_only`")
    timed = suite in SUITES and SUITES[suite].minutes > 0
    given = [name for name, value in options.items() if value is not None and not (timed and name == "minutes")]
    if given and suite in SUITES and not here:
        raise TraincastError(
            f"`{given[0]}` is for suites that measure this machine; leave it out with evaluate {suite}"
        )
    return here


def evaluate_on_this_machine(
    suite: str, folder: Path | None, options: MachineOptions, *, progress: Callable[[float], None] = lambda _: None
) -> Evaluation:
    """Evaluates a suite of steps that are measured here; what it keeps is in `folder` (None: where this machine's store
    is). Needs torch."""
    from traincast.costs.cpu.profile import get_profile_home
    from traincast_evaluation.suites.here import HereOptions

    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    found = _import_function(SUITES[suite].here)(folder or get_profile_home(), HereOptions(**given), progress)
    return Evaluation(
        suite=suite,
        summary=found.summary,
        outcomes=found.outcomes,
        left_out=found.left_out,
        notes=found.notes,
        choices=found.choices,
    )


def _import_function(place: str) -> Callable[..., Any]:
    module, name = place.split(":")
    function: Callable[..., Any] = getattr(import_module(f"traincast_evaluation.suites.{module}"), name)
    return function


def _describe_case(outcome: Outcome) -> dict[str, Any]:
    case = outcome.case
    return {
        "device": case.group,
        "case": case.name,
        "measured_ms": case.measured_ms,
        "predicted_ms": outcome.predicted_ms,
        "interval_ms": [outcome.low_ms, outcome.high_ms],
        "covered": outcome.covered,
        "error_percent": outcome.error_percent,
        "active_error_percent": outcome.active_error_percent,
        "others_error_percent": case.others,
        "spread_percent": case.spread_percent,
        **_explain_difference(outcome),
    }


def _explain_difference(outcome: Outcome) -> dict[str, Any]:
    """Why predicted and measured must differ, and what the predicted step is made of; nothing where they need not."""
    if not outcome.case.note:
        return {}
    exposed, idle = outcome.exposed_comm_ms, max(outcome.predicted_ms - outcome.active_ms, 0.0)
    made_of = {"kernels": outcome.active_ms - exposed, "exposed_comm": exposed, "idle": idle}
    return {"note": outcome.case.note, "made_of_ms": made_of}


def _describe_left_out(row: LeftOut) -> dict[str, Any]:
    """A row that cannot be predicted: the keys of a case without values, and why."""
    numbers = ("measured_ms", "predicted_ms", "covered", "error_percent", "active_error_percent", "spread_percent")
    nothing: dict[str, Any] = dict.fromkeys(numbers)
    return {
        "device": row.group,
        "case": row.name,
        **nothing,
        "interval_ms": [],
        "others_error_percent": {},
        "reason": row.reason,
    }
