"""What must hold for every schedule, whatever its durations."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.simulator.instructions import host, launch, record, run, sync_device, sync_event, sync_stream, wait
from traincast.simulator.schedule import Code

seconds = st.integers(0, 50).map(float)
stream = st.integers(0, 2)
thread = st.integers(0, 1)
event = st.integers(0, 1)
instruction = st.one_of(
    st.builds(host, seconds, thread),
    st.builds(launch, seconds, stream, seconds, thread),
    st.builds(sync_device, thread),
    st.builds(sync_stream, stream, thread),
    st.builds(record, event, stream, thread),
    st.builds(wait, event, stream, thread),
    st.builds(sync_event, event, thread),
)
programs = st.lists(instruction, min_size=1, max_size=30)


def length(program):
    return run(program)[1].latest


@given(programs)
@settings(max_examples=200, deadline=None)
def test_never_faster_than_any_thread_or_stream_alone(program):
    total = length(program)

    for t in (0, 1):
        assert total >= sum(i.host for i in program if i.thread == t)
    for s in (0, 1, 2):
        assert total >= sum(i.kernel for i in program if i.code is Code.LAUNCH and i.target == s)


@given(programs)
@settings(max_examples=200, deadline=None)
def test_never_slower_than_everything_in_sequence(program):
    assert length(program) <= sum(i.host + i.kernel for i in program)


@given(programs, st.data())
@settings(max_examples=200, deadline=None)
def test_a_longer_duration_never_shortens_the_step(program, data):
    index = data.draw(st.integers(0, len(program) - 1))
    extra = data.draw(seconds)
    slower = list(program)
    chosen = program[index]
    slower[index] = replace(chosen, host=chosen.host + extra)
    if chosen.code is Code.LAUNCH:
        slower[index] = replace(chosen, kernel=chosen.kernel + extra)

    assert length(slower) >= length(program)


@given(programs)
@settings(max_examples=100, deadline=None)
def test_renaming_streams_threads_and_events_changes_nothing(program):
    streams, threads, events = {0: 2, 1: 0, 2: 1}, {0: 1, 1: 0}, {0: 1, 1: 0}
    renamed = []
    for i in program:
        on_event = i.code is Code.EVENT_SYNCHRONIZE
        target = events[i.target] if on_event else streams.get(i.target, i.target)
        renamed.append(replace(i, thread=threads[i.thread], target=target, event=events.get(i.event, i.event)))

    assert length(renamed) == length(program)


@given(programs)
@settings(max_examples=100, deadline=None)
def test_kernels_of_a_stream_never_overlap_nor_start_before_their_launch(program):
    trace, _ = run(program)
    launches = [k for k, i in enumerate(program) if i.code is Code.LAUNCH]
    last = {}
    for n, k in enumerate(launches):
        assert trace.kernel_start[n] >= trace.host_issue[k]
        assert trace.kernel_start[n] >= last.get(program[k].target, 0.0)
        last[program[k].target] = trace.kernel_end[n]
