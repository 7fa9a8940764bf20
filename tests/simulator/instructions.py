"""A small language for schedules, so that simulations can be worked out by hand."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from traincast.simulator.many_ranks import Clocks, RankGroup, RankTimes, simulate_rank
from traincast.simulator.schedule import Code, Schedule


@dataclass(frozen=True)
class Instruction:
    code: Code
    thread: int = 0
    target: int = -1
    event: int = -1
    host: float = 0.0
    kernel: float = 0.0


def host(seconds, thread=0):
    return Instruction(Code.HOST, thread, host=seconds)


def launch(kernel, stream=0, call=0.0, thread=0):
    return Instruction(Code.LAUNCH, thread, stream, host=call, kernel=kernel)


def sync_device(thread=0):
    return Instruction(Code.DEVICE_SYNCHRONIZE, thread)


def sync_stream(stream, thread=0):
    return Instruction(Code.STREAM_SYNCHRONIZE, thread, stream)


def record(event, stream, thread=0):
    return Instruction(Code.EVENT_RECORD, thread, stream, event)


def wait(event, stream, thread=0):
    return Instruction(Code.STREAM_WAIT_EVENT, thread, stream, event)


def sync_event(event, thread=0):
    return Instruction(Code.EVENT_SYNCHRONIZE, thread, event, event)


def join(thread, other):
    return Instruction(Code.JOIN, thread, other)


def schedule_of(program: list[Instruction]) -> Schedule:
    n = len(program)
    blank = np.full(n, -1, dtype=np.int32)
    launches = [i.code is Code.LAUNCH for i in program]
    call = blank.copy()
    call[launches] = np.arange(sum(launches), dtype=np.int32)
    on_stream = (Code.LAUNCH, Code.STREAM_SYNCHRONIZE, Code.EVENT_RECORD, Code.STREAM_WAIT_EVENT)
    joined = [i.target for i in program if i.code is Code.JOIN]
    return Schedule(
        code=np.array([i.code for i in program], dtype=np.int32),
        thread=np.array([i.thread for i in program], dtype=np.int32),
        target=np.array([i.target for i in program], dtype=np.int32),
        event=np.array([i.event for i in program], dtype=np.int32),
        name=blank,
        part=blank,
        runtime=blank,
        call=call,
        op=blank,
        scope=blank,
        num_threads=max([i.thread for i in program] + joined, default=0) + 1,
        num_streams=max([i.target for i in program if i.code in on_stream], default=0) + 1,
        num_events=max([i.event for i in program], default=-1) + 1,
    )


def run(program: list[Instruction], gap: float = 0.0) -> tuple[RankTimes, Clocks]:
    schedule = schedule_of(program)
    clocks = Clocks.at_zero(schedule, gap)
    host_seconds = np.array([i.host for i in program])
    kernel_seconds = np.array([i.kernel for i in program])
    return simulate_rank(schedule, host_seconds, kernel_seconds, clocks, gap=gap), clocks


def rank_group_of(*ranks: list[Instruction]) -> RankGroup:
    """Ranks that execute the same instructions with durations of their own."""
    host_seconds = np.array([[i.host for i in program] for program in ranks])
    kernel_seconds = np.array([[i.kernel for i in program] for program in ranks])
    return RankGroup(schedule_of(ranks[0]), host_seconds, kernel_seconds)
