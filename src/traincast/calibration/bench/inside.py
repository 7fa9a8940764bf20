"""Ops timed inside a step, and the host's time as what is left of the step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from functools import lru_cache
from typing import Any

import numpy as np
from torch.utils._python_dispatch import TorchDispatchMode

from traincast.calibration.bench.device import Device
from traincast.calibration.bench.plans import FAR_BYTES
from traincast.calibration.bench.small_steps import SmallStep
from traincast.calibration.bench.timing import Reference, Series, run_series, summarise_series
from traincast.calibration.waits import write_plan_text
from traincast.capturing.distributed import capture_distributed
from traincast.capturing.step import capture_step
from traincast.costs.cpu.caches import list_operands
from traincast.costs.cpu.cpu_ops import VIEWS, make_cpu_ops
from traincast.costs.cpu.features import count_touched_bytes
from traincast.costs.cpu.host_events import count_host_events
from traincast.costs.cpu.op_costs import read_table_access
from traincast.costs.cpu.samples import Sample
from traincast.ir.program import Program
from traincast.simulator.cpu.rank_plan import make_rank_plan
from traincast.utils.arrays import FloatArray

_WARM_UPS, _FEWEST, _REPEATS, _SECONDS = 3, 5, 8, 0.3  # of one visit; there are two, minutes apart
_LEAST_TIME = 1e-6  # of an op, in units of the reference: the clocks' own cost is taken off
_MOST_OPS = 60  # of a step that are kept: those that take longest


class _OpTimes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Reads both clocks before and after every op of a step; views run no kernel and count as the host's."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []
        self.marks: list[tuple[int, int, int, int]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs one op."""
        wall, busy = time.perf_counter_ns(), time.thread_time_ns()
        result = func(*args, **(kwargs or {}))
        self.marks.append((wall, busy, time.perf_counter_ns(), time.thread_time_ns()))
        self.names.append(func._schema.name)
        return result


def measure_inside(device: Device, reference: Reference, small: SmallStep) -> Iterator[tuple[str, Sample]]:
    """Runs a step as it is and with its ops timed: (name, sample) of its longest ops, and last of its host."""
    step = small.make(small.batch_size)
    for _ in range(_WARM_UPS):
        step()
    series = run_series(device, reference, step, repeats=_REPEATS, seconds=_SECONDS, prepare=step)
    yield from make_inside_samples(small, series, *time_ops_inside(step, reference))


def make_inside_samples(
    small: SmallStep, series: Series, names: Sequence[str], times: Mapping[str, FloatArray], ranks: int = 1
) -> Iterator[tuple[str, Sample]]:
    """The samples of a small step that this many processes ran at once: from repetitions of the whole step, and names
    and times of its ops as `ops_inside` gives them."""
    whole = {clock: summarise_series(series, clock) for clock in ("wall", "busy")}
    ratios = {clock: float(np.median(series.ratios(clock))) for clock in whole}
    kernels = np.array([name not in VIEWS for name in names])
    inside = {clock: float(times[clock][kernels].sum()) for clock in whole}
    rest = {clock: ratios[clock] - inside[clock] for clock in whole}
    program, title = _capture_small_step(small, ranks), make_inside_key(small, ranks)

    def sample(wall: float, busy: float, **fields: Any) -> Sample:
        return Sample(
            wall=wall * whole["wall"].reference, busy=busy * whole["busy"].reference,
            reference_wall=whole["wall"].reference, reference_busy=whole["busy"].reference,
            spread=whole["busy"].spread, between=0, ranks=ranks, **fields,
        )  # fmt: skip

    for op, fields in _select_longest_ops(program, names, times["busy"], small.access):
        taken = (max(float(times[clock][op]), _LEAST_TIME) for clock in ("wall", "busy"))
        yield f"{title}-{op}", sample(*taken, **fields)
    events = tuple(count_host_events(program).tolist())
    yield title, sample(**rest, signature=None, access="", events=events, kernels=inside["wall"])


def make_rank_step_sample(small: SmallStep, series: Series, ranks: int) -> tuple[str, Sample]:
    """(name, sample) of a whole small step of several ranks: its time on the wall, what a thread of it computed, and
    where its ranks exchange. Which op takes how long matters little there: they count alike."""
    program = _capture_small_step(small, ranks)
    plan = make_rank_plan(program, np.ones(program.num_ops))
    wall, busy = (summarise_series(series, clock) for clock in ("wall", "busy"))
    return f"{make_inside_key(small, ranks)}-whole", Sample(
        signature=None, between=0, access="", wall=float(np.median(series.ratios("wall"))) * wall.reference,
        busy=float(np.median(series.ratios("busy"))) * busy.reference, reference_wall=wall.reference,
        reference_busy=busy.reference, spread=wall.spread, ranks=ranks, plan=write_plan_text(plan),
    )  # fmt: skip


def make_inside_key(small: SmallStep, ranks: int = 1) -> str:
    """The name of a step's last sample, that of its host: once it is there, all are."""
    return small.name if ranks == 1 else f"{small.name}-on-{ranks}"


@lru_cache(maxsize=256)
def _capture_small_step(small: SmallStep, ranks: int) -> Program:
    sizes: dict[str, Any] = {"batch_size": small.batch_size, "name": small.name, "rebatch": False, "runs_on": "cpu"}
    if ranks == 1:
        return capture_step(small.make, **sizes).programs[0]
    return capture_distributed(small.make, world_size=ranks, ranks=[0], **sizes).programs[0]


def capture_first(steps: Iterable[SmallStep], ranks: int) -> None:
    """Captures steps before they are timed: the processor is then the ranks' alone."""
    for small in steps:
        _capture_small_step(small, ranks)


def time_ops_inside(
    step: Callable[[], object], reference: Reference, repeats: int | None = None
) -> tuple[list[str], dict[str, FloatArray]]:
    """Names of a step's ops in order, and medians of their times in units of the reference, by clock. Ranks that
    exchange in the step give the number of `repeats`; else time decides."""
    rows: dict[str, list[FloatArray]] = {"wall": [], "busy": []}
    least, most = (_FEWEST, _REPEATS) if repeats is None else (repeats, repeats)
    begin, names = time.monotonic(), list[str]()
    while len(rows["wall"]) < least or (len(rows["wall"]) < most and time.monotonic() - begin < _SECONDS):
        before, timed = reference.seconds(), _OpTimes()
        step()  # a step follows a step, not the reference, which would have taken its place in the caches
        with timed:
            step()
        after = reference.seconds()
        marks = np.array(timed.marks, dtype=np.float64)
        taken = 1e-9 * (marks[:, 2:] - marks[:, :2] - _measure_clock_cost())
        for number, clock in enumerate(rows):
            rows[clock].append(np.maximum(taken[:, number], 0.0) / np.sqrt(before.of(clock) * after.of(clock)))
        names = timed.names
    usual = len(names)
    return names, {clock: np.median([row for row in some if len(row) == usual], axis=0) for clock, some in rows.items()}


def _measure_clock_cost() -> FloatArray:
    """Nanoseconds that reading the clocks adds to an op, by clock."""
    marks = [
        (time.perf_counter_ns(), time.thread_time_ns(), time.perf_counter_ns(), time.thread_time_ns())
        for _ in range(20)
    ]
    read = np.array(marks, dtype=np.float64)
    return np.asarray(np.median(read[:, 2:] - read[:, :2], axis=0))


def _select_longest_ops(
    program: Program, names: Sequence[str], times: FloatArray, access: Sequence[str]
) -> Iterator[tuple[int, dict[str, Any]]]:
    """The longest ops that ran, as numbers among `names`, with what is known of each from the captured step."""
    distributions = read_table_access(program, access)
    found = list_operands(program, 4.0 * FAR_BYTES, lambda op, one: count_touched_bytes(one, distributions.get(op, "")))
    captured = [op for op in program.ops if op.name not in VIEWS]
    ran = [number for number, name in enumerate(names) if name not in VIEWS]
    matcher = SequenceMatcher(None, [op.name for op in captured], [names[number] for number in ran], autojunk=False)
    pairs = [
        (ran[block.b + place], captured[block.a + place])
        for block in matcher.get_matching_blocks()
        for place in range(block.size)
    ]
    for number, op in sorted(pairs, key=lambda pair: -times[pair[0]])[:_MOST_OPS]:
        if make_cpu_ops(op.signature) == (op.signature,):
            row, code = found[op.index]
            away = tuple(float(operand.distance) for operand in row)
            yield number, {
                "signature": op.signature, "access": distributions.get(op.index, ""), "found": (*away, float(code)),
            }  # fmt: skip
