"""The fastest layouts of a Transformer on a number of GPUs, out of all combinations that divide, in one fixed order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from traincast.hardware.device import Device
from traincast.hardware.platform import Platform, add_default_links
from traincast.models.transformers.description import Transformer, count_all_parameters, count_layer_parameters
from traincast.simulator.parallelism.layout import Layout, complete_layout
from traincast.simulator.parallelism.predict import estimate_seconds, estimate_used_bytes
from traincast.simulator.prediction.result import Prediction, split_step
from traincast.simulator.scenario.kinds import KINDS, USED, find_source_kind
from traincast.simulator.scenario.layouts import list_layout_fields, make_layout
from traincast.simulator.scenario.predict import predict
from traincast.simulator.scenario.resolved import Resolved, format_predict_command, resolve
from traincast.simulator.scenario.scenario import Scenario, list_scenario_fields
from traincast.utils.errors import TraincastError
from traincast.utils.parallel.runner import SEARCH, Died, Job, Workers
from traincast.utils.results import Records, Result, drop_nested_values

_MOST_CHUNKS = 10  # of a stage: more only add exchanges
_MOST_MICRO = 16  # samples of a micro-batch


def list_layout_candidates(model: Transformer, device: Device, base: Layout, per_node: int) -> Iterator[Layout]:
    """Every layout like `base` whose numbers divide and whose parameters, gradients and optimizer fit in memory.
    Tensor-parallel ranks do not reach beyond the `per_node` GPUs of a node."""
    for degrees in _list_degrees(model, base, per_node):
        for layout in _list_shardings(replace(base, **degrees)):
            if count_state_bytes(model, layout) > device.memory_bytes:
                continue
            yield from _list_schedules(model, layout)


def _list_degrees(model: Transformer, base: Layout, per_node: int) -> Iterator[dict[str, Any]]:
    """Degrees of tensor, pipeline, context and expert parallelism that divide GPUs and the model."""
    experts = model.experts.count if model.experts is not None else 1
    for tp in _list_divisors(min(per_node, base.gpus)):
        if model.heads % tp or model.ffn % tp:
            continue
        for pp in _list_divisors(base.gpus // tp):
            if pp > model.layers:
                continue
            for cp in _list_powers_of_two(base.gpus // tp // pp):
                if (base.gpus // tp // pp) % cp or (cp > 1 and base.seq_len < 8192 * cp):
                    continue
                per_stage = base.gpus // pp
                for ep in [n for n in _list_powers_of_two(experts) if per_stage % n == 0 and experts % n == 0]:
                    yield {"tp": tp, "pp": pp, "cp": cp, "ep": ep}


def _list_shardings(base: Layout) -> Iterator[Layout]:
    """A distributed optimizer, and FSDP where there are no stages."""
    yield replace(base, sharding="zero1")
    if base.pp == 1:
        yield replace(base, sharding="zero3")


def _list_schedules(model: Transformer, base: Layout) -> Iterator[Layout]:
    """Micro-batches, chunks and recomputation of one set of degrees."""
    share = base.global_batch // base.dp if base.global_batch % base.dp == 0 else 0
    for micro in [n for n in _list_powers_of_two(min(share, _MOST_MICRO)) if share % n == 0]:
        for chunks in _list_chunk_counts(model.layers, base.pp, share // micro):
            for again in ("none", "selective", "full"):
                layout = replace(base, micro_batch=micro, vp=chunks, checkpoint=again)
                try:
                    yield complete_layout(layout, model)
                except TraincastError:
                    continue


def _list_chunk_counts(layers: int, pp: int, micro_batches: int) -> list[int]:
    if pp == 1 or micro_batches % pp:
        return [1]
    return [n for n in range(1, _MOST_CHUNKS + 1) if layers % (pp * n) == 0] or [1]


def count_state_bytes(model: Transformer, layout: Layout) -> float:
    """Least bytes of parameters, gradients and optimizer of a rank: what no recomputation can save."""
    sparse = sum(count_layer_parameters(model, layer)[1] for layer in range(model.layers))
    inner = max(1, layout.gpus // layout.pp // layout.ep)
    dense_share = (count_all_parameters(model) - sparse) / (layout.tp * layout.pp)
    sparse_share = sparse / (layout.ep * layout.pp)
    if layout.sharding == "zero3":
        return 16 * (dense_share / layout.sharing + sparse_share / inner)
    return 6 * (dense_share + sparse_share) + 12 * (dense_share / layout.sharing + sparse_share / inner)


def _list_divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _list_powers_of_two(most: int) -> list[int]:
    return [1 << i for i in range(max(most, 1).bit_length())]


_SHOWN, _MOST_PREDICTED = 8, 24
_NEAR = 1.05  # of the memory there is: the estimate of what a layout needs is that far from the prediction
_TOGETHER = 16  # layouts that a worker is given at once: neighbours share what was priced
_DAY, _HOUR = 86400.0, 3600.0
_LARGEST_NODE = 8  # GPUs beyond which tensor-parallel ranks do not reach


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class Plan(Result):
    """The best layouts first, with the command that predicts each. `scored` were estimated; `too_large` that
    are faster than the last one shown need more memory than there is. `base` has what all of them share: GPUs, samples
    and tokens of a step, arithmetic.

    `price` is dollars of a GPU and hour (None: not asked), `tokens` those of the whole training (None: not asked).
    """

    model: Transformer
    platform: Platform
    base: Layout
    best: tuple[Prediction, ...]
    commands: tuple[str, ...]
    scored: int
    too_large: int
    price: float | None = None
    tokens: float | None = None

    def row(self, number: int) -> dict[str, Any]:
        """One of the best as plain data; `slower_by` names what most of the difference to the first is."""
        result, layout = self.best[number], read_layout(self.best[number])
        return {
            "layout": layout.described(),
            "tp": layout.tp, "pp": layout.pp, "vp": layout.vp, "cp": layout.cp, "ep": layout.ep, "dp": layout.dp,
            "sharding": layout.sharding, "micro_batch": layout.micro_batch, "accumulation": layout.accumulation,
            "checkpoint": layout.checkpoint,
            "iteration_ms": 1e3 * result.iteration,
            "interval_ms": [1e3 * limit for limit in result.interval],
            "tokens_per_second_per_gpu": result.tokens_per_second_per_gpu,
            "mfu": result.throughput.mfu,
            "memory_gb": result.needed_bytes / 1e9,
            "exposed_comm_ms": 1e3 * result.exposed_comm,
            "slower_by": explain_slower(self.best[0], result) if number else "",
            "command": self.commands[number],
            "dollars_per_billion_tokens": self._count_dollars(result),
            "days": self._count_days(result),
            "dollars": self._sum_dollars(result),
            "prediction": result.to_dict(),
        }  # fmt: skip

    def _count_dollars(self, result: Prediction) -> float | None:
        if self.price is None:
            return None
        return self.price * self.base.gpus * 1e9 / result.throughput.tokens / _HOUR

    def _sum_dollars(self, result: Prediction) -> float | None:
        days = self._count_days(result)
        return None if days is None or self.price is None else 24.0 * days * self.price * self.base.gpus

    def _count_days(self, result: Prediction) -> float | None:
        if self.tokens is None:
            return None
        return self.tokens / result.throughput.tokens / _DAY

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain data; keys are stable and say their units."""
        return {
            "workload": self.model.name,
            "platform": self.platform.key,
            "gpus": self.base.gpus,
            "global_batch": self.base.global_batch,
            "seq_len": self.base.seq_len,
            "mfu_peak_tflops": self.best[0].throughput.peak_flops / self.base.gpus / 1e12,
            "scored": self.scored,
            "too_large": self.too_large,
            "rows": [self.row(number) for number in range(len(self.best))],
        }

    def headline(self) -> str:
        """What was planned, and the best layout with its time."""
        first, rate = self.best[0], self.best[0].throughput
        return (
            f"{self.model.name} on {self.base.gpus} x {self.platform.device.name}, {self.base.global_batch} "
            f"samples of {self.base.seq_len} tokens per step: {self.scored} layouts scored, "
            f"{self.too_large} faster ones too large\n"
            f"{read_layout(first).described()}: {1e3 * first.iteration:,.0f} ms, {rate.tokens / self.base.gpus:,.0f} "
            f"tokens/s per GPU, MFU {rate.mfu:.1%} of {rate.peak_flops / self.base.gpus / 1e12:,.0f} TFLOPS"
        )

    def records(self) -> Records:
        """Table "layouts": the best, one row each."""
        return {"layouts": [drop_nested_values(self.row(number)) for number in range(len(self.best))]}


def read_layout(result: Prediction) -> Layout:
    """The layout that a step was predicted under."""
    assert result.parallel is not None
    return result.parallel.layout


def explain_slower(first: Prediction, other: Prediction) -> str:
    """The part of the step that most of the difference between two layouts is, with its milliseconds."""
    before, after = dict(split_step(first)), dict(split_step(other))
    grown = {name: after.get(name, 0.0) - before.get(name, 0.0) for name in {**before, **after}}
    name = max(sorted(grown), key=lambda part: grown[part])
    return f"{name} +{1e3 * grown[name]:,.0f} ms" if grown[name] > 0 else "about the same"


def make_plan(
    resolved: Resolved,
    *,
    price: float | None = None,
    tokens: float | None = None,
    tool: str | None = None,
    workers: Workers = SEARCH,
    progress: Callable[[float], None] = lambda _: None,
) -> Plan:
    """Estimates every layout that divides (and that a launch file of `tool` can state), simulates the fastest that fit
    and keeps the best of them; the same scenario has the same plan, on however many `workers`."""
    model, platform, base = (
        resolved.of_transformer(),
        add_default_links(resolved.platform),
        make_layout(resolved.scenario),
    )
    room = platform.device.memory_bytes / 1e9
    layouts = list(list_layout_candidates(model, platform.device, base, min(platform.gpus_per_node, _LARGEST_NODE)))
    if not layouts:
        raise TraincastError(
            f"no layout of {model.name} on {base.gpus} GPUs divides a global batch of {base.global_batch} and fits "
            f"{room:.0f} GB; give more GPUs, or a batch that more numbers divide"
        )
    if tool is not None:
        from traincast.planner.parallelism.launch_files import can_state_layout

        layouts = [layout for layout in layouts if can_state_layout(tool, layout, model)]
        if not layouts:
            raise TraincastError(f"no layout of {model.name} on {base.gpus} GPUs is one that a file of {tool} can "
                                 "state; choose another tool")  # fmt: skip
    times = _estimate_layouts(_Scores(resolved), layouts, workers, progress)
    order = [n for _, _, n in sorted((seconds, layouts[n].described(), n) for n, seconds in enumerate(times))]
    found, too_large = _predict_fitting(resolved, platform, [layouts[n] for n in order])
    if not found:
        raise TraincastError(
            f"{len(layouts)} layouts of {model.name} on {base.gpus} GPUs divide"
            f"{f' and can be stated for {tool}' if tool else ''}, and none fits {room:.0f} GB; give "
            "more GPUs or a smaller sequence"
        )
    best = sorted(found, key=lambda pair: pair[0].iteration)[:_SHOWN]
    return Plan(
        model=model, platform=platform, base=base, best=tuple(result for result, _ in best),
        commands=tuple(format_predict_command(one.scenario) for _, one in best), scored=len(layouts),
        too_large=too_large, price=price, tokens=tokens,
    )  # fmt: skip


def _predict_fitting(
    resolved: Resolved, platform: Platform, layouts: Sequence[Layout]
) -> tuple[list[tuple[Prediction, Resolved]], int]:
    """The fastest layouts that fit, of these in order of time, and how many before the last of them are too large. What
    the estimate of memory is not sure of is predicted; where nothing fits, these are what is nearest to it."""
    fitting, larger = list[tuple[Prediction, Resolved]](), list[tuple[Prediction, Resolved]]()
    too_large = 0
    for layout in layouts:
        if len(fitting) == _SHOWN or len(fitting) + len(larger) == _MOST_PREDICTED:
            break
        needed = estimate_used_bytes(resolved.of_transformer(), platform, layout, host=resolved.host)
        if needed > _NEAR * platform.device.memory_bytes:
            too_large += 1
            continue
        one = resolved.changed(**list_layout_fields(layout))
        result = predict(one)
        (fitting if result.fits else larger).append((result, one))
    return fitting or larger, too_large + (len(larger) if fitting else 0)


def _estimate_layouts(
    scores: _Scores, layouts: Sequence[Layout], workers: Workers, progress: Callable[[float], None]
) -> list[float]:
    """Seconds of a step under every layout."""
    tasks = [layouts[first : first + _TOGETHER] for first in range(0, len(layouts), _TOGETHER)]
    found: dict[int, list[float]] = {}

    def heard(number: int, outcome: list[float] | Died) -> None:
        if isinstance(outcome, Died):
            raise TraincastError(f"a process of the search died ({outcome.reason}); give it one process (`processes`)")
        found[number] = outcome
        progress(len(found) / len(tasks))

    workers.run_tasks(Job(prepare=_keep_scores, given=scores, work=_estimate_chunk), tasks, heard)
    return [seconds for number in range(len(tasks)) for seconds in found[number]]


class _Scores:
    """Layouts of a scenario, estimated in closed form; the best are simulated afterwards."""

    def __init__(self, resolved: Resolved) -> None:
        self.resolved = resolved
        self.model, self.platform = resolved.of_transformer(), add_default_links(resolved.platform)

    def seconds(self, layout: Layout) -> float:
        """Of a step."""
        return estimate_seconds(self.model, self.platform, layout, host=self.resolved.host)


def _keep_scores(scores: _Scores) -> _Scores:
    return scores


def _estimate_chunk(scores: _Scores, layouts: Sequence[Layout]) -> list[float]:
    return [scores.seconds(layout) for layout in layouts]


SEARCHED = ("tp", "pp", "vp", "cp", "ep", "fsdp", "zero", "micro_batch", "batch_size", "checkpoint")
"""Fields of a scenario that a plan chooses."""
PLANNED = tuple(name for name in list_scenario_fields() if name in USED["parallel"] and name not in SEARCHED)
"""Fields of a scenario that a plan takes."""


def plan(
    scenario: Scenario,
    *,
    tokens_per_step: int | None = None,
    price: float | None = None,
    tokens: float | None = None,
    tool: str | None = None,
    workers: Workers = SEARCH,
    progress: Callable[[float], None] = lambda _: None,
) -> Plan:
    """The best layouts of a scenario's Transformer on its GPUs. A step is `global_batch` samples (default two per GPU),
    or as many as hold `tokens_per_step`. `price` is dollars of one GPU for an hour, `tokens` those of the whole
    training; with a `tool` only layouts that its launch file can state. `workers` predict the layouts."""
    for name in scenario.given():
        if name not in PLANNED:
            why = "a plan chooses it" if name in SEARCHED else "it is not for Transformers on several GPUs"
            raise TraincastError(f"`{name}` is not used here: {why}; leave it out")
    for name, amount in (("tokens_per_step", tokens_per_step), ("price", price), ("tokens", tokens)):
        if amount is not None and not 0 < amount < 1e18:
            raise TraincastError(f"`{name}` {amount:g} is out of range; give a number above 0")
    if scenario.global_batch is not None and tokens_per_step is not None:
        raise TraincastError("`global_batch` and `tokens_per_step` both say how large a step is; give one of them")
    if scenario.gpus is None:
        raise TraincastError("`gpus` is missing: say how many GPUs the plan is for")
    kind = find_source_kind(scenario.workload)
    if kind != "transformer":
        raise TraincastError(f"a plan lays out described Transformers, such as llama3-8b; this is {KINDS[kind]}")
    resolved = resolve(scenario.replace(global_batch=scenario.global_batch or 2 * scenario.gpus))
    seq_len = scenario.seq_len or resolved.of_transformer().seq_len
    sizes = {"seq_len": seq_len}
    if tokens_per_step is not None:
        sizes["global_batch"] = max(1, round(tokens_per_step / seq_len))
    resolved = resolved.changed(**sizes)
    return make_plan(resolved, price=price, tokens=tokens, tool=tool, workers=workers, progress=progress)
