"""Small training steps, drawn: ops timed inside them, and what the host takes, as what is left or out of PyTorch's
profiler."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from difflib import SequenceMatcher
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from traincast.calibration.bench.collectives import DifferentiableAllToAll
from traincast.calibration.bench.device import Device, Reference, Series, run_series, summarise_series
from traincast.calibration.bench.plans import FAR_BYTES
from traincast.calibration.bench.signatures import make_overhead_signature
from traincast.calibration.fit import write_plan_text
from traincast.capturing.distributed import capture_distributed
from traincast.capturing.step import capture_step
from traincast.costs.cpu.features import count_touched_bytes, list_operands
from traincast.costs.cpu.op_costs import VIEWS, count_host_events, make_cpu_ops, read_table_access
from traincast.costs.cpu.samples import Sample
from traincast.ir.program import Program
from traincast.models.embeddings.access import draw_rows, parse_access
from traincast.simulator.cpu.instructions import make_rank_plan
from traincast.traces.kineto import read_kineto
from traincast.traces.link import link_trace
from traincast.traces.overheads.extraction import LONGEST_GAP, measure_overheads
from traincast.utils.arrays import FloatArray

Step = Callable[[], object]
_FILL = 0.01  # of table entries; random ones would take longer to draw than to train on
_RATE = 1e-4  # keeps every number in the range of normal ones
_DRAW = 2  # of steps, in their names: a store of another draw gets these alongside its own
_LAWS = ("uniform", "zipf:0.7", "zipf:0.9", "zipf:1.1")
_SIDE = 24  # of images
_MOST_WORK = 1 << 28  # samples times the weights of linear layers: 30 ms of a core
_SEQUENCE = 16  # samples that attend to each other
_TABLE_BYTES = 384e6  # of all tables of a step
_LOSSES = ("mean", "classes", "clicks")


@dataclass(frozen=True, slots=True)
class SmallStep:
    """A step of `layers` linear layers of `hidden` columns, `norms` layer norms with GELU, `views` reshapes, an
    embedding bag of `width` columns for each of `tables` (rows, lookups per sample, which rows), `convolutions` on
    images (with batch norms and pools where they are `pooled`), `attention` layers over sequences of 16 samples, an
    embedding of this many `words` that is added to them, a loss (the mean, cross entropy over the last columns, or
    binary cross entropy of one output), and an optimizer."""

    name: str
    batch_size: int
    width: int
    hidden: int
    layers: int
    norms: int
    views: int
    convolutions: int
    pooled: bool
    attention: int
    words: int
    loss: str
    tables: tuple[tuple[int, int, str], ...]
    optimizer: str

    @property
    def access(self) -> tuple[str, ...]:
        """Which rows the lookups of each table want."""
        return tuple(distribution for _, _, distribution in self.tables)

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain data."""
        return asdict(self)

    @staticmethod
    def from_dict(fields: Mapping[str, Any]) -> SmallStep:
        """A step from its fields, which may have been JSON."""
        return SmallStep(**{**fields, "tables": tuple(tuple(table) for table in fields["tables"])})

    def make(self, batch_size: int, *, rank: int = 0, world_size: int = 1) -> Step:
        """Model, optimizer and inputs; the callable runs one iteration. Of several ranks each has tables of its own,
        whose sums are exchanged, and all else under DDP."""
        model = _Model(self, several=world_size > 1)
        data = torch.rand(batch_size, self.width)
        images = torch.rand(max(batch_size // 32, 1), 3, _SIDE, _SIDE)
        random = np.random.default_rng(0)
        indices = [
            torch.from_numpy(draw_rows(parse_access(distribution), rows, batch_size * lookups, random))
            for rows, lookups, distribution in self.tables
        ]
        offsets = [torch.arange(0, batch_size * lookups, lookups) for _, lookups, _ in self.tables]
        optimizer = _make_optimizer(self.optimizer, model.parameters())
        measure = _make_criterion(self.loss, batch_size, self.hidden)

        def step() -> None:
            optimizer.zero_grad()
            measure(model(data, indices, offsets, images)).backward()  # type: ignore[no-untyped-call]
            optimizer.step()

        return step


def _make_optimizer(name: str, parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    """As after some training: squares of gradients have been added up for every weight. Units that a few samples leave
    dead would have none, and the root of a zero among other numbers takes up to four times as long."""
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=_RATE, foreach=False)
    if name == "adagrad":
        return torch.optim.Adagrad(parameters, lr=_RATE, foreach=False, initial_accumulator_value=1.0)
    adam = torch.optim.AdamW(parameters, lr=_RATE, foreach=False)
    for weight in adam.param_groups[0]["params"]:
        moments = {"exp_avg": torch.zeros_like(weight), "exp_avg_sq": torch.ones_like(weight)}
        adam.state[weight] = {"step": torch.tensor(0.0), **moments}
    return adam


def _make_criterion(loss: str, samples: int, columns: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """A loss of what the model gives, with targets that it keeps."""
    if loss == "classes":
        classes = torch.arange(samples) % columns
        return lambda made: torch.nn.functional.cross_entropy(made, classes)
    if loss == "clicks":
        clicks = (torch.arange(samples) % 2).float().view(-1, 1)
        return lambda made: torch.nn.functional.binary_cross_entropy(torch.sigmoid(made), clicks)
    return torch.Tensor.mean


class _Model(nn.Module):
    def __init__(self, of: SmallStep, *, several: bool) -> None:
        super().__init__()
        self.several = several
        self.bags = nn.ModuleList(
            nn.EmbeddingBag(rows, of.width, mode="sum", sparse=True, _weight=torch.full((rows, of.width), _FILL))
            for rows, _, _ in of.tables
        )
        dense = _Dense(of)
        self.dense: nn.Module = DistributedDataParallel(dense) if several else dense

    def forward(
        self, x: torch.Tensor, indices: list[torch.Tensor], offsets: list[torch.Tensor], images: torch.Tensor
    ) -> torch.Tensor:
        pooled = [bag(*given) for bag, *given in zip(self.bags, indices, offsets, strict=True)]
        if pooled and self.several:
            sums = torch.cat(pooled, dim=1)
            parts = [sums.numel() // dist.get_world_size()] * dist.get_world_size()
            arrived = DifferentiableAllToAll.apply(sums.view(-1), parts, parts)  # type: ignore[no-untyped-call]
            pooled = [arrived.view(sums.shape)]
        made: torch.Tensor = self.dense(torch.cat([x, *pooled], dim=1), images)
        return made


class _Dense(nn.Module):
    def __init__(self, of: SmallStep) -> None:
        super().__init__()
        width = of.hidden
        self.views = of.views
        self.joined = nn.Linear(of.width * (1 + len(of.tables)), width)
        self.linear = nn.ModuleList(nn.Linear(width, width) for _ in range(of.layers))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(of.norms))
        channels = [3, *[max(width // 8, 8)] * of.convolutions]
        self.images = nn.ModuleList(
            _make_image_layer(read, made, pooled=of.pooled) for read, made in zip(channels, channels[1:], strict=False)
        )
        self.attention = nn.ModuleList(_Attention(width) for _ in range(of.attention))
        self.words = nn.Embedding(of.words, width) if of.words else None
        self.last = nn.Linear(width, 1) if of.loss == "clicks" else None

    def forward(self, x: torch.Tensor, images: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.joined(x))
        for layer in self.linear:
            x = torch.relu(layer(x))
        for norm in self.norms:
            x = x + torch.nn.functional.gelu(norm(x))
        for _ in range(self.views):
            x = x.view(-1).view(-1, self.joined.out_features)
        if self.words is not None:
            x = x + self.words(torch.arange(len(x)) % self.words.num_embeddings)
        for attention in self.attention:
            x = attention(x)
        for layer in self.images:
            images = torch.relu(layer(images))
        x = x if not self.images else x + images.mean()
        return x if self.last is None else self.last(x)


def _make_image_layer(read: int, made: int, *, pooled: bool) -> nn.Module:
    if not pooled:
        return nn.Conv2d(read, made, 3, padding=1)
    return nn.Sequential(
        nn.Conv2d(read, made, 3, padding=1, bias=False), nn.BatchNorm2d(made), nn.MaxPool2d(2, stride=1)
    )


class _Attention(nn.Module):
    """Plain attention, product by product, as small models on a CPU have it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = max(width // 16, 1)
        self.taken, self.given = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        samples, width = x.shape
        parts = self.taken(x).view(-1, _SEQUENCE, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4).unbind()
        scores = torch.softmax(query @ key.transpose(-1, -2) * 0.25, dim=-1)
        seen: torch.Tensor = self.given((scores @ value).transpose(1, 2).reshape(samples, width))
        return x + seen


def draw_small_steps(seed: int = 0) -> Iterator[SmallStep]:
    """Steps without end, which differ in how often each event of the host occurs and in how far data is moved between
    two uses of it."""
    random = np.random.default_rng((seed, 7, _DRAW))
    number = 0
    while True:
        optimizer = str(random.choice(["sgd", "sgd", "sgd", "sgd", "adam", "adam", "adagrad"]))
        tables = int(random.integers(2, 14)) if optimizer == "sgd" and random.random() < 0.8 else 0
        batch_size = int(random.choice([32, 64, 128, 256, 512, 1024]))
        hidden = int(random.choice([16, 32, 64, 128, 256, 512, 1024]))
        width = int(random.choice([16, 32, 64, 128, 256]))
        while batch_size * hidden**2 > _MOST_WORK:
            hidden //= 2
        layers = min(int(random.integers(1, 8)), max(1, _MOST_WORK // (batch_size * hidden**2)))
        attention = int(random.integers(1, 4)) if not tables and 8 * batch_size * hidden**2 <= _MOST_WORK else 0
        yield SmallStep(
            name=f"small-step-{_DRAW}-{seed}-{number}", batch_size=batch_size, width=width, hidden=hidden,
            layers=layers, norms=int(random.integers(0, 5)), views=int(random.integers(0, 10)),
            convolutions=int(random.integers(1, 4)) if not tables and random.random() < 0.5 else 0,
            pooled=bool(random.random() < 0.5), attention=attention,
            words=_draw_number(random, 500, 10_000) if attention else 0, loss=str(random.choice(_LOSSES)),
            tables=_draw_tables(random, tables, width), optimizer=optimizer,
        )  # fmt: skip
        number += 1


def _draw_tables(random: np.random.Generator, count: int, width: int) -> tuple[tuple[int, int, str], ...]:
    """This many of (rows, lookups per sample, which rows), all together no larger than tables of a step may be."""
    most = _TABLE_BYTES / (4 * width)
    drawn = [
        (_draw_number(random, 1e3, 1e6), _draw_number(random, 1, 40), str(random.choice(_LAWS))) for _ in range(count)
    ]
    share = min(1.0, most / max(sum(rows for rows, _, _ in drawn), 1))
    return tuple((max(int(rows * share), 1), lookups, distribution) for rows, lookups, distribution in drawn)


def _draw_number(random: np.random.Generator, low: float, high: float) -> int:
    """A number between two, even in its logarithm."""
    return round(float(2.0 ** random.uniform(*np.log2((low, high)))))


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


_TRACED_WARM_UPS = 3  # the optimizer's state, then the allocator's cache


def trace_overheads(device: Device, reference: Reference, small: SmallStep) -> Iterator[tuple[str, Sample]]:
    """Every overhead of one traced step: (key, sample) with its mean; the last has the step's name for a key."""
    import torch

    from traincast.calibration.bench.measure import record_trace

    with torch.device(device.kind):
        step = small.make(small.batch_size)
    for _ in range(_TRACED_WARM_UPS):
        step()
    with TemporaryDirectory() as folder:
        path = Path(folder) / "step.json"
        record_trace(step, device, path)
        overheads = measure_overheads(link_trace(read_kineto(path)))
    beside = reference.seconds()
    rows = sorted(overheads.table.items())
    for number, ((kind, name), times) in enumerate(rows, 1):
        mean, deviation = (
            (times.compute_mean_below(LONGEST_GAP), 0.0) if kind == "T1" else times.compute_robust_moments()
        )
        yield small.name if number == len(rows) else f"{small.name}-{kind}-{name}", Sample(
            signature=make_overhead_signature(kind, name), between=0, access="", wall=mean, busy=mean,
            reference_wall=beside.wall, reference_busy=beside.busy, spread=deviation / mean if mean else 0.0,
        )  # fmt: skip
