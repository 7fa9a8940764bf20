"""The shared constants of training steps fitted anew on half of the published steps: one number after the other."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from traincast.costs.in_step import InStep, make_in_step
from traincast.simulator.parallelism.predict import estimate_seconds
from traincast.utils.errors import TraincastError
from traincast_evaluation.suites.cases import Case
from traincast_evaluation.suites.training_request import TrainingRequest

_STEPS = (0.16, 0.08, 0.04, 0.02)  # of a number's logarithm: tried up and down until neither helps, then the next
_LOWEST = {"batched": 0.5}  # a batched product of attention cannot be faster than its scores are written to memory
_LEAST_GAIN = 1e-5  # of the mean error: less is noise of rounding


@dataclass(frozen=True, kw_only=True)
class HalfErrors:
    """Mean absolute error of steps in percent, of one source: the half that was fitted on and the other, before and
    after (NaN where a half has no row)."""

    source: str
    fitted_before: float
    fitted_after: float
    held_before: float
    held_after: float


class ConstantsFit:
    """Numbers moved by turns so that the fitted half errs least. Deterministic: fixed order, fixed steps.

    The error is the mean of absolute logarithms; rows of a source weigh one over the root of their number, so that
    neither the largest table nor a single row decides. `moved` names what may change, the rest stays.
    """

    def __init__(self, cases: Sequence[Case], start: InStep, moved: Sequence[str]) -> None:
        self.cases = [case for case in cases if case.fitted and isinstance(case.question, TrainingRequest)]
        self.numbers, self.moved = start.by_name(), tuple(moved)
        counts = Counter(name_source(case) for case in self.cases)
        self.weights = np.array([counts[name_source(case)] ** -0.5 for case in self.cases])
        self.errors = self._errors(range(len(self.cases)), self.numbers)
        self._touched = {name: self._affected(name) for name in self.moved}

    def run(self, rounds: int = 3, progress: Callable[[str], None] = lambda _: None) -> InStep:
        """The numbers after this many turns through all of them, or fewer when none moves any more."""
        for turn in range(rounds):
            before = dict(self.numbers)
            for name in self.moved:
                self._move(name)
            progress(f"turn {turn + 1}: mean error {100 * self._score(self.errors):.2f} %")
            if before == self.numbers:
                break
        return make_in_step({name: _round_constant(value) for name, value in self.numbers.items()})

    def _score(self, errors: np.ndarray) -> float:
        return float((self.weights * errors).sum() / self.weights.sum())

    def _move(self, name: str) -> None:
        for step in _STEPS:
            for sign in (1.0, -1.0):
                while self._accepts(name, self.numbers[name] * math.exp(sign * step)):
                    pass

    def _accepts(self, name: str, value: float) -> bool:
        """Takes the value when the half errs less with it."""
        if value < _LOWEST.get(name, 0.0):
            return False
        trial = {**self.numbers, name: value}
        errors = self.errors.copy()
        touched = self._touched[name]
        errors[touched] = self._errors(touched, trial)
        if self._score(errors) > self._score(self.errors) - _LEAST_GAIN:
            return False
        self.numbers, self.errors = trial, errors
        return True

    def _affected(self, name: str) -> list[int]:
        """Cases whose step depends on a number."""
        everything = range(len(self.cases))
        changed = self._errors(everything, {**self.numbers, name: 1.3 * self.numbers[name]})
        return [i for i in everything if changed[i] != self.errors[i]]

    def _errors(self, numbers: Sequence[int], values: Mapping[str, float]) -> np.ndarray:
        constants = make_in_step(values)
        return np.array([abs(compute_log_error(self.cases[i], constants)) for i in numbers])


@dataclass(frozen=True, kw_only=True)
class LeftOutErrors:
    """Steps of one board or source when none of them takes part in the fit: how many, mean absolute error and bias in
    percent with the shipped constants and without that group, and which constants no other step tells."""

    group: str
    steps: int
    shipped: float
    left_out: float
    bias: float
    own: tuple[str, ...]


class LinearFit:
    """Constants fitted to the first order: how the logarithm of every step moves with that of every constant is told
    once, then a fit without some steps takes no further estimate. Both halves take part, but for the group left out."""

    _NUDGE, _FARTHEST, _TURNS, _RIDGE = 0.1, 0.5, 60, 1e-3

    def __init__(self, cases: Sequence[Case], start: InStep, moved: Sequence[str]) -> None:
        self.cases, self.start, self.moved = list(cases), start, tuple(moved)
        self.errors = np.array([compute_log_error(case, start) for case in self.cases])
        self.slopes = np.stack([self._find_slope(name) for name in self.moved], axis=1)
        counts = Counter(name_source(case) for case in self.cases)
        self.weights = np.array([counts[name_source(case)] ** -0.5 for case in self.cases])

    def _find_slope(self, name: str) -> np.ndarray:
        numbers = self.start.by_name()
        trial = make_in_step({**numbers, name: numbers[name] * math.exp(self._NUDGE)})
        moved = np.array([compute_log_error(case, trial) for case in self.cases])
        return np.asarray((moved - self.errors) / self._NUDGE)

    def leave_out(self, group: str, members: Sequence[bool]) -> LeftOutErrors:
        """Errors of the members with constants that all other steps tell. A clock that none of them tells is that of
        kernels alone."""
        mine = np.array(members)
        told = np.abs(self.slopes[~mine]).max(axis=0, initial=0.0) > 1e-9
        shift = self._fit(~mine, told)
        for j, name in enumerate(self.moved):
            if not told[j] and name in self.start.sustained:
                shift[j] = -math.log(self.start.sustained[name])
        after = (self.errors + self.slopes @ shift)[mine]
        own = tuple(
            name for name, known, j in zip(self.moved, told, self.slopes[mine].T, strict=True) if not known and j.any()
        )
        return LeftOutErrors(
            group=group, steps=int(mine.sum()), shipped=100 * float(np.abs(np.expm1(self.errors[mine])).mean()),
            left_out=100 * float(np.abs(np.expm1(after)).mean()), bias=100 * float(np.expm1(after).mean()), own=own,
        )  # fmt: skip

    def _fit(self, rows: np.ndarray, told: np.ndarray) -> np.ndarray:
        """Shifts of the logarithms of constants with the least weighted sum of absolute errors, by repeated least
        squares."""
        slopes, errors, weights = self.slopes[rows][:, told], self.errors[rows], self.weights[rows]
        shift = np.zeros(int(told.sum()))
        for _ in range(self._TURNS):
            near = weights / np.maximum(np.abs(errors + slopes @ shift), 1e-3)
            normal = slopes.T @ (near[:, None] * slopes) + self._RIDGE * near.sum() * np.eye(len(shift))
            shift = np.clip(-np.linalg.solve(normal, slopes.T @ (near * errors)), -self._FARTHEST, self._FARTHEST)
        whole = np.zeros(len(told))
        whole[told] = shift
        return whole


def compute_log_error(case: Case, constants: InStep) -> float:
    """Logarithm of a predicted step over the measured one."""
    request = case.question
    assert isinstance(request, TrainingRequest)
    seconds = estimate_seconds(request.transformer(), request.platform(), request.layout, in_step=constants)
    return math.log(1e3 * seconds / case.measured_ms)


def name_source(case: Case) -> str:
    """The table that a case is from."""
    return case.group.partition(",")[0]


def name_board(case: Case) -> str:
    """The GPU that a case ran on."""
    assert isinstance(case.question, TrainingRequest)
    return case.question.platform().device.key


def list_predictable(cases: Sequence[Case], constants: InStep) -> list[Case]:
    """Cases that have a result: a layout that cannot be is rejected."""
    kept = []
    for case in cases:
        try:
            compute_log_error(case, constants)
        except TraincastError:
            continue
        kept.append(case)
    return kept


def compute_half_errors(cases: Sequence[Case], before: InStep, after: InStep) -> list[HalfErrors]:
    """How wrong both halves of every source are with each set of constants."""
    rows = []
    for source in sorted({name_source(case) for case in cases}):
        some = [case for case in cases if name_source(case) == source]
        figures = [
            _compute_mean_percent([case for case in some if case.fitted == fitted], constants)
            for fitted in (True, False)
            for constants in (before, after)
        ]
        rows.append(
            HalfErrors(
                source=source, fitted_before=figures[0], fitted_after=figures[1], held_before=figures[2],
                held_after=figures[3],
            )
        )  # fmt: skip
    return rows


def _compute_mean_percent(cases: Sequence[Case], constants: InStep) -> float:
    errors = [100 * abs(math.expm1(compute_log_error(case, constants))) for case in cases]
    return float(np.mean(errors)) if errors else math.nan


def _round_constant(value: float) -> float:
    """Three digits: what is beyond them no step tells."""
    return float(f"{value:.3g}")
