"""Kineto timelines small enough to work out by hand; times are microseconds."""

from __future__ import annotations

import json

from traincast.traces.kineto import read_kineto
from traincast.traces.link import link_trace


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
    return link_trace(read_kineto(path))


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


def op(name, start, length, dims, tid=1):
    """An op of tensors of these shapes."""
    return event("cpu_op", name, start, length, tid, **{"Input Dims": dims, "Input type": ["float"] * len(dims)})


def small_events():
    """A step of 1 ms: a product of 400 us, an op that launches nothing, a sum, and a synchronisation."""
    return step(
        op("aten::mm", 100, 60, [[64, 64], [64, 64]]), launch(1, 120, 10),
        kernel(1, 150, 400, name="volta_sgemm_128x64"),
        event("cpu_op", "aten::view", 200, 20),
        op("aten::add", 300, 40, [[64], [64]]), launch(2, 310, 10),
        kernel(2, 560, 20, name="vectorized_elementwise_kernel"),
        event("cuda_runtime", "cudaDeviceSynchronize", 600, 5, correlation=50),
    )  # fmt: skip


def write_trace(path, events):
    """Writes events as a Kineto file."""
    path.write_text(json.dumps({"traceEvents": events}))
    return path


def write_two_ranks(folder, clock=0):
    """Two ranks of one all-reduce: rank 1 comes 300 us later than rank 0, and its clock is `clock` ahead."""
    write_trace(folder / "rank0.json", rank_events(100, wait_us=300))
    write_trace(folder / "rank1.json", rank_events(400, clock=clock))
    return folder
