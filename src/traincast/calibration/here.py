"""The machine at hand: its store and profile, the microbenchmarks that fill them, and steps predicted on it."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from traincast.calibration.measure import Source, make_runnable
from traincast.calibration.measure_ranks import capture_ranks
from traincast.costs.cpu.profile import (
    HERE,
    Profile,
    get_profile_file,
    get_profile_home,
    load_machine,
    load_profile,
    save_profile,
)
from traincast.ir.workload import Workload
from traincast.models.dlrm.config import DlrmConfig
from traincast.simulator.cpu.predict import predict_on_machine
from traincast.simulator.prediction.result import Prediction
from traincast.simulator.scenario.dlrm_file import read_dlrm
from traincast.simulator.scenario.scenario import Scenario
from traincast.simulator.scenario.workloads import load_single_gpu_step
from traincast.utils.errors import TraincastError, shorten_value
from traincast.utils.files.reading import format_path
from traincast.utils.metrics import ErrorRow
from traincast.utils.results import Records, Result

if TYPE_CHECKING:
    from traincast.calibration.bench.bench import Coverage
    from traincast.calibration.bench.device import Device, Identity
    from traincast.calibration.bench.plans import Task
    from traincast.calibration.bench.store import Store


def find_store_folder(device: str) -> Path:
    """The store of a device of this machine, unless another is named."""
    return get_profile_home() / f"store-{device}"


def capture_here(
    source: Source | Workload, variant: Scenario, runs_on: str = "cpu"
) -> tuple[Workload, tuple[str, ...]]:
    """A step as a device of this kind runs it, without running it, and which rows its tables' lookups want."""
    if isinstance(source, Workload) or str(source).endswith(".tc"):
        held = source if isinstance(source, Workload) else str(source)
        return load_single_gpu_step(variant.replace(workload=held)), ()
    from traincast.capturing.step import capture_step

    step = make_runnable(source, variant, device="cuda", drawn=False)
    build: Callable[..., Any] = step.build if step.seq_len else lambda batch: step.build(batch, 0)
    workload = capture_step(
        build, batch_size=step.batch_size, seq_len=step.seq_len or None, name=step.name,
        mode=variant.mode or "training", rebatch=False, runs_on=runs_on,
    )  # fmt: skip
    return workload, _read_access(source)


def _read_access(source: Any) -> tuple[str, ...]:
    if isinstance(source, DlrmConfig):
        return source.access
    name = str(source)
    return read_dlrm(Path(name)).access if name.endswith((".yaml", ".yml")) else ()


def predict_here(
    source: Source | Workload, variant: Scenario, on: str | Profile = HERE, gpus: int | None = None
) -> Prediction:
    """One step on a machine that was measured: of one process, or of as many ranks as `gpus`."""
    machine = load_machine(on)
    if isinstance(source, Workload) or str(source).endswith(".tc"):
        workload = load_single_gpu_step(
            variant.replace(workload=source if isinstance(source, Workload) else str(source))
        )
        if gpus is not None and gpus != len(workload.ranks):
            raise TraincastError(
                f"{workload.name} was captured on {len(workload.ranks)} ranks, not {gpus}; capture it again"
            )
        return predict_on_machine(workload, machine)
    if gpus is None or gpus == 1:
        workload, access = capture_here(source, variant)
        return predict_on_machine(workload, machine, (access,))
    together, accesses = capture_ranks(source, variant, gpus)
    return predict_on_machine(together, machine, accesses)


@dataclass(frozen=True, repr=False)
class Calibrated(Result):
    """A profile that was fitted from a store, and how wrong it is on what was held out."""

    file: Path
    profile: Profile
    errors: tuple[ErrorRow, ...]

    def to_dict(self) -> dict[str, Any]:
        """The file, its machine and the errors."""
        return {
            "file": str(self.file),
            "device": dict(self.profile.identity),
            "clock": self.profile.clock,
            "samples": self.profile.samples,
            "reference_ms": 1e3 * self.profile.reference,
            "host_us": {name: 1e6 * seconds for name, seconds in self.profile.host.items()},
            "held_out": [dict(row) for row in self.profile.errors],
        }

    def headline(self) -> str:
        """What was written, and a line per family."""
        lines = [f"{self.file}: {self.profile.samples} samples of {self.profile.identity.get('name')}"]
        lines += ["held-out family        n    GMAE    MAPE   worst  in 90 %"]
        for row in self.errors:
            covered = "" if row.covered is None else f"{row.covered:5.0f} %"
            lines.append(f"{row.group:<20} {row.n:3d} {row.gmae:6.1f}% {row.mape:6.1f}% {row.worst:+6.0f}% {covered}")
        return "\n".join(lines)

    def records(self) -> Records:
        """Table "held_out": errors by family, percent."""
        return {"held_out": [dict(row) for row in self.profile.errors]}


def fit_store(folder: Path, out: Path | None, clock: str) -> Calibrated:
    """Fits the profile of a store and writes it."""
    from traincast.calibration.bench.store import Store
    from traincast.calibration.fit import fit_profile

    if not folder.is_dir():
        raise TraincastError(f"no store '{format_path(folder)}'; measure one with 'traincast bench'")
    store = Store(folder)
    if store.identity is None:
        raise TraincastError(f"store '{format_path(folder)}' is empty; measure with 'traincast bench'")
    if store.identity.device != "cpu":
        raise TraincastError(
            f"store '{format_path(folder)}' is of a GPU ({store.identity.name}), whose steps are predicted with a "
            "platform; give `refine` the built-in one that it is, or the file of one that describes it"
        )
    profile, errors = fit_profile(store.samples(), store.identity.to_dict(), clock)
    path = out or get_profile_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    save_profile(profile, path)
    return Calibrated(path, profile, tuple(errors))


_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "": 1.0}
_MOST_SECONDS = 86_400.0
_MOST_MHZ = 1e5
_SHARES = {"host": 0.25, "together": 0.09, "copies": 0.02, "exchanges": 0.14}  # of the time; single ops have the rest
_AGAIN_SHARE = 0.3  # of what single ops get, for a second visit, on operands of their own
_SELDOM, _STEADY = 5, ("gemm", "conv")  # families that compute differ little from visit to visit: every fifth of them
_SHOWN = 5  # kinds of ops that would narrow the interval most
_SECONDS_PER_SAMPLE = 0.07  # allocation, repetitions and the reference alongside them, twice, on one core


@dataclass(frozen=True, repr=False, kw_only=True)
class Benched(Result):
    """A run of microbenchmarks: how many were added to the store, and for a workload how much of its predicted time
    the measured shapes cover, minute by minute. `half_width_if_measured` says, for a workload, what is left of half the
    interval of its predicted kernel time when all ops of a kind are measured: the order that is followed."""

    store: Path
    identity: Identity | None
    measured: int
    total: int
    seconds: float
    planned: dict[str, int] = field(default_factory=dict)
    half_width_if_measured: dict[str, float] = field(default_factory=dict)
    coverage: tuple[tuple[float, float], ...] = ()
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Counts and seconds."""
        return {
            "store": str(self.store),
            "device": None if self.identity is None else self.identity.to_dict(),
            "measured": self.measured,
            "total": self.total,
            "seconds": self.seconds,
            "planned": self.planned,
            "half_width_if_measured": self.half_width_if_measured,
            "coverage": [{"minutes": minutes, "share": share} for minutes, share in self.coverage],
            "notes": list(self.notes),
        }

    def headline(self) -> str:
        """What was done, or would be."""
        if self.planned:
            kinds = ", ".join(f"{kind} {number}" for kind, number in self.planned.items())
            made = f"would make {sum(self.planned.values())} measurements in about {self.seconds:.0f} s"
            first = f"{made}, into {self.store}: {kinds}"
            best = list(self.half_width_if_measured.items())[:_SHOWN]
            narrowed = ", ".join(f"{kind} ±{width:.0%}" for kind, width in best)
            return f"{first}\nhalf the interval of its kernels when measured: {narrowed}" if best else first
        lines = [f"{self.store}: {self.measured} measured in {self.seconds:.0f} s, {self.total} in all"]
        lines += [_describe_coverage(*mark) for mark in self.coverage]
        return "\n".join([*lines, *self.notes])

    def records(self) -> Records:
        """Table "planned": samples by kind of a dry run."""
        return {"planned": [{"kind": kind, "samples": number} for kind, number in self.planned.items()]}


def parse_budget(text: str) -> float:
    """Seconds of `90`, `90s`, `5m` or `1h`.

    >>> parse_budget("5m")
    300.0
    """
    match = re.fullmatch(r"([0-9]{1,6}(?:\.[0-9]{1,3})?)([smh]?)", text.strip().lower())
    seconds = float(match[1]) * _UNITS[match[2]] if match else 0.0
    if not 1.0 <= seconds <= _MOST_SECONDS:
        raise TraincastError(f"`budget` is '{text[:40]}'; give a time from 1s to 24h, such as 5m")
    return seconds


def run_campaign(
    *,
    device: str = "cpu",
    budget: str = "10m",
    store: Path | None = None,
    workload: Source | None = None,
    variant: Scenario | None = None,
    seed: int = 0,
    dry_run: bool = False,
    clock_mhz: float = 0.0,
    progress: Callable[[float], None] = lambda _: None,
    covered: Callable[[str], None] = lambda _: None,
) -> Benched:
    """Measures until the budget is used up or all of the workload's shapes are measured; `covered` hears after each
    minute how much of the workload's time is."""
    seconds = parse_budget(budget)
    if not 0 <= seed < 1 << 32:
        raise TraincastError(f"`seed` is {shorten_value(seed)}; give an integer from 0")
    folder = store or find_store_folder(device)
    needed = None if workload is None else _list_needed_tasks(workload, variant or Scenario(dtype="fp32"), device)
    tasks = _choose_plan(device, seed) if needed is None else iter(needed.tasks)
    if dry_run:
        planned = _describe_plan(folder, tasks, seconds, device if needed is None else "")
        return planned if needed is None else replace(planned, half_width_if_measured=needed.by_kind)
    from traincast.calibration.bench.device import Reference, check_locked
    from traincast.calibration.bench.measure import note_disturbances
    from traincast.calibration.bench.store import Store, open_device

    if not 0 <= clock_mhz < _MOST_MHZ:
        raise TraincastError(f"`clock_mhz` is {clock_mhz:g}; give the SM clock that the GPU is locked to")
    opened = open_device(device, locked_mhz=clock_mhz)
    held = Store(folder, opened.identity())
    held.claim()
    started, reference = time.monotonic(), Reference(opened)
    clock = reference.clock_mhz()
    notes = [*check_locked(opened, clock), *filter(None, [opened.neighbours()])]
    before, coverage = len(held), tuple[tuple[float, float], ...]()
    if needed is None:
        notes += _measure_other_parts(opened, held, seed, started, seconds, progress)
        notes += _measure_single_ops(opened, held, tasks, seed, started, seconds, progress)
    else:
        coverage, failures = _cover_workload(opened, held, needed, started, seconds, progress, covered)
        notes += failures
    notes += note_disturbances(list(islice(held.samples(), before, None)), (clock, reference.clock_mhz()))
    return Benched(
        store=folder, identity=held.identity, measured=len(held) - before, total=len(held),
        seconds=time.monotonic() - started, coverage=coverage, notes=tuple(dict.fromkeys(notes)),
        half_width_if_measured={} if needed is None else needed.by_kind,
    )  # fmt: skip


def _measure_other_parts(
    device: Device, store: Store, seed: int, started: float, seconds: float, progress: Callable[[float], None]
) -> list[str]:
    """What is no single op: the host's overheads, copies, collectives, each for its share of the time."""
    from traincast.calibration.bench.parts import measure_collectives, measure_copies, measure_host, measure_together

    def go_on() -> None:
        progress(min(1.0, (time.monotonic() - started) / seconds))

    share = _split_seconds(seconds)
    notes = measure_host(device, store, seed, share["host"], go_on)
    notes += measure_together(device, store, seed, share["together"], go_on)
    notes += measure_copies(device, store, seed, share["copies"], go_on)
    return notes + measure_collectives(device, store, seed, share["exchanges"], go_on)


def _measure_single_ops(
    device: Device,
    store: Store,
    tasks: Iterator[Task],
    seed: int,
    started: float,
    seconds: float,
    progress: Callable[[float], None],
) -> list[str]:
    """Ops of the plan until `seconds` after `started`: new ones, then a second visit to them, then what time is left
    for."""
    from traincast.calibration.bench.parts import AGAIN

    first = seconds - _AGAIN_SHARE * max(seconds - (time.monotonic() - started), 0.0)
    notes = _run_tasks(device, store, tasks, started, first, progress)
    again = _list_measured_before(store, _choose_plan(device.kind, seed))
    notes += _run_tasks(device, store, again, started, seconds, progress, AGAIN)
    return notes + _run_tasks(device, store, tasks, started, seconds, progress)


def _split_seconds(seconds: float) -> dict[str, float]:
    """What each part alongside single ops gets of this many seconds."""
    return {part: share * seconds for part, share in _SHARES.items()}


def _run_tasks(
    device: Device,
    store: Store,
    tasks: Iterator[Task],
    started: float,
    seconds: float,
    progress: Callable[[float], None],
    turn: str = "",
) -> list[str]:
    """Measures until `seconds` after `started`, and names the ops that could not be run alone."""
    from traincast.calibration.bench.bench import run_benchmarks as run

    failures: list[str] = []

    def failed(task: Task, why: str) -> None:
        failures.append(f"{task.signature.name} cannot be measured alone: {why}")

    gone = min(time.monotonic() - started, seconds)

    def overall(share: float) -> None:
        progress((gone + share * (seconds - gone)) / seconds)

    run(device, store, tasks, seconds=seconds - gone, progress=overall, failed=failed, turn=turn)
    return failures


def _choose_plan(device: str, seed: int) -> Iterator[Task]:
    """The microbenchmarks of a kind of device."""
    from traincast.calibration.bench.device import plan_gpu_benchmarks
    from traincast.calibration.bench.plans import plan_benchmarks

    return plan_gpu_benchmarks(seed) if device == "cuda" else plan_benchmarks(seed)


def _list_measured_before(store: Store, tasks: Iterator[Task]) -> Iterator[Task]:
    """The plan's tasks that the store holds, of those that differ little from visit to visit some."""
    from traincast.calibration.bench.bench import make_task_key
    from traincast.costs.cpu.features import get_family, get_kind

    for number, task in enumerate(islice(tasks, len(store))):
        steady = get_family(get_kind(task.signature)) in _STEADY
        if make_task_key(task) in store and (not steady or number % _SELDOM == 0):
            yield task


def _list_needed_tasks(workload: Source, variant: Scenario, device: str) -> Coverage:
    """Every op of a step as a task; a CPU that was fitted says what it is unsure of."""
    from traincast.calibration.bench.bench import Coverage

    step, access = capture_here(workload, variant, runs_on=device)
    fitted = device == "cpu" and get_profile_file().is_file()
    return Coverage(step.programs[0], access, load_profile(get_profile_file()) if fitted else None)


def _describe_coverage(minutes: float, share: float) -> str:
    return f"after {minutes:.1f} min: {share:.1%} of the step's predicted time"


def _cover_workload(
    device: Device,
    store: Store,
    coverage: Coverage,
    started: float,
    seconds: float,
    progress: Callable[[float], None],
    covered: Callable[[str], None],
) -> tuple[tuple[tuple[float, float], ...], list[str]]:
    """Measures a workload's ops, most valuable first; what share was covered after each minute and at the end."""
    from traincast.calibration.bench.bench import make_task_key

    marks, notes = list[tuple[float, float]](), list[str]()
    for task in coverage.tasks:
        if time.monotonic() - started >= seconds:
            break
        notes += _run_tasks(device, store, iter([task]), started, seconds, lambda _: None)
        sample = store.get(make_task_key(task))
        if sample is not None:
            coverage.add(task, sample.busy)
        minutes = (time.monotonic() - started) / 60
        if not marks or minutes >= 1 + int(marks[-1][0]):
            marks.append((minutes, coverage.share()))
            covered(_describe_coverage(*marks[-1]))
        progress(min(1.0, max(coverage.share(), 60 * minutes / seconds)))
    return (*marks, ((time.monotonic() - started) / 60, coverage.share())), notes


def _describe_plan(folder: Path, tasks: Iterator[Task], seconds: float, device: str) -> Benched:
    """What would be measured on a `device`; "" for the ops of a workload alone."""
    from traincast.costs.cpu.features import get_kind

    beside: dict[str, int] = {}
    if device:
        from traincast.calibration.bench.parts import plan_parts

        beside = plan_parts(device, **_split_seconds(seconds))
    left = (1.0 - sum(_SHARES.values())) * seconds if device else seconds
    kinds = Counter(get_kind(task.signature) for task in islice(tasks, max(1, int(left / _SECONDS_PER_SAMPLE))))
    needed = kinds.total() * _SECONDS_PER_SAMPLE + (seconds - left)
    return Benched(
        store=folder, identity=None, measured=0, total=0, seconds=min(seconds, needed),
        planned={**beside, **dict(kinds.most_common())},
    )  # fmt: skip
