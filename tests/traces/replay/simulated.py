"""Steps of a made-up run, simulated event by event, and written as the trace that a profiler would make of them.

The simulation knows nothing of the replay: one host thread issues calls into queues of a limited depth, streams run
kernels in order, and some kernels wait for others. Times are microseconds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from tests.traces.timelines import event

GAP = 1.0  # between two kernels of a stream


@dataclass(frozen=True)
class Call:
    """A launch: the host works before it, then calls; its kernels (name, length) follow each other on a stream.

    `late` keeps each kernel of it. `waits_for` is the number of an earlier call of the step whose last kernel must
    have ended. A call without kernels makes the host wait for its stream.
    """

    work: float
    kernels: tuple[tuple[str, float], ...]
    op: str = "aten::mm"
    stream: int = 7
    late: float = 0.0
    waits_for: int = -1
    length: float = 4.0


@dataclass(frozen=True)
class Run:
    """A step that repeats, and how many calls per stream's queue takes."""

    calls: tuple[Call, ...]
    depth: int = 1024

    def halved(self, what):
        """The same with half the time for the host or for kernels of this name."""
        if what == "host":
            return replace(self, calls=tuple(replace(c, work=c.work / 2, length=c.length / 2) for c in self.calls))
        calls = (replace(c, kernels=tuple((n, t / 2 if what in n else t) for n, t in c.kernels)) for c in self.calls)
        return replace(self, calls=tuple(calls))

    def simulate(self, steps, *, recorded=True):
        """The moments at which every step was issued and done, and all events, if they are to be recorded."""
        return _Simulation(self, recorded).run(steps)

    @cache  # noqa: B019 - a few runs of these tests
    def step_us(self):
        """What a step takes when the run has settled."""
        _, done, _ = self.simulate(160, recorded=False)
        return (done[-1] - done[-41]) / 40

    def gain(self, what):
        """What a step saves, as a share of itself, with half the time for something."""
        return 1 - self.halved(what).step_us() / self.step_us()

    def trace(self, first, count):
        """Kineto events of `count` steps from number `first` on; of kernels launched earlier only these are there."""
        issued, _, events = self.simulate(first + count)
        begin, end = issued[first], issued[first + count]
        markers = [
            event("user_annotation", f"ProfilerStep#{n}", issued[n], issued[n + 1] - issued[n])
            for n in range(first, first + count)
        ]
        recorded = [
            e for e in events
            if (e["cat"] in ("kernel",) and e["ts"] + e["dur"] > begin and e["args"]["issued"] <= end)
            or (e["cat"] != "kernel" and begin <= e["ts"] < end)
        ]  # fmt: skip
        return markers + recorded


class _Simulation:
    def __init__(self, run, recorded):
        self.run_of, self.recorded, self.now, self.number = run, recorded, 0.0, 0
        self.free, self.ends, self.events = {}, {}, []

    def run(self, steps):
        issued, done = [0.0], []
        for _ in range(steps):
            last = {}
            for place, call in enumerate(self.run_of.calls):
                self._call(call, place, last)
            issued.append(self.now)
            done.append(max(self.now, *self.free.values()))
        return issued, done, self.events

    def _call(self, call, place, last):
        begin, self.number = self.now, self.number + 1
        self.now += call.work
        if not call.kernels:
            start = self.now
            self.now = max(self.now, self.free.get(call.stream, 0.0)) + 1.0
            self._event("cuda_runtime", "cudaStreamSynchronize", start, self.now - start)
            return
        if call.waits_for >= 0:
            self._event("cuda_runtime", "cudaStreamWaitEvent", self.now - 0.5, 0.25)
            self.number += 1
        start, queue = self.now, self.ends.setdefault(call.stream, [])
        if len(queue) >= self.run_of.depth:
            self.now = max(self.now, queue[-self.run_of.depth])
        self.now += call.length
        many = len(call.kernels) > 1
        self._event("cuda_runtime", "cudaGraphLaunch" if many else "cudaLaunchKernel", start, self.now - start)
        self._event("cpu_op", call.op, begin + 0.1 * call.work, self.now - begin - 0.1 * call.work)
        for name, length in call.kernels:
            ready = max(self.now, self.free.get(call.stream, -GAP) + GAP, last.get(call.waits_for, 0.0)) + call.late
            self._event("kernel", name, ready, length, call.stream)
            self.free[call.stream] = last[place] = ready + length
        queue.append(self.free[call.stream])

    def _event(self, cat, name, start, length, stream=None):
        if not self.recorded:
            return
        known = {"correlation": self.number}
        if stream is not None:
            known |= {"stream": stream, "device": 0, "issued": self.now}
        self.events.append(event(cat, name, start, length, stream or 1, **known))
