from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from traincast.models.placement import ShardingKind
from traincast.models.sharded_dlrm.layout import ScopeRole
from traincast.planner.sharding.max_plus import Part, Skip, Slot, compile_simulation
from traincast.simulator.many_ranks import Clocks, simulate_rank
from traincast.simulator.schedule import Code, Schedule

SLOTS = [Slot(Part.BACKWARD, ShardingKind.TABLE_WISE, group) for group in range(6)]
MEETINGS = {
    "world": Slot(ScopeRole.OUT, ShardingKind.ROW_WISE),
    "within": Slot(ScopeRole.OUT, ShardingKind.TABLE_ROW_WISE),
    "across": Slot(ScopeRole.OUT_ACROSS, ShardingKind.TABLE_ROW_WISE),
}
GAP = 0.5


def _schedule(random, count, threads=2, streams=3, events=4):
    codes = random.choice(list(Code), size=count, p=[0.3, 0.4, 0.02, 0.06, 0.08, 0.08, 0.03, 0.03])
    target = random.integers(0, streams, size=count)
    target[codes == Code.EVENT_SYNCHRONIZE] = random.integers(0, events)
    target[codes == Code.JOIN] = random.integers(0, threads)
    nothing = np.full(count, -1, dtype=np.int32)
    return Schedule(
        code=codes.astype(np.int32),
        thread=random.integers(0, threads, size=count).astype(np.int32),
        target=target.astype(np.int32),
        event=random.integers(0, events, size=count).astype(np.int32),
        name=nothing, part=nothing, runtime=nothing, call=nothing, op=nothing, scope=nothing,
        num_threads=threads, num_streams=streams, num_events=events,
    )  # fmt: skip


def _simulated(schedule, host, kernel):
    clocks = Clocks.at_zero(schedule, GAP)
    simulate_rank(schedule, host, kernel, clocks, gap=GAP)
    first = clocks.latest
    clocks.threads = [max(clocks.threads)] * len(clocks.threads)
    simulate_rank(schedule, host, kernel, clocks, gap=GAP)
    return clocks.latest - first


@pytest.mark.parametrize("seed", range(20))
def test_a_compiled_walk_is_the_walk(seed):
    random = np.random.default_rng(seed)
    schedule = _schedule(random, 60)
    launches = np.flatnonzero(schedule.code == Code.LAUNCH)
    opened = {int(at): SLOTS[i] for i, at in enumerate(random.choice(launches, size=min(6, len(launches))))}
    host = np.where(schedule.code == Code.HOST, random.uniform(0, 2, size=60), 0.0)
    kernel = np.where(schedule.code == Code.LAUNCH, random.uniform(0, 5, size=60), 0.0)
    code = compile_simulation(schedule, host, kernel, opened, gap=GAP)
    open_seconds = random.uniform(0, 20, size=(7, 6))
    durations = {slot: np.tile(open_seconds[:, [i]], (1, 2)) for i, slot in enumerate(SLOTS)}
    found = code.seconds(durations, 2, (7, 2))
    for plan in range(7):
        longer = kernel.copy()
        for at, slot in opened.items():
            longer[at] += open_seconds[plan, slot.group]
        assert found[plan] == pytest.approx(_simulated(schedule, host, longer), abs=1e-9)


def _without(schedule, host, kernel, keep, instead):
    """The schedule without some instructions; `instead` is a host instruction in place of the first of them."""
    gone = np.flatnonzero(~keep)
    kept = keep.copy()
    kept[gone[0]] = True
    columns = {
        name: getattr(schedule, name)[kept].copy()
        for name in ("code", "thread", "target", "event", "name", "part", "runtime", "call", "op", "scope")
    }
    place = int(kept[: gone[0]].sum())
    columns["code"][place] = Code.HOST
    host, kernel = host[kept].copy(), kernel[kept].copy()
    host[place] = instead
    return replace(schedule, **columns), host, kernel


@pytest.mark.parametrize("seed", range(20))
def test_ranks_skip_what_they_do_not_have(seed):
    random = np.random.default_rng(100 + seed)
    schedule = _schedule(random, 60)
    host = np.where(schedule.code == Code.HOST, random.uniform(0, 2, size=60), 0.0)
    kernel = np.where(schedule.code == Code.LAUNCH, random.uniform(0, 5, size=60), 0.0)
    first = int(random.integers(0, 50))
    last = int(random.integers(first + 1, 61))
    code = compile_simulation(schedule, host, kernel, {}, gap=GAP, skips=[Skip(first, last, SLOTS[0], 0.7)])
    keep = (np.arange(60) < first) | (np.arange(60) >= last)
    for held, expected in (
        (1.0, _simulated(schedule, host, kernel)),
        (0.0, _simulated(*_without(schedule, host, kernel, keep, 0.7))),
    ):
        assert code.seconds({SLOTS[0]: np.full((1, 2), held)}, 2, (1, 2))[0] == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("seed", range(10))
def test_the_host_may_have_more_to_do_before_an_instruction(seed):
    random = np.random.default_rng(200 + seed)
    schedule = _schedule(random, 60)
    host = np.where(schedule.code == Code.HOST, random.uniform(0, 2, size=60), 0.0)
    kernel = np.where(schedule.code == Code.LAUNCH, random.uniform(0, 5, size=60), 0.0)
    places = random.choice(60, size=3, replace=False).tolist()
    code = compile_simulation(schedule, host, kernel, {}, gap=GAP, late={at: SLOTS[i] for i, at in enumerate(places)})
    more = random.uniform(0, 9, size=3)
    busier = host.copy()
    busier[places] += more
    found = code.seconds({SLOTS[i]: np.full((1, 1), late) for i, late in enumerate(more)}, 2, (1, 2))[0]
    assert found == pytest.approx(_simulated(schedule, busier, kernel), abs=1e-9)


def _collective(kind):
    """Two launches on one stream; the second waits for other ranks."""
    count = 2
    nothing = np.full(count, -1, dtype=np.int32)
    zeros = np.zeros(count, dtype=np.int32)
    schedule = Schedule(
        code=np.full(count, Code.LAUNCH, dtype=np.int32), thread=zeros, target=zeros, event=nothing, name=nothing,
        part=nothing, runtime=nothing, call=nothing, op=nothing, scope=nothing, num_threads=1, num_streams=1,
        num_events=0,
    )  # fmt: skip
    opened = {0: SLOTS[0], 1: MEETINGS[kind]}
    return compile_simulation(schedule, np.zeros(2), np.zeros(2), opened, gap=0.0)


@pytest.mark.parametrize(
    ("kind", "expected"),
    # ranks 0, 1 on one node and 2, 3 on the other compute 1, 2, 3, 5; the collective lasts 10
    [("world", 15.0), ("within", 15.0), ("across", 15.0)],
)
def test_ranks_wait_for_those_they_meet(kind, expected):
    durations = {SLOTS[0]: np.array([[1.0, 2.0, 3.0, 5.0]]), MEETINGS[kind]: np.full((1, 1), 10.0)}
    assert _collective(kind).seconds(durations, 2, (1, 4))[0] == expected


def test_ranks_do_not_wait_for_other_groups():
    computed, lasting = np.array([[9.0, 2.0, 3.0, 5.0]]), np.array([[0.0, 0.0, 10.0, 10.0]])
    durations = {SLOTS[0]: computed, **dict.fromkeys(MEETINGS.values(), lasting)}
    # within a node rank 0 holds up rank 1 only
    assert _collective("within").seconds(durations, 2, (1, 4))[0] == 15.0
    # across nodes it meets rank 2: the first collective starts at 9 and ends for rank 2 at 19, the second at 22 and 32
    assert _collective("across").seconds(durations, 2, (1, 4))[0] == 13.0
