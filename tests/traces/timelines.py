"""Kineto timelines small enough to work out by hand; times are microseconds."""

from __future__ import annotations

import json

from traincast.traces.kineto import read_kineto
from traincast.traces.link import link


def event(cat, name, ts, dur, tid=1, **args):
    on_device = cat in ("kernel", "gpu_memcpy", "gpu_memset")
    return {
        "ph": "X",
        "cat": cat,
        "name": name,
        "pid": 0 if on_device else 9,
        "tid": tid,
        "ts": ts,
        "dur": dur,
        "args": args,
    }


def linked(tmp_path, events):
    path = tmp_path / "t.json"
    path.write_text(json.dumps({"traceEvents": events}))
    return link(read_kineto(path))


def step(*events, start=0, length=1000):
    return [event("user_annotation", "ProfilerStep#3", start, length), *events]


def launch(correlation, ts, dur=5, tid=1, name="cudaLaunchKernel"):
    return event("cuda_runtime", name, ts, dur, tid, correlation=correlation)


def kernel(correlation, ts, dur, stream=7, name="gemm"):
    return event("kernel", name, ts, dur, stream, correlation=correlation, stream=stream, device=0)


def rank_events(work_us, *, clock=0, size=1024, kind="all_reduce", wait_us=0, collectives=1):
    """A rank whose host works for `work_us`, all-reduces in 50 us (plus `wait_us` for others) and waits for it."""
    at, events, tensor = 10, [], {"Input Dims": [[size]], "Input type": ["float"]}
    for number in range(collectives):
        begin = at + work_us
        events += [
            event("cpu_op", "aten::mm", at, work_us - 5),
            event("cpu_op", "c10d::allreduce_", begin, 15, **tensor),
            event("user_annotation", f"nccl:{kind}", begin + 1, 13, **tensor),
            launch(number + 1, begin + 5),
            kernel(number + 1, begin + 10, 50 + wait_us, stream=20, name="ncclKernel_AllReduce_RING"),
            event("cuda_runtime", "cudaStreamSynchronize", begin + 20, 45 + wait_us, correlation=90 + number),
        ]
        at = begin + 70 + wait_us
    return [{**e, "ts": e["ts"] + clock} for e in step(*events, length=at + 5)]
