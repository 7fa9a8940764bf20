"""How the answers to two questions relate: pairs of scenarios, and which of the two may not be slower or larger.

The law of an option stands in its declaration (`Scenario`); what is here makes pairs of it. Laws of hardware are edits
that can only help. A pair that cannot be asked is no pair.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np

from traincast.costs.collectives.model import price_uniform
from traincast.costs.kernels.collective import COLLECTIVE
from traincast.planner.what_if.edits.registry import apply_edits, parse_edits
from traincast.simulator.prediction.result import Prediction
from traincast.simulator.scenario.kinds import USED
from traincast.simulator.scenario.predict import predict
from traincast.simulator.scenario.resolved import Resolved, resolve
from traincast.simulator.scenario.scaling import predict_scaling
from traincast.simulator.scenario.scenario import FieldInfo, Scenario, list_scenario_fields
from traincast_evaluation.laws.answers import COUNTED
from traincast_evaluation.laws.drawing import find_kind, load_device_of

ROUNDING = 1e-7  # relative: sums in another order
JUMP = 1.1
"""How many times as long a step may take on twice the GPUs with the same samples, beyond what a reduction does."""
_REDUCTIONS, _REDUCED_BYTES = ("all_reduce", "all_gather", "reduce_scatter"), (1e4, 1e6, 1e8)
_SECOND = {
    "seq_len": (256, 512), "jitter": (0.05, 0.2), "skew_ms": (1.0, 5.0), "loader_ms": (1.0, 50.0),
    "lora_rank": (8, 64), "frozen_layers": (1, 4), "document_len": (128, 512), "expert_imbalance": (1.0, 1.5),
    "checkpoint_layers": (1, 2), "checkpoint_every": (1, 2), "workers": (1, 4), "shard_group": (2, 4),
}  # fmt: skip
"""Two values of fields that scenarios are drawn without."""
_TEXTS = {"allocator": "expandable_segments:True", "offload": "optimizer"}
_WITH: dict[str, dict[str, Any]] = {
    "workers": {"loader_ms": 20.0}, "checkpoint_layers": {"checkpoint": "full"}, "lora_base": {"lora_rank": 8},
    "lora_targets": {"lora_rank": 8},
    "checkpoint_every": {"checkpoint": "full"}, "fp8_gather": {"dtype": "fp8"},
}  # fmt: skip
"""What a field needs beside it, on both sides."""
_FIRST_CHOICE = {"zero": 1, "checkpoint": "none", "optimizer": "none", "mode": "training", "attention": "eager",
                 "optimizer_state": "fp32", "optimizer_impl": "fused"}  # fmt: skip
HELPING = (
    "host-speed=2", "launch-speed=2", "memory-speed=1.5", "clock-speed=1.25", "link-speed=2", "nic-speed=2",
    "link-latency=0.5", "speed:gemm=2", "speed:elementwise=3", "speed:embedding=2",
)  # fmt: skip
"""Edits that can only help."""

Side = Scenario | Resolved


@dataclass(frozen=True)
class Pair:
    """Two questions under a law: `slower` is the one that may not take less time (None: either), `larger` the one that
    may not take less memory (None: either); `same` says that their times are equal. `slack` is a factor that is
    allowed; `of` says which times: of the step, those in which kernels run, or the sum of its products."""

    law: str
    first: Side
    second: Side
    slower: str | None = None
    larger: str | None = None
    same: bool = False
    slack: float = 1.0
    of: Literal["step", "kernels", "products"] = "step"

    def judge(self, first: Prediction, second: Prediction) -> Iterator[tuple[str, str, float]]:
        """Laws that the two answers break: the law, what it shows, and by which factor."""
        a, b = (_measure_time(result, self.of) for result in (first, second))
        shown = f"{1e3 * a:.4g} and {1e3 * b:.4g} ms"
        allowed = self.slack * (1 + ROUNDING)
        if self.same and abs(a - b) > ROUNDING * a:
            yield f"{self.law}: same time", shown, max(a / b, b / a)
        if self.slower == "second" and b * allowed < a:
            yield f"{self.law}: slower", shown, a / b
        if self.slower == "first" and a * allowed < b:
            yield f"{self.law}: faster", shown, b / a
        x, y = first.memory.peak_bytes, second.memory.peak_bytes
        held = f"{x / 1e9:.4g} and {y / 1e9:.4g} GB"
        if self.larger == "second" and y * (1 + ROUNDING) < x:
            yield f"{self.law}: more memory", held, x / y
        if self.larger == "first" and x * (1 + ROUNDING) < y:
            yield f"{self.law}: less memory", held, y / x


def _measure_time(result: Prediction, of: str) -> float:
    if of == "products":
        return sum(result.by_family.get(name, 0.0) for name in COUNTED)
    return result.device_active if of == "kernels" else result.iteration


def list_pairs(scenario: Scenario, rng: random.Random) -> list[Callable[[], Pair | None]]:
    """Everything that can be tried with a scenario, each made when it is called."""
    kind = find_kind(scenario)
    fields = [info for name, info in list_scenario_fields().items() if info.laws and name in USED[kind]]
    made: list[Callable[[], Pair | None]] = [partial(pair_field, scenario, info, rng) for info in fields]
    made += [partial(pair_edit, scenario, edit) for edit in HELPING]
    made += [partial(make, scenario) for make in (pair_sm, pair_l2, pair_samples, pair_bits, pair_weak, pair_strong)]
    return made


def pair_field(scenario: Scenario, info: FieldInfo, rng: random.Random) -> Pair | None:
    """A scenario with a smaller and a larger value of a field."""
    values = _choose_values(scenario, info, rng)
    if values is None:
        return None
    beside = _WITH.get(info.name, {})
    first, second = (scenario.replace(**{**beside, info.name: value}) for value in values)
    if info.name == "batch_size" and scenario.micro_batch is not None:
        return None
    laws = info.laws
    return Pair(
        law=info.name, first=first, second=second, same="same time" in laws,
        slower="second" if "slower" in laws else "first" if "faster" in laws else None,
        larger="second" if "more memory" in laws else "first" if "less memory" in laws else None,
    )  # fmt: skip


def _choose_values(scenario: Scenario, info: FieldInfo, rng: random.Random) -> tuple[Any, Any] | None:
    now = getattr(scenario, info.name)
    if info.kind == "flag":
        return None if now else (False, True)
    if info.kind == "text":
        return (None, _TEXTS[info.name]) if now is None else None
    if info.kind == "choice":
        choices = list(info.choices)
        start = now if now is not None else _FIRST_CHOICE.get(info.name)
        later = choices[choices.index(start) + 1 :] if start in choices else choices
        return (now if now is not None else None if start is None else start, rng.choice(later)) if later else None
    if info.name in ("clock_mhz", "power_limit_w"):
        device = load_device_of(str(scenario.on))
        full = device.boost_clock_mhz if info.name == "clock_mhz" else device.power_limit_watts
        return None if not full else (float(round(0.6 * full)), float(round(0.9 * full)))
    if info.name in ("micro_batch", "batch_size", "global_batch", "tp", "seq_len") and now is not None:
        if info.name == "micro_batch" and (scenario.global_batch or 0) % (2 * now * max(1, _count_data(scenario))):
            return None
        return now, 2 * now
    return _SECOND.get(info.name)


def _count_data(scenario: Scenario) -> int:
    """Data-parallel ranks of a layout."""
    return (scenario.gpus or 1) // ((scenario.tp or 1) * (scenario.pp or 1) * (scenario.cp or 1))


def pair_edit(scenario: Scenario, edit: str) -> Pair:
    """A step, and the same with something faster."""
    resolved = resolve(scenario)
    return Pair(edit, resolved, apply_edits(resolved, parse_edits([edit])), slower="first")


def pair_sm(scenario: Scenario) -> Pair:
    """A step, and the same on a GPU with one more SM, which computes as fast as the others."""
    resolved = resolve(scenario)
    device = resolved.platform.device
    more = (device.num_sms + 1) / device.num_sms
    peaks = {name: rate * more for name, rate in device.peak_flops.items()}
    changed = resolved.with_device(num_sms=device.num_sms + 1, peak_flops=peaks)
    return Pair("one more SM", resolved, changed, slower="first")


def pair_l2(scenario: Scenario) -> Pair:
    """A step, and the same on a GPU with twice the L2."""
    resolved = resolve(scenario)
    changed = resolved.with_device(l2_bytes=2 * resolved.platform.device.l2_bytes)
    return Pair("twice the L2", resolved, changed, slower="first")


def pair_samples(scenario: Scenario) -> Pair | None:
    """The kernels of a step, and those of one with twice the samples."""
    samples = scenario.batch_size
    if samples is None or scenario.micro_batch is not None:
        return None
    return Pair("kernels of twice the samples", scenario, scenario.replace(batch_size=2 * samples), slower="second",
                of="kernels")  # fmt: skip


def pair_bits(scenario: Scenario) -> Pair | None:
    """The products of a step in fp32, and with fewer bits, where the GPU has units for them. Copies of weights to fewer
    bits, and what follows the products, are other kernels."""
    known = load_device_of(str(scenario.on)).peak_flops
    order = [name for name in ("fp32", "tf32", "fp16", "bf16") if name in known]
    now = scenario.dtype or ("bf16" if find_kind(scenario) == "parallel" else "fp32")
    if now not in order or now in ("fp16", "bf16") or find_kind(scenario) == "program":
        return None
    narrower = order[order.index(now) + 1 :]
    if not narrower:
        return None
    return Pair("fewer bits", scenario.replace(dtype=now), scenario.replace(dtype=narrower[-1]), slower="first",
                of="products")  # fmt: skip


def pair_weak(scenario: Scenario) -> Pair | None:
    """A step, and the same on twice the GPUs, each with its own samples: no faster, but by what a reduction gains
    from links that fewer GPUs have no use for, and with no more memory."""
    gpus = scenario.gpus
    if gpus is None or gpus < 2:
        return None
    changes: dict[str, Any] = {"gpus": 2 * gpus}
    if scenario.global_batch is not None:
        changes["global_batch"] = 2 * scenario.global_batch
    return Pair("twice the GPUs and samples", scenario, scenario.replace(**changes), slower="second", larger="first",
                slack=1.0 / _compare_reductions(scenario, min))  # fmt: skip


def pair_strong(scenario: Scenario) -> Pair | None:
    """A layout, and the same on twice the GPUs with the same samples: it grows no more than a reduction between its
    data-parallel ranks does, which on slower links may be much."""
    if scenario.gpus is None or scenario.global_batch is None or find_kind(scenario) != "parallel":
        return None
    if min(_list_reducing_ranks(scenario)) < 2:
        return None  # where nothing is reduced yet, data parallelism begins with the second rank
    return Pair("twice the GPUs, the same samples", scenario, scenario.replace(gpus=2 * scenario.gpus), slower="first",
                slack=JUMP * _compare_reductions(scenario, max))  # fmt: skip


def _list_reducing_ranks(scenario: Scenario) -> list[int]:
    """How many ranks reduce a gradient: of experts those that hold the same ones, tensor-parallel ranks among them."""
    data = _count_data(scenario)
    if getattr(scenario.workload, "experts", None) is None:
        return [data]
    return [data, data // (scenario.ep or 1), data * (scenario.tp or 1) // (scenario.ep or 1)]


def _compare_reductions(scenario: Scenario, choose: Callable[..., float]) -> float:
    """How many times as long it takes to reduce, or to gather, between twice the ranks: the least or most of those of a
    step; 1 where none takes part."""
    resolved = resolve(scenario)
    topology = resolved.platform.topology
    assert topology is not None and scenario.gpus is not None
    gpus = scenario.gpus // (scenario.pp or 1)  # of a stage
    places = [(n, min(n, topology.count_nodes(times * gpus))) for ranks in _list_reducing_ranks(scenario) if ranks > 1
              for times in (1, 2) for n in [times * ranks]]  # fmt: skip
    calls = [COLLECTIVE.call(kind, bytes=size, ranks=ranks, nodes=nodes) for kind in _REDUCTIONS
             for size in _REDUCED_BYTES for ranks, nodes in places]  # fmt: skip
    seconds = price_uniform(calls, topology).seconds if calls else np.ones(2)
    return float(choose(1.0, *(seconds[1::2] / seconds[::2])))


def predict_side(side: Side) -> Prediction:
    """The answer to one side of a pair."""
    return predict(side)


def check_one_gpu(scenario: Scenario, result: Prediction) -> Iterator[tuple[str, str, float]]:
    """One GPU is one GPU: asked for as such, and as a point of a curve."""
    if scenario.gpus not in (None, 1) or find_kind(scenario) in ("program", "tables"):
        return
    one = predict(scenario.replace(gpus=1))
    if one.iteration != result.iteration or one.memory.by_kind != result.memory.by_kind:
        yield "one GPU equals a single one", f"{1e3 * result.iteration:.6g} and {1e3 * one.iteration:.6g} ms", 1.0
    if scenario.mode == "inference" or scenario.global_batch or scenario.jitter or scenario.skew_ms:
        return
    point = predict_scaling(replace_gpus(scenario), [1]).points[0].answer
    if point.iteration != result.iteration:
        yield "a curve begins at one GPU", f"{1e3 * result.iteration:.6g} and {1e3 * point.iteration:.6g} ms", 1.0


def replace_gpus(scenario: Scenario) -> Scenario:
    """The scenario without a number of GPUs."""
    return scenario.replace(gpus=None)
