"""The critical path of a predicted step, in the words of its ops."""

from __future__ import annotations

from collections.abc import Iterable

from traincast.simulator.critical import PathPart, critical_path
from traincast.simulator.prediction.step import StepWalk
from traincast.utils.totals import totals

HOST = "host"


def step_path(walked: StepWalk) -> list[PathPart]:
    """The critical path over all ranks, from the end of the step before to that of this one."""
    begin = max(float(previous.max()) for previous in walked.previous)
    class_at = {place: c for c, place in enumerate(walked.place)}
    parts = []
    for segment in critical_path(walked.walks, walked.meetings):
        if segment.end <= begin:  # the host may have begun this step before the last one was done
            continue
        c = class_at[segment.crew, segment.row]
        what, op, name = _labels(walked, walked.classes.program[c], segment.where, segment.instruction)
        parts.append(PathPart(walked.ranks[c][0], what, op, name, max(segment.start, begin), segment.end))
    return parts


def _labels(walked: StepWalk, p: int, where: str, instruction: int) -> tuple[str, str, str]:
    program, schedule = walked.instructions.programs[p], walked.instructions.schedules[p]
    if where == "device":
        call = walked.instructions.lowered[p].calls[schedule.call[instruction]]
        op = program.symbolic[program.columns.op_signature[schedule.op[instruction]]].name
        return call.family.name, op, f"{call.family.name}: {call.kind}"
    scope = program.names[program.columns.scope_name[schedule.scope[instruction]]]
    return HOST, scope, f"{HOST}: {scope}"


def seconds_by_what(path: Iterable[PathPart]) -> dict[str, float]:
    """Seconds of the path by what it is spent on, longest first."""
    return totals((part.what, part.seconds) for part in path)


def seconds_by_place(path: Iterable[PathPart]) -> dict[tuple[int, str], float]:
    """Seconds of the path by rank and op, longest first: the first one holds the step back most."""
    return totals(((part.rank, part.op), part.seconds) for part in path)
