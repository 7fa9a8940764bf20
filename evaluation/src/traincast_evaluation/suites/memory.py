"""Peak memory, predicted against what was published: allocated or reserved bytes, and runs that were out of memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from traincast.simulator.parallelism.predict import predict_layout_memory
from traincast.utils.errors import TraincastError
from traincast.utils.metrics import ErrorRow, compute_error_row
from traincast_evaluation.suites.cases import LeftOut
from traincast_evaluation.suites.memory_litgpt import list_litgpt_outcomes
from traincast_evaluation.suites.memory_outcome import MemoryOutcome, make_outcome
from traincast_evaluation.suites.memory_recbole import list_recbole_outcomes
from traincast_evaluation.suites.memory_rows import MemoryCase, list_transformer_cases
from traincast_evaluation.suites.memory_torchrec import list_torchrec_outcomes

_HALVES = {"held back": True, "in view": False}


@dataclass(frozen=True, kw_only=True)
class MemoryEvaluation:
    """Errors by source and kind, every case, rows that were left out, and what fits of what was out of memory."""

    summary: tuple[ErrorRow, ...]
    outcomes: tuple[MemoryOutcome, ...]
    left_out: tuple[LeftOut, ...]
    notes: tuple[str, ...]


def evaluate_memory(data: Path, progress: Callable[[float], None] = lambda _: None) -> MemoryEvaluation:
    """Predicts every row of the tables with memory."""
    cases = list_transformer_cases(data)
    outcomes: list[MemoryOutcome] = []
    left_out: list[LeftOut] = []
    for number, case in enumerate(cases):
        found = case if isinstance(case, LeftOut) else _predict_case(case)
        (left_out if isinstance(found, LeftOut) else outcomes).append(found)  # type: ignore[arg-type]
        progress((number + 1) / len(cases))
    for row in (*list_litgpt_outcomes(data), *list_torchrec_outcomes(data), *list_recbole_outcomes(data)):
        (left_out if isinstance(row, LeftOut) else outcomes).append(row)  # type: ignore[arg-type]
    if not outcomes:
        raise TraincastError(f"evaluate memory: no row of '{data}' can be predicted")
    return MemoryEvaluation(
        summary=tuple(_summarise(outcomes)),
        outcomes=tuple(outcomes),
        left_out=tuple(left_out),
        notes=(*_note_out_of_memory(outcomes), *_note_left_out_sources(outcomes)),
    )


def _predict_case(case: MemoryCase) -> MemoryOutcome | LeftOut:
    try:
        memory = replace(predict_layout_memory(case.model, case.platform, case.layout), settings=case.settings)
    except TraincastError as error:
        return LeftOut(name=case.name, group=case.source, reason=str(error))
    return make_outcome(case.name, case.source, case.kind, case.measured, memory, held_back=case.held_back)


def _summarise(outcomes: Sequence[MemoryOutcome]) -> list[ErrorRow]:
    """Every source and kind of bytes, then its halves: rows held back, and those in view while rules were chosen."""
    measured = [one for one in outcomes if one.measured is not None]
    groups: dict[str, list[MemoryOutcome]] = {"all": measured}
    for key in dict.fromkeys((one.source, one.kind) for one in measured):
        some = [one for one in measured if (one.source, one.kind) == key]
        groups[", ".join(key)] = some
        halves = {half: [one for one in some if one.held_back == held] for half, held in _HALVES.items()}
        if all(halves.values()):
            groups |= {f"{', '.join(key)}: {half}": rows for half, rows in halves.items()}
    return [
        compute_error_row(
            "memory", name, [one.predicted for one in some], [one.measured or 0.0 for one in some],
            [one.name for one in some], inside=np.array([bool(one.covered) for one in some]),
        )
        for name, some in groups.items()
    ]  # fmt: skip


def _note_out_of_memory(outcomes: Sequence[MemoryOutcome]) -> list[str]:
    """How many runs that were out of memory are predicted to be, and how many that ran are called too large."""
    runs = [one for one in outcomes if one.source == "litgpt"]
    failed = [one for one in runs if one.measured is None]
    ran = [one for one in runs if one.measured is not None]
    if not failed or not ran:
        return []
    right, wrong = sum(not one.fits for one in failed), sum(not one.fits for one in ran)
    return [
        f"litgpt: {right} of {len(failed)} runs that were out of memory are said not to fit; of {len(ran)} that ran, "
        f"{wrong} are called too large"
    ]


def _note_left_out_sources(outcomes: Sequence[MemoryOutcome]) -> list[str]:
    """What intervals hold of a source that is left out: widened (or narrowed) until they hold 90 % of the others."""
    measured = [one for one in outcomes if one.measured is not None]
    held, parts = 0, list[str]()
    for source in dict.fromkeys(one.source for one in measured):
        others = [one.distance for one in measured if one.source != source]
        mine = np.array([one.distance for one in measured if one.source == source])
        if not others:
            return []
        inside = int((mine <= float(np.quantile(others, 0.9, method="higher"))).sum())
        held += inside
        parts.append(f"{source} {inside} of {len(mine)}")
    return [
        f"intervals set by the other sources hold {held / len(measured):.0%} of a source that is left out: "
        + ", ".join(parts)
    ]
