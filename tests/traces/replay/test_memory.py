"""How much memory the analysis of a long trace takes: by its events, whatever is asked of them."""

from __future__ import annotations

import json
import tracemalloc
import weakref
from dataclasses import replace

import pytest

from tests.traces.timelines import event, kernel, launch, linked, step
from traincast.simulator import schedule
from traincast.traces.replay import steps as steady
from traincast.traces.replay import timeline
from traincast.traces.replay.analysis import analyse_traces
from traincast.traces.replay.timeline import make_timeline_instructions

MOST_BYTES = 900  # an event; the text of a trace has 130 (here) to 600 of its own


def write_long(path, steps, ops=100):
    """Steps of ops that each launch a kernel, three events an op."""
    events = []
    for number in range(steps):
        begin = 20_000 * number
        events.append(event("user_annotation", f"ProfilerStep#{number}", begin, 19_000))
        for i in range(ops):
            at, call = begin + 10 + 150 * i, number * ops + i
            events.append(event("cpu_op", f"aten::mm_{i % 7}", at, 100))
            events += [launch(call, at + 20), kernel(call, at + 40, 80, name=f"gemm_{i % 5}")]
    path.write_text(json.dumps({"traceEvents": events}))
    return len(events)


def peak_of_analysis(path):
    tracemalloc.start()
    try:
        analyse_traces([path])
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_memory_grows_by_no_more_than_so_many_bytes_an_event(tmp_path, monkeypatch):
    monkeypatch.setattr(steady, "_MOST_VALUES", 1)  # what-ifs one by one, as those of a trace of a gigabyte
    monkeypatch.setattr(schedule, "_LONG", 1)
    monkeypatch.setattr(timeline, "_ROWS", 256)
    short, long = (tmp_path / name for name in ("short.json", "long.json"))
    fewer, more = write_long(short, 5), write_long(long, 45)
    analyse_traces([short])  # what is loaded once

    grown = peak_of_analysis(long) - peak_of_analysis(short)

    assert grown / (more - fewer) < MOST_BYTES


@pytest.mark.parametrize("together", [1, 3])
def test_what_ifs_of_a_long_trace_are_made_a_few_at_a_time(tmp_path, monkeypatch, together):
    tied = linked(tmp_path, step(launch(1, 10), kernel(1, 20, 80), launch(2, 200), kernel(2, 210, 50)))
    instructions = steady.select_marked_steps(tied, make_timeline_instructions(tied))
    monkeypatch.setattr(steady, "_MOST_VALUES", together * len(instructions.row))
    alive, most = weakref.WeakSet(), []

    def variants():
        for factor in range(1, 8):
            variant = replace(instructions, host_seconds=factor * instructions.host_seconds)
            alive.add(variant)
            most.append(len(alive))
            yield variant
            del variant

    seconds = steady.compute_steady_seconds(tied, variants())

    assert seconds.tolist() == pytest.approx([factor * seconds[0] for factor in range(1, 8)])
    assert max(most) <= 2 * together  # one batch, and the next while it is gathered
