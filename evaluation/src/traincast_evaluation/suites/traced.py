"""Traced steps against what was measured: replayed, and predicted with the host's own times or another's profile."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from pathlib import Path

import numpy as np

from traincast.costs.host.profile import HostProfile, parse_host_profile
from traincast.hardware.platform import Platform, find_device_by_name, load_platform
from traincast.ir.ops import TensorSpec
from traincast.traces.execution import join_execution
from traincast.traces.formats import RankTraces, read_ranks
from traincast.traces.link import Linked, link_trace
from traincast.traces.overheads.extraction import Overheads, measure_overheads
from traincast.traces.profiler.rates import OpFinder
from traincast.traces.replay.attribution import attribute_error, choose_profile, compute_host_scale
from traincast.traces.replay.carrying import Grids, carry_kernels, count_elements, find_compute_type, read_grids
from traincast.traces.replay.kernels import KEPT, Known, TracedKernels
from traincast.traces.replay.timeline import make_timeline_instructions
from traincast.traces.signatures import SignatureReader
from traincast.utils.arrays import BoolArray, IntArray
from traincast.utils.errors import TraincastError
from traincast.utils.metrics import Z90, ErrorRow, compute_error_row
from traincast_evaluation.fitting.host_profile import build_host_profile
from traincast_evaluation.suites.cases import Compared, compare

_FOLDER = "traces"
_SUITE = "traces"
_UNNAMED = {"kineto_resnet50_v100_papi": "v100-dgxs"}  # its page says what its files do not
_MIXED = "public_mixed"  # a file of each source
_TOGETHER = ("param_dlrm_8xv100", "triosim_vgg13_h100", "hta_simple_add_pair")  # files of one run
_RANKS = ("param_dlrm_8xv100", "megatron_tp8")  # files are ranks of one run
_ITERATIONS = ("triosim_vgg13_h100",)  # one iteration without a marker
_LEAST_MS = 0.01  # kernel time of a family in a step that is worth a row
_LEAST_CARRIED, _LEAST_SHARED = 3.5e-6, 3  # seconds of a kernel, and kinds of them that two traces share
_LEFT_OUT = ("host left out", "source left out", "kind of GPU left out")
_OWN_TIMES, _OWN_PROFILE = "own host times", "own host profile"
_HOST_COPY = re.compile(r"HtoD|DtoH|CopyHostToDevice|CopyDeviceToHost")
_MODELLED = 0.7  # share of kernel time from shapes, from which on a trace's kernels count
_SHIPPED = ", as shipped"  # others are made slower or faster as the trace's own launch calls say
_HOSTS = (*_LEFT_OUT, f"{_LEFT_OUT[0]}{_SHIPPED}", _OWN_TIMES, _OWN_PROFILE)
_GENERATION = re.compile(r"[a-z]+\d+")  # the first part of a device's key: "v100" of "v100-32gb"


_Work = tuple[str, tuple[TensorSpec, ...] | tuple[float, float], int, str, str]
"""An op, its tensors, which of its kernels, of which family, computing in which type (products); of element-wise
kernels also their name, blocks and threads, 0, family and nothing, which tell it without shapes."""


@dataclass(frozen=True, slots=True)
class _Ran:
    """A kernel: seconds, name and grid."""

    seconds: float
    name: str
    grid: Grids


@dataclass(frozen=True, eq=False, kw_only=True)
class _Traced:
    """The steps of one rank in milliseconds: measured, replayed, and predicted with each of `_HOSTS`.

    `steps` says whether it has steps: a trace of one iteration counts, one that begins with the set-up of the device
    does not. `modelled` says that less than half of its kernel time is kept as measured. `on_device` are the kernels
    that are no copies to or from the host, `intervals` those of the mean step with each host, `ran` the kernels by what
    they worked on."""

    folder: str
    names: list[str]
    measured: list[float]
    replayed: list[float]
    predicted: dict[str, list[float]]
    device: str
    kernels: TracedKernels
    on_device: BoolArray
    intervals: dict[str, tuple[float, float]]
    modelled: bool
    steps: bool
    ran: dict[_Work, list[_Ran]]


def evaluate_traces(data: Path, progress: Callable[[float], None]) -> list[ErrorRow]:
    """Error rows: replay, then predictions with each host, over all steps and by trace, then kernels by family."""
    runs = list(_iterate_runs(data / _FOLDER))
    others = _Others(
        [measured for paths in runs for rank in read_ranks(paths) for measured in _measure_overheads(rank)]
    )
    traced: list[_Traced] = []
    for done, paths in enumerate(runs):
        traced += [one for rank in read_ranks(paths) if (one := _trace_rank(rank, others)) is not None]
        progress((done + 1) / len(runs))
    if not traced:
        raise TraincastError(f"'{data / _FOLDER}' has no trace with steps of a device that we know")
    rows = _summarise_steps("replay", [(one, one.replayed) for one in traced])
    for host in _HOSTS:
        chosen = [(one, one.predicted[host]) for one in traced if host in one.predicted]
        rows += _summarise_steps(f"predicted, {host}", chosen)
        modelled = [pair for pair in chosen if pair[0].modelled and pair[0].steps]
        rows += [_summarise_traced(f"predicted, {host}, most kernels modelled", modelled)] if modelled else []
    totals = [*_summarise_totals(traced), *_summarise_carried(traced)]
    return [*rows, *_summarise_intervals(traced), *totals, *_summarise_kernels(traced)]


def _iterate_runs(folder: Path) -> Iterator[list[Path]]:
    """Files that belong to one run."""
    if not folder.is_dir():
        raise TraincastError(f"there is no folder '{folder}'; give the folder that has one called '{_FOLDER}'")
    for inside in sorted(path for path in folder.iterdir() if path.is_dir()):
        files = sorted(inside.glob("*.json.gz"))
        if inside.name in _TOGETHER:
            yield files
        else:
            yield from ([file] for file in files)
            yield from (sorted(ranks.glob("*.json.gz")) for ranks in sorted(inside.iterdir()) if ranks.is_dir())


@dataclass(frozen=True)
class _Measured:
    """The host overheads of one rank, where they come from ("hta" of "hta_compiled_v100") and on which kind of GPU."""

    source: str
    generation: str
    overheads: Overheads


def _bring_to_one_speed(overheads: Overheads) -> Overheads:
    """The same as if a launch call took 10 us: profiles are scaled by a trace's launch calls, so that what is pooled
    says how long everything else takes beside these."""
    launches = overheads.table.get(("T4", "launch"))
    usual = launches.compute_robust_moments()[0] if launches else 0.0
    if not usual:
        return overheads
    return Overheads({key: times.scale_by(1e-5 / usual) for key, times in overheads.table.items()})


class _Others:
    """Host profiles pooled from all traces but those of a source, or of a kind of GPU."""

    def __init__(self, measured: list[_Measured]) -> None:
        self.measured = measured
        self._built: dict[tuple[str, str], HostProfile | None] = {}

    def profiles(self, source: str, generation: str) -> dict[str, HostProfile]:
        """By their names in `_HOSTS`; without those for which no trace is left."""
        found = {
            name: self._without(what, value)
            for name, what, value in zip(_LEFT_OUT[1:], ("source", "generation"), (source, generation), strict=True)
        }
        return {name: profile for name, profile in found.items() if profile is not None}

    def _without(self, what: str, value: str) -> HostProfile | None:
        if (what, value) not in self._built:
            left = [_bring_to_one_speed(one.overheads) for one in self.measured if getattr(one, what) != value]
            try:
                built = parse_host_profile(f"without {value}", build_host_profile(left, {}))
            except TraincastError:
                built = None
            self._built[what, value] = built
        return self._built[what, value]


def _read_origin(linked: Linked) -> tuple[str, str]:
    """Source and device of a trace: the first part of its folder's name (of its own where a folder has many sources),
    and the device's key."""
    folder = linked.trace.path.parent.name
    source = linked.trace.path.name if folder == _MIXED else folder
    return source.partition("_")[0], _UNNAMED.get(folder) or find_device_by_name(linked.trace.device_name).key


def _name_generation(device: str) -> str:
    found = _GENERATION.match(device)
    return found[0] if found else device


def _measure_overheads(traces: RankTraces) -> Iterator[_Measured]:
    """What a rank's host took, where its steps are marked and its device is known."""
    if traces.timeline is None:
        return
    linked = link_trace(traces.timeline)
    try:
        source, device = _read_origin(linked)
    except TraincastError:
        return
    if linked.marked and len(linked.device):
        yield _Measured(source, _name_generation(device), measure_overheads(linked))


def _trace_rank(traces: RankTraces, others: _Others) -> _Traced | None:
    """One rank, or nothing where it has no kernels, no timeline or a device that we do not know."""
    if traces.timeline is None:
        return None
    linked = link_trace(traces.timeline)
    folder = linked.trace.path.parent.name
    try:
        source, device = _read_origin(linked)
    except TraincastError:
        return None
    if not len(linked.device):
        return None
    instructions = make_timeline_instructions(linked)
    node = join_execution(linked, traces.execution) if traces.execution else None
    reader = SignatureReader(linked, traces.execution, node)
    platform = load_platform(device)
    overheads = measure_overheads(linked)
    predicted: dict[str, list[float]] = {}
    intervals: dict[str, tuple[float, float]] = {}
    profiles = _make_host_profiles(platform, linked, overheads) | others.profiles(source, _name_generation(device))
    for host, profile in profiles.items():
        scale = compute_host_scale(overheads, profile) if host in _LEFT_OUT else 1.0
        made = attribute_error(
            linked, instructions, reader, platform, profile, scale, own_host=host == _OWN_TIMES, explain=False
        )
        predicted[host] = [1e3 * step.full for step in made.steps]
        intervals[host] = (1e3 * made.interval[0], 1e3 * made.interval[1])
        kernels, steps = made.kernels, made.steps  # kernels and what was measured are the same whatever the host
    name = f"{folder}/{linked.trace.path.name.partition('.')[0]}"
    kept = float(kernels.measured[np.isin(kernels.known, KEPT)].sum())
    copies = [bool(_HOST_COPY.search(linked.get_name(row))) for row in kernels.row.tolist()]
    return _Traced(
        folder=folder,
        names=[f"{name} step {step.number}" for step in steps],
        measured=[1e3 * step.measured for step in steps],
        replayed=[1e3 * step.replayed for step in steps],
        predicted=predicted,
        device=device,
        kernels=kernels,
        on_device=~np.array(copies, dtype=np.bool_),
        intervals=intervals,
        steps=linked.marked or folder in _ITERATIONS,
        modelled=kept < 0.5 * float(kernels.measured.sum()),
        ran=_list_ran(linked, reader, kernels),
    )


def _list_ran(linked: Linked, reader: SignatureReader, kernels: TracedKernels) -> dict[_Work, list[_Ran]]:
    """The kernels, of those that ran alone, of which two traces can say that they did the same: element-wise ones by
    name and grid, and those of ops whose tensors were recorded."""
    ran: dict[_Work, list[_Ran]] = {}
    finder, places = OpFinder(linked, reader), Counter[int]()
    grids, alone = read_grids(linked, kernels.row), _find_alone(linked, kernels.row)
    for index, row in enumerate(kernels.row.tolist()):
        op = finder.find_anchor(int(linked.author[row]))
        recorded = reader.get_recorded(op) if op >= 0 else None
        name, family = linked.get_name(row), kernels.family[index]
        grid = grids.take(np.array([index]))
        one = _Ran(float(kernels.measured[index]), name, grid)
        places[op] += 1
        if kernels.known[index] == Known.COMMUNICATION or not alone[index]:
            continue
        blocks, threads = float(grid.blocks[0]), float(grid.threads[0])
        if count_elements(name, blocks, threads):
            ran.setdefault((name, (blocks, threads), 0, family, ""), []).append(one)
        if recorded is not None and recorded.tensors:
            compute = find_compute_type(name) if family in ("gemm", "conv", "attention") else ""
            work = linked.get_name(op), recorded.tensors, places[op] - 1, family, compute
            ran.setdefault(work, []).append(one)
    return ran


def _find_alone(linked: Linked, rows: IntArray) -> BoolArray:
    """Which of these kernels no other ran beside."""
    device = linked.device[np.argsort(linked.events["start"][linked.device], kind="stable")]
    start, end = linked.events["start"][device], linked.end[device]
    alone = np.zeros(len(linked.events), dtype=np.bool_)
    alone[device[1:]] = np.maximum.accumulate(end)[:-1] <= start[1:]
    alone[device[:-1]] &= end[:-1] <= start[1:]
    return alone[rows]


def _make_host_profiles(platform: Platform, linked: Linked, overheads: Overheads) -> dict[str, HostProfile]:
    """The host profiles of a prediction by their names in `_HOSTS`; a trace without launches has none of its own."""
    other = choose_profile(platform, linked)
    profiles = {_LEFT_OUT[0]: other, f"{_LEFT_OUT[0]}{_SHIPPED}": other, _OWN_TIMES: other}
    try:
        built = build_host_profile([overheads], {})
    except TraincastError:
        return profiles
    return profiles | {_OWN_PROFILE: parse_host_profile("of this trace", built)}


def _summarise_steps(what: str, traced: list[tuple[_Traced, list[float]]]) -> list[ErrorRow]:
    """All marked steps, whole traces without a marker, then the traces of each folder."""
    marked = [pair for pair in traced if pair[0].steps]
    whole = [pair for pair in traced if not pair[0].steps]
    rows = [_summarise_traced(f"{what}, all steps", marked)] if marked else []
    rows += [_summarise_traced(f"{what}, whole traces without steps", whole)] if whole else []
    folders = list(dict.fromkeys(one.folder for one, _ in traced))
    return rows + [
        _summarise_traced(f"{what}, {folder}", [pair for pair in traced if pair[0].folder == folder])
        for folder in folders
    ]


def _summarise_traced(group: str, traced: list[tuple[_Traced, list[float]]]) -> ErrorRow:
    return compute_error_row(
        _SUITE,
        group,
        [ms for _, predicted in traced for ms in predicted],
        [ms for one, _ in traced for ms in one.measured],
        [name for one, _ in traced for name in one.names],
    )


def _summarise_intervals(traced: list[_Traced]) -> list[ErrorRow]:
    """The mean step of every trace, with its own host times and with the platform's, and whether it lies in its 90 %
    interval."""
    rows: list[ErrorRow] = []
    for host in (_OWN_TIMES, _LEFT_OUT[0]):
        cases = [
            _compare(one, 1e-3 * float(np.mean(one.predicted[host])), 1e-3 * float(np.mean(one.measured)),
                     [1e-3 * bound for bound in one.intervals[host]])
            for one in traced
        ]  # fmt: skip
        rows.append(compare(_SUITE, f"predicted, {host}, by trace", cases))
    return rows


def _compare(one: _Traced, predicted: float, measured: float, interval: Sequence[float]) -> Compared:
    """Something of a whole trace, in seconds."""
    name = one.names[0].rpartition(" step")[0]
    low, high = interval
    interval = float(low), float(high)
    return Compared(device=one.device, name=name, measured=measured, predicted=predicted, interval=interval)


def _summarise_totals(traced: list[_Traced]) -> list[ErrorRow]:
    """All modelled kernels of each trace in which they are most of the kernel time; copies to and from the host, and
    collectives, are none."""
    found = []
    for one in traced:
        computes = one.on_device & (one.kernels.known != Known.COMMUNICATION)
        modelled = computes & ~np.isin(one.kernels.known, KEPT)
        measured, whole = (float(one.kernels.measured[rows].sum()) for rows in (modelled, computes))
        if whole and measured >= _MODELLED * whole:
            spread = np.exp(Z90 * _select_kernels(one.kernels, modelled).compute_spread())
            predicted = float(one.kernels.predicted[modelled].sum())
            found.append((one, _compare(one, predicted, measured, [predicted / spread, predicted * spread])))
    runs = {one.folder if one.folder in _RANKS else one.names[0]: case for one, case in found}
    groups = {"all": [case for _, case in found], "each run once": list(runs.values())}
    for one, case in found:
        groups.setdefault(one.folder, []).append(case)
    rows = [
        compare(_SUITE, f"kernels of a trace, at least {_MODELLED:.0%} modelled, {group}", cases)
        for group, cases in groups.items()
        if cases
    ]
    return [*rows[:1], *(row.to_error_row() for row in rows[1:])]  # others have the same cases


def _summarise_carried(traced: list[_Traced]) -> list[ErrorRow]:
    """Kernels as if nobody had modelled them, from one kind of GPU to another on which the same ones ran: each pair of
    traces as one, by the sums of their kernels (medians of each kind), then the kernels and the sums of all pairs."""
    rows: list[ErrorRow] = []
    kinds: list[Compared] = []
    sums: list[Compared] = []
    for source, target in permutations(traced, 2):
        if source.device == target.device:
            continue
        cases = _carry_shared(source, target)
        if len(cases) < _LEAST_SHARED:
            continue
        group = f"kernels carried, {source.device} to {target.device}, {_name_trace(source)} to {_name_trace(target)}"
        rows.append(compare(_SUITE, group, cases))
        bounds = [sum(case.interval[side] for case in cases if case.interval) for side in (0, 1)]
        measured, predicted = (sum(getattr(case, what) for case in cases) for what in ("measured", "predicted"))
        whole = Compared(
            device=target.device, name=group, measured=measured, predicted=predicted, interval=(bounds[0], bounds[1])
        )
        kinds, sums = kinds + cases, [*sums, whole]
    if not sums:
        return []
    every = compare(_SUITE, "kernels carried, all pairs", kinds).to_error_row()  # rows of pairs have its cases
    return [compare(_SUITE, "kernels carried, the sum of each pair", sums), every, *rows]


def _name_trace(one: _Traced) -> str:
    return one.names[0].rpartition(" step")[0]


def _carry_shared(source: _Traced, target: _Traced) -> list[Compared]:
    """The kinds of kernels that both ran, each once, long enough on both to be more than their start."""
    works = [
        work
        for work, ran in source.ran.items()
        if work in target.ran and min(_compute_median(ran), _compute_median(target.ran[work])) >= _LEAST_CARRIED
    ]
    told = {(work[0], work[1][0]) for work in works if _is_named(work)}
    first = {work: source.ran[work][0] for work in works}
    works = [w for w in works if _is_named(w) or (first[w].name, float(first[w].grid.blocks[0])) not in told]
    if len(works) < _LEAST_SHARED:
        return []
    chosen = [first[work] for work in works]
    columns = ([getattr(ran.grid, column) for ran in chosen] for column in ("blocks", "threads", "shared"))
    carried = carry_kernels(
        np.array([_compute_median(source.ran[work]) for work in works]), [work[3] for work in works],
        [ran.name for ran in chosen], Grids(*map(np.concatenate, columns)),
        load_platform(source.device).device, load_platform(target.device).device,
    )  # fmt: skip
    spread = np.exp(Z90 * carried.sigma)
    return [
        Compared(
            device=target.device,
            name=work[0],
            measured=_compute_median(target.ran[work]),
            predicted=float(seconds),
            interval=(float(seconds / wide), float(seconds * wide)),
        )
        for work, seconds, wide in zip(works, carried.seconds, spread, strict=True)
    ]


def _is_named(work: _Work) -> bool:
    """Whether a name and a grid tell the work."""
    return isinstance(work[1][0], float)


def _compute_median(ran: list[_Ran]) -> float:
    return float(np.median([one.seconds for one in ran]))


def _select_kernels(kernels: TracedKernels, chosen: BoolArray) -> TracedKernels:
    """These kernels alone."""
    places = np.flatnonzero(chosen)
    op, family = (tuple(names[place] for place in places) for names in (kernels.op, kernels.family))
    return replace(
        kernels, row=kernels.row[places], op=op, family=family, measured=kernels.measured[places],
        predicted=kernels.predicted[places], sigma=kernels.sigma[places], known=kernels.known[places],
    )  # fmt: skip


def _summarise_kernels(traced: list[_Traced]) -> list[ErrorRow]:
    """Kernel time of a family in each trace whose shapes were recorded, by device and family."""
    pairs: dict[str, list[tuple[float, float, str]]] = {}
    for one in traced:
        known = ~np.isin(one.kernels.known, KEPT)
        families = np.array(one.kernels.family)
        for family in sorted(set(families[known].tolist())):
            chosen = known & (families == family)
            measured, predicted = (
                1e3 * float(seconds[chosen].sum()) / len(one.names)
                for seconds in (one.kernels.measured, one.kernels.predicted)
            )
            if measured >= _LEAST_MS:
                pairs.setdefault(f"kernels, {one.device}, {family}", []).append((predicted, measured, one.names[0]))
    return [
        compute_error_row(
            _SUITE, group, [p for p, _, _ in found], [m for _, m, _ in found], [name for _, _, name in found]
        )
        for group, found in sorted(pairs.items())
    ]
