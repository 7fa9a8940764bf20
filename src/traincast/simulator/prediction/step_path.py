"""The critical path of a predicted step, in the words of its ops."""

from __future__ import annotations

from collections.abc import Iterable

from traincast.simulator.critical import PathPart, find_critical_path
from traincast.simulator.prediction.step import StepSimulation
from traincast.utils.totals import sum_by_key

HOST = "host"


def find_step_path(simulated: StepSimulation) -> list[PathPart]:
    """The critical path over all ranks, from the end of the step before to that of this one."""
    begin = max(float(previous.max()) for previous in simulated.previous)
    class_at = {place: c for c, place in enumerate(simulated.place)}
    parts = []
    for segment in find_critical_path(simulated.walks, simulated.meetings):
        if segment.end <= begin:  # the host may have begun this step before the last one was done
            continue
        c = class_at[segment.group, segment.row]
        what, op, name = _label_path_part(simulated, simulated.classes.program[c], segment.where, segment.instruction)
        parts.append(PathPart(simulated.ranks[c][0], what, op, name, max(segment.start, begin), segment.end))
    return parts


def _label_path_part(simulated: StepSimulation, p: int, where: str, instruction: int) -> tuple[str, str, str]:
    program, schedule = simulated.instructions.programs[p], simulated.instructions.schedules[p]
    if where == "device":
        call = simulated.instructions.lowered[p].calls[schedule.call[instruction]]
        op = program.symbolic[program.columns.op_signature[schedule.op[instruction]]].name
        return call.family.name, op, f"{call.family.name}: {call.kind}"
    scope = program.names[program.columns.scope_name[schedule.scope[instruction]]]
    return HOST, scope, f"{HOST}: {scope}"


def sum_path_by_activity(path: Iterable[PathPart]) -> dict[str, float]:
    """Seconds of the path by what it is spent on, longest first."""
    return sum_by_key((part.what, part.seconds) for part in path)


def sum_path_by_place(path: Iterable[PathPart]) -> dict[tuple[int, str], float]:
    """Seconds of the path by rank and op, longest first: the first one holds the step back most."""
    return sum_by_key(((part.rank, part.op), part.seconds) for part in path)
