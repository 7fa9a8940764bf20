"""A first run on a device nobody has tried: every part of the measuring once, as a report to paste into an issue."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch

from traincast.calibration.bench.device import Device, run_timed
from traincast.utils.results import Records, Result

_RANKS_SECONDS = 60.0  # that ranks may take to find each other and answer
_TYPES = ("float32", "float16", "bfloat16", "int64", "int32", "uint8", "bool")
_TIMED_SECONDS, _MOST_PRODUCTS = 0.05, 2000  # of GEMMs
_STEADY = 0.25  # relative spread of the reference that a usable device stays below


@dataclass(frozen=True, repr=False)
class SelfCheck(Result):
    """Parts by name with what they said; a part that failed says so with its error."""

    device: str
    parts: tuple[tuple[str, bool, str], ...]

    @property
    def passed(self) -> bool:
        """Whether every part did."""
        return all(good for _, good, _ in self.parts)

    def to_dict(self) -> dict[str, Any]:
        """The parts in order."""
        rows = [{"part": name, "passed": good, "said": notes} for name, good, notes in self.parts]
        return {"device": self.device, "passed": self.passed, "parts": rows}

    def headline(self) -> str:
        """The report."""
        lines = [f"self-check of {self.device}: {'passed' if self.passed else 'FAILED'}"]
        return "\n".join(
            [*lines, *(f"{'ok  ' if good else 'FAIL'} {name}: {notes}" for name, good, notes in self.parts)]
        )

    def records(self) -> Records:
        """Table "parts"."""
        return {"parts": self.to_dict()["parts"]}


def check_device(open_it: Callable[[], Device], kind: str) -> SelfCheck:
    """Opens a device and tries every part that a run of microbenchmarks needs."""
    parts: list[tuple[str, bool, str]] = []

    def part(name: str, work: Callable[[], str]) -> bool:
        try:
            parts.append((name, True, work()))
        except Exception as error:  # whatever it is belongs into the report
            parts.append((name, False, f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"))
        return parts[-1][1]

    opened: list[Device] = []
    if part("open", lambda: opened.append(open_it()) or "done"):  # type: ignore[func-returns-value]
        device = opened[0]
        part("identity", lambda: ", ".join(f"{k} {v}" for k, v in device.identity().to_dict().items()))
        part("clock", lambda: _check_clock(device))
        part("memory", lambda: _check_memory(device))
        part("timer", lambda: _check_timer(device))
        part("flush", lambda: f"{1e3 * run_timed(device, device.flush).wall:.2f} ms")
        part("reference", lambda: _check_reference(device))
        for name, work in [*_check_copies(device), ("profiler", lambda: _check_profiler(device)), *_check_ops(device)]:
            part(name, work)
        part("collectives", lambda: _check_collectives(device))
        part("store", lambda: _check_store(device))
    return SelfCheck(kind, tuple(parts))


def _check_clock(device: Device) -> str:
    from traincast.calibration.bench.device import Reference

    now = Reference(device).clock_mhz()
    return f"{now:.0f} MHz under load" if now else "cannot be read (on NVIDIA: pip install nvidia-ml-py)"


def _check_memory(device: Device) -> str:
    made = [device.allocate((256, 256), dtype) for dtype in _TYPES]
    right = all(tensor.dtype is getattr(torch, dtype) for tensor, dtype in zip(made, _TYPES, strict=True))
    if not right or bool(made[0].isnan().any()):
        raise RuntimeError("tensors are not what was asked for")
    return ", ".join(filter(None, [f"{device.free_bytes() / 1e9:.1f} GB free", device.neighbours()]))


def _check_timer(device: Device) -> str:
    """The device's own clock against the host's, over work that is long enough for both."""
    from traincast.calibration.bench.device import Reference

    once = Reference(device).seconds().wall
    left, right = (device.allocate((1024, 1024)) for _ in range(2))
    many = max(1, min(_MOST_PRODUCTS, round(_TIMED_SECONDS / max(once, 1e-6))))

    def work() -> None:
        for _ in range(many):
            torch.mm(left, right)

    run_timed(device, work)
    begin = time.perf_counter()
    taken = run_timed(device, work).wall
    passed = time.perf_counter() - begin
    if not 0.5 * passed < taken < 1.05 * passed:
        raise RuntimeError(f"{1e3 * taken:.2f} ms by the device's clock, {1e3 * passed:.2f} by the host's")
    return f"{1e3 * taken:.2f} ms, by the host's clock {1e3 * passed:.2f}; nothing at all {_check_empty_timing(device)}"


def _check_empty_timing(device: Device) -> str:
    """What two marks with nothing between are apart, and a small op whose launch is left out and counted."""
    small = device.allocate((256, 256))
    empty = min(run_timed(device, lambda: None, queued=True).wall for _ in range(5))
    alone, launched = (
        min(run_timed(device, lambda: torch.relu(small), queued=queued).wall for _ in range(5))
        for queued in (True, False)
    )
    return f"{1e6 * empty:.1f} us, a small op {1e6 * alone:.1f} (with its launch {1e6 * launched:.1f})"


def _check_reference(device: Device) -> str:
    from traincast.calibration.bench.device import Reference, run_series, summarise_series

    reference = Reference(device)
    figures = summarise_series(run_series(device, reference, reference.seconds, repeats=9), "wall")
    if figures.spread > _STEADY:
        raise RuntimeError(f"its time varies by {figures.spread:.0%}; end other programs")
    return f"{1e3 * figures.reference:.3f} ms, spread {figures.spread:.1%}"


def _check_copies(device: Device) -> list[tuple[str, Callable[[], str]]]:
    """Every way of copying once, a megabyte."""
    from traincast.calibration.bench.collectives import CopyCall, CopyTask, list_copy_ways

    def once(task: CopyTask) -> str:
        call = CopyCall(task, device, sets=1)
        call(0)
        return f"{1e6 * run_timed(device, lambda: call(0)).wall:.1f} us for {task.nbytes >> 20} MB"

    tasks = [CopyTask(direction, memory, 1 << 20) for direction, memory in list_copy_ways(device.kind)]
    return [(f"copy {task.direction}, {task.memory}", lambda task=task: once(task)) for task in tasks]  # type: ignore[misc]


def _check_profiler(device: Device) -> str:
    from traincast.calibration.bench.measure import record_trace

    left, right = (device.allocate((64, 64)) for _ in range(2))
    with TemporaryDirectory() as folder:
        path = Path(folder) / "step.json"
        record_trace(lambda: left @ right, device, path)
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    kernels = sum(event.get("cat") == "kernel" for event in events)
    if device.kind == "cuda" and not kernels:
        raise RuntimeError(f"{len(events)} events and no kernel among them; CUPTI or roctracer does not answer")
    return f"{len(events)} events, {kernels} kernels"


def _check_collectives(device: Device) -> str:
    from traincast.calibration.bench.collectives import make_collective_job
    from traincast.calibration.bench.parts import count_possible_ranks
    from traincast.calibration.bench.ranks import run_ranks
    from traincast.costs.cpu.collectives import CpuCollective

    ranks = count_possible_ranks(device)
    if ranks < 2:
        return "not tried: one core or GPU has nobody to communicate with"
    on_result: list[dict[str, Any]] = []
    job = make_collective_job([CpuCollective("all_reduce", 1 << 20)] * ranks, seconds=0.05)
    run_ranks([job], ranks, each=on_result.append, seconds=_RANKS_SECONDS, device=device.kind)
    if not on_result:
        raise RuntimeError(f"{ranks} ranks gave no answer within {_RANKS_SECONDS:.0f} s")
    return f"all-reduce of 1 MB between {ranks} ranks in {1e3 * median(on_result[0]['step']):.2f} ms"


def _check_store(device: Device) -> str:
    from traincast.calibration.bench.bench import make_task_key, measure_task
    from traincast.calibration.bench.device import Reference
    from traincast.calibration.bench.plans import plan_benchmarks
    from traincast.calibration.bench.store import Store

    task = next(islice(plan_benchmarks(1, ("relu",)), 1))
    with TemporaryDirectory() as folder:
        Store(Path(folder), device.identity()).append(
            make_task_key(task), measure_task(device, Reference(device), task)
        )
        held = Store(Path(folder), device.identity())
    return f"{len(held)} sample written and read again"


def _check_ops(device: Device) -> list[tuple[str, Callable[[], str]]]:
    """One op of every kind of the plan, small: that it runs, and how long."""
    from traincast.calibration.bench.bench import OpCall
    from traincast.calibration.bench.plans import KINDS, plan_benchmarks

    def once(kind: str) -> str:
        task = next(islice(plan_benchmarks(1, (kind,)), 1))
        call = OpCall(task.signature, device)
        call()
        return f"{1e6 * run_timed(device, call).wall:.1f} us"

    return [(kind, lambda kind=kind: once(kind)) for kind in KINDS]  # type: ignore[misc]
