"""Recommenders as others have measured them: TorchRec's own pipeline benchmark, captured on two ranks, and the OneTrans
of Primus-DLRM on one, two and eight.

TorchRec's history also tells how long a change made a step, on a GPU that it mostly does not name: of those that its
authors name elsewhere, the one on which the step before comes nearest. A pair's measured ratio is told as the time that
the step after would have beside the predicted step before.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import log
from pathlib import Path
from typing import NamedTuple

from traincast.simulator.scenario.predict import predict
from traincast.simulator.scenario.scenario import Scenario
from traincast.utils.errors import TraincastError
from traincast.utils.metrics import ErrorRow
from traincast_evaluation.suites.cases import Case, LeftOut, Outcome, summarise_outcomes
from traincast_evaluation.suites.published import Row, read_cases, read_rows
from traincast_evaluation.suites.torchrec_rows import find_captured_step, load_captured_step

_CHANGES, _BEYOND = "before and after", "beyond the spread"
_SIZE = 0.25  # of a change: how near a predicted one is to be
_RUNS = {
    "TestSparseNN sdd_base": "before-base",
    "TestSparseNN emb_stash": "before-emb_stash",
    "TestSparseNN heavy_dense": "newest-heavy_dense",
    "metric_scaling_prod": "newest-metric_scaling",
}
_NODES = {
    "NVIDIA GB200": "gb200-nvl72",
    "NVIDIA A100-80GB (form not stated)": "a100-80gb",
    "NVIDIA H100": "h100-96gb",  # TorchRec's authors have the one with 2.4 TB/s
    "AMD Instinct MI355X": "mi355x-platform",
}
_FLEET = ("gb200-nvl72", "a100-80gb", "h100-96gb")  # that TorchRec's authors name
_ONE_TRANS = "OneTrans v6"
_LEFT_OUT = {
    "Maglev pipeline full": "its sizes are in a file that is not among those of the table",
}
_SOK = "its program, TensorFlow under XLA with Horovod, is not described here, nor which of two interactions it ran"


class _Change(NamedTuple):
    """A pair of rows of one pull request, by their names."""

    pull_request: str
    before: str
    after: str


class _Run(NamedTuple):
    """One side of a pair: the captured step, and how long it took."""

    step: str
    measured_ms: float


_BASE, _SHAMPOO = "sparse_data_dist_base", "sparse_data_dist_shampoo"
_PAIRS = (
    _Change("4066", _BASE, "sparse_data_dist_sync_fwd"),
    _Change("4018", "baseline", "clear_inputs (D98744419)"),
    _Change("4018", "baseline", "clear_inputs (this diff)"),
    _Change("4017", "baseline", "clear_inputs"),
    _Change("4008", f"{_BASE}_before", f"{_BASE}_after"),
    _Change("4002", "sparse_data_dist_baseline", "sparse_data_dist_free_input"),
    _Change("4002", "sparse_data_dist_baseline", "sparse_data_dist_inplace"),
    _Change("4002", "sparse_data_dist_baseline", "sparse_data_dist_free_input_inplace"),
    _Change("3899", "sparse_emo", "prefetch_emo"),
    _Change("3824", "eval_gpu", "eval_gpu_inplace_copy"),
    _Change("3800", f"{_SHAMPOO} (baseline)", "sparse_data_dist_opt_stash_shampoo"),
    _Change("3800", f"{_SHAMPOO} (baseline)", "sparse_data_dist_opt_stash_shampoo_non_threaded"),
    _Change("3797", _SHAMPOO, "sparse_data_dist_bwd_opt_shampoo"),
    _Change("3797", _BASE, "sparse_data_dist_bwd_opt"),
    _Change("3787", _BASE, f"{_BASE}_inplace_copy"),
)


def list_recommender_cases(data: Path) -> list[Case | LeftOut]:
    """Every row of the table of steps, then every pair of TorchRec's history whose steps were captured."""
    folder = data / "iterations"
    return [*read_cases(folder / "recommender_steps.csv", _make_case), *_list_pairs(folder)]


def summarise_recommenders(suite: str, outcomes: Sequence[Outcome], data: Path | None = None) -> list[ErrorRow]:
    """Steps, then pairs: all of them, and those whose change exceeds the spread of repeated runs, with how many of
    these have the right sign, and a size that is near."""
    steps = [o for o in outcomes if o.case.group != _CHANGES]
    pairs = [o for o in outcomes if o.case.group == _CHANGES]
    rows = [summarise_outcomes(suite, "all: step", steps)] if steps else []
    for group in sorted({o.case.group for o in steps}):
        rows.append(summarise_outcomes(suite, group, [o for o in steps if o.case.group == group]))
    if pairs:
        rows.append(summarise_outcomes(suite, _CHANGES, pairs))
    beyond = [o for o in pairs if o.case.tags["change"] == _BEYOND]
    if not beyond:
        return rows
    changes = [(_read_change(o, o.predicted_ms), _read_change(o, o.case.measured_ms)) for o in beyond]
    right = sum(predicted * measured > 0 for predicted, measured in changes)
    near = sum(abs(predicted - measured) <= _SIZE * abs(measured) for predicted, measured in changes)
    group = f"{_CHANGES}, {_BEYOND} (sign right in {right}, size in {near} of {len(beyond)})"
    return [*rows, summarise_outcomes(suite, group, beyond)]


def _read_change(outcome: Outcome, after_ms: float) -> float:
    return after_ms / float(outcome.case.tags["before_ms"]) - 1.0


def _make_case(row: Row) -> Case:
    model, measured = row.label("model"), row.positive("iteration_ms")
    if model in _LEFT_OUT:
        raise TraincastError(_LEFT_OUT[model])
    if row["set"] == "hugectr_sok":
        raise TraincastError(_SOK)
    on, gpus = row.known("device", _NODES), row.count("num_gpus")
    step = f"onetrans-{gpus}" if model == _ONE_TRANS else row.known("model", _RUNS)
    name = f"{model}, {gpus} x {row.label('device')}, batch {row.count('batch_per_gpu')}"
    return Case(
        name=f"{name}, {row.label('precision')}", group="Primus-DLRM" if model == _ONE_TRANS else "TorchRec",
        question=Scenario(workload=load_captured_step(step), on=on), measured_ms=measured,
    )  # fmt: skip


def _list_pairs(folder: Path) -> list[Case | LeftOut]:
    rows = read_rows(folder / "torchrec_pipeline_memory.csv")
    found: list[tuple[_Change, _Run, _Run]] = []
    made: list[Case | LeftOut] = []
    for change in _PAIRS:
        both = [
            next((r for r in rows if r["pr"].partition(".")[0] == change.pull_request and r["name"] == name), None)
            for name in (change.before, change.after)
        ]
        if both[0] is None or both[1] is None:
            made.append(LeftOut(name=_name_pair(change), reason="the table lacks one of its rows", group=_CHANGES))
        else:
            found.append((change, _read_run(both[0]), _read_run(both[1])))
    spreads = _find_spreads([before for _, before, _ in found])
    return [*made, *(_make_pair(change, before, after, spreads) for change, before, after in found)]


def _read_run(row: Row) -> _Run:
    step = find_captured_step(row)
    if step is None:
        raise TraincastError(f"{row['name']}: no step of it was captured")
    return _Run(step, row.positive("iteration_ms_p90"))


def _name_pair(change: _Change) -> str:
    return f"pull request {change.pull_request}: {change.before} to {change.after}"


def _find_gpu(run: _Run) -> str:
    """The GPU on which a step comes nearest to what was measured."""
    return min(_FLEET, key=lambda on: abs(log(_predict_ms(run.step, on) / run.measured_ms)))


def _find_spreads(runs: Sequence[_Run]) -> dict[str, float]:
    """By GPU how far apart runs of one step lie at most, as a share of the shorter; "" is the largest of all."""
    repeats: dict[tuple[str, str], list[float]] = {}
    for run in runs:
        repeats.setdefault((_find_gpu(run), run.step.partition("-")[2]), []).append(run.measured_ms)
    spreads: dict[str, float] = {}
    for (on, _), times in repeats.items():
        if len(set(times)) > 1:
            spreads[on] = max(spreads.get(on, 0.0), max(times) / min(times) - 1.0)
    return spreads | {"": max(spreads.values(), default=0.0)}


def _make_pair(change: _Change, before: _Run, after: _Run, spreads: dict[str, float]) -> Case:
    ratio, on = after.measured_ms / before.measured_ms, _find_gpu(before)
    first, spread = _predict_ms(before.step, on), spreads.get(on, spreads[""])
    return Case(
        name=f"{_name_pair(change)} ({ratio - 1:+.1%} measured)",
        group=_CHANGES,
        question=Scenario(workload=load_captured_step(after.step), on=on),
        measured_ms=first * ratio,
        tags={"change": _BEYOND if abs(ratio - 1) > spread else "within the spread", "before_ms": f"{first:.4f}"},
        note=f"the measured ratio on {on}, where the step before is predicted at {first:.1f} ms; runs of one step "
        f"differ by {spread:.1%}",
    )


@cache
def _predict_ms(step: str, on: str) -> float:
    return 1e3 * predict(Scenario(workload=load_captured_step(step), on=on)).iteration
