"""What a step is made of, rank by rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from traincast.ir.program import Memory, peak_memory
from traincast.simulator.crew import CrewWalk
from traincast.simulator.instructions import StepInstructions
from traincast.simulator.prediction.step import StepWalk
from traincast.simulator.timeline import covered_seconds
from traincast.utils.arrays import FloatArray

_TOGETHER = 1e-3  # ranks that are done within this share of a step are done together


@dataclass(frozen=True, kw_only=True)
class RankAnswer:
    """One step of the ranks that do the same. Times are seconds.

    `exposed_comm` is the time in which the device only exchanges data or waits for others to; `waiting` the part of
    its collectives in which a rank was there and others were not; `compute` the time in which other kernels run.
    `memory` is the peak on its device.
    """

    ranks: tuple[int, ...]
    iteration: float
    device_active: float
    device_idle: float
    compute: float
    host: float
    exposed_comm: float
    waiting: float
    memory: Memory


@lru_cache(maxsize=8)  # each holds a whole step
def _memory(instructions: StepInstructions) -> list[Memory]:
    """Peak memory of every program."""
    return [peak_memory(program) for program in instructions.programs]


def rank_answers(walked: StepWalk) -> tuple[RankAnswer, ...]:
    """One answer a class of ranks."""
    tables = [_Totals(walked, crew, walk) for crew, walk in enumerate(walked.walks)]
    held = _memory(walked.instructions)
    fullest = [held[program] for program in walked.classes.program]
    for c, memory in zip(walked.classes.of, held, strict=True):
        # ranks that take the same time need not hold the same
        fullest[c] = max(fullest[c], memory, key=lambda one: one.peak_bytes)
    return tuple(
        tables[crew].answer(row, ranks, memory)
        for (crew, row), ranks, memory in zip(walked.place, walked.ranks, fullest, strict=True)
    )


class _Totals:
    """Totals of all ranks of a crew."""

    def __init__(self, walked: StepWalk, number: int, walk: CrewWalk) -> None:
        self.seconds = walk.latest() - walked.previous[number]
        self.host = walk.crew.host_seconds.sum(axis=1)
        exchanges = np.zeros(len(walk.blocks.launch_order), dtype=np.bool_)
        exchanges[[walk.blocks.blocks[block].first for block in walk.blocks.meetings.values()]] = True
        met = exchanges.copy()
        exchanges[walk.crew.transfer_launches(walk.blocks)] = True
        self.active = covered_seconds(walk.starts.T, walk.ends.T)
        self.compute = self.active
        self.waiting: FloatArray = np.zeros(walk.crew.size)
        if exchanges.any():
            self.compute = covered_seconds(walk.starts[~exchanges].T, walk.ends[~exchanges].T)
            m = walked.meetings
            mine = m.crew == number
            exchanging = np.bincount(m.row[mine], weights=m.seconds[m.meeting[mine]], minlength=walk.crew.size)
            self.waiting = (walk.ends - walk.starts)[met].sum(axis=0) - exchanging

    def answer(self, row: int, ranks: tuple[int, ...], memory: Memory) -> RankAnswer:
        """One rank's, which stands for `ranks`."""
        seconds, active, compute = (float(column[row]) for column in (self.seconds, self.active, self.compute))
        return RankAnswer(
            ranks=ranks,
            iteration=seconds,
            device_active=active,
            device_idle=max(seconds - active, 0.0),
            compute=compute,
            host=float(self.host[row]),
            exposed_comm=active - compute,
            waiting=max(float(self.waiting[row]), 0.0),
            memory=memory,
        )


def imbalance(answers: Sequence[RankAnswer]) -> float:
    """How much longer the busiest rank computes than the mean, as a share of the mean."""
    compute = np.array([answer.compute for answer in answers])
    mean = float(np.average(compute, weights=[len(answer.ranks) for answer in answers]))
    return float(compute.max()) / mean - 1.0 if mean > 0 else 0.0


def slowest_class(walked: StepWalk, answers: tuple[RankAnswer, ...]) -> int:
    """The class of ranks that the others wait for: of those done last, the one that waited least. Of the stages of a
    pipeline, which are done one after the other, the one that computes longest."""
    if any(exchange.replicated for calls in walked.instructions.calls for exchange in calls.exchange[:1]):
        return max(range(len(answers)), key=lambda c: answers[c].compute)
    latest = walked.class_latest()
    last = np.flatnonzero(latest >= latest.max() - _TOGETHER * walked.seconds)
    return int(min(last.tolist(), key=lambda c: answers[c].waiting))
