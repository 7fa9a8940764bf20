"""Changes that make a step need less memory, each tried and predicted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from traincast.simulator.prediction.result import Prediction
from traincast.simulator.scenario.fields import list_scenario_fields
from traincast.simulator.scenario.predict import predict
from traincast.simulator.scenario.resolved import Resolved
from traincast.utils.errors import TraincastError

Changes = list[dict[str, Any]]
_EXPANDABLE = "expandable_segments:True"
_SHOWN = 6
_MOST_GPUS = 8  # over which a step of one GPU is tried to be sharded


@dataclass(frozen=True, eq=False, slots=True)
class Remedy:
    """Fields of the scenario that were changed, and what comes out."""

    fields: dict[str, Any]
    prediction: Prediction

    @property
    def seconds_per_sample(self) -> float:
        """Of all GPUs together: what the change costs."""
        return self.prediction.iteration * self.prediction.gpus / max(1, count_samples(self.prediction))

    @property
    def text(self) -> str:
        """The change as options of the command line."""
        words = []
        for name, value in ((name, value) for name, value in self.fields.items() if value is not None):
            option = list_scenario_fields()[name].option
            words.append(option if value is True else f"{option} {value}")
        return " ".join(words)

    def to_dict(self) -> dict[str, Any]:
        """As plain data; keys say their units."""
        result = self.prediction
        return {
            "options": self.text,
            "used_gb": result.memory.used_bytes / 1e9,
            "fit_probability": result.memory.fit_probability,
            "iteration_ms": 1e3 * result.iteration,
            "gpu_us_per_sample": 1e6 * self.seconds_per_sample,
        }


def count_samples(result: Prediction) -> int:
    """Samples of a step, all GPUs together."""
    if result.parallel is not None:
        return result.parallel.layout.global_batch
    return result.workload.samples


def list_remedies(
    resolved: Resolved, before: Prediction, progress: Callable[[float], None] = lambda _: None
) -> list[Remedy]:
    """Changes under which the step fits, the cheapest first: by the GPU time of a sample, `_SHOWN` of them. Those that
    cannot be applied are left out."""
    changes, found = list(_list_changes(resolved, before)), []
    for number, fields in enumerate(changes):
        try:
            after = predict(resolved.changed(**fields))
        except TraincastError:
            continue
        finally:
            progress((number + 1) / len(changes))
        if after.memory.fits:
            found.append(Remedy(fields, after))
    # what costs time that is not predicted (copies to the host) comes last
    return sorted(found, key=lambda one: ("offload" in one.fields, one.seconds_per_sample, one.text))[:_SHOWN]


def _list_changes(resolved: Resolved, before: Prediction) -> Iterator[dict[str, Any]]:
    scenario = resolved.scenario
    if scenario.allocator is None:
        yield {"allocator": _EXPANDABLE}
    if resolved.kind == "parallel":
        yield from _list_layout_changes(resolved, before)
        return
    size = before.workload.batch_size
    for smaller in dict.fromkeys(size // part for part in (2, 4, 8, 16)):
        if smaller >= 1:
            yield {"batch_size": smaller}
    if before.gpus > 1 and scenario.fsdp is None and scenario.zero is None:
        yield {"zero": 1}
        yield {"fsdp": 2}
    elif before.gpus == 1:
        for gpus in (2, 4, _MOST_GPUS):
            yield {"gpus": gpus, "fsdp": 2}


def _list_layout_changes(resolved: Resolved, before: Prediction) -> Iterator[dict[str, Any]]:
    assert before.parallel is not None
    scenario, layout = resolved.scenario, before.parallel.layout
    sizes = [layout.micro_batch // part for part in (2, 4, 8) if layout.micro_batch // part >= 1]
    smaller: Changes = [
        {"batch_size": None, "micro_batch": size, "global_batch": layout.global_batch} for size in sizes
    ]
    yield from smaller
    again: Changes = [{"checkpoint": kind} for kind in ("selective", "full") if layout.checkpoint == "none"]
    again += [{"checkpoint": "full"}] if layout.checkpoint in ("light", "selective") else []
    yield from again
    states: Changes = [{"optimizer_state": kind} for kind in ("bf16", "int8") if layout.optimizer_state == "fp32"]
    yield from states
    losses: Changes = [{"loss": "fused"}] if not layout.loss else []
    yield from losses
    shared: Changes = []
    if layout.dp * layout.cp > 1 and layout.sharding != "zero3":
        shared = [{"zero": None, "fsdp": 2}] if layout.pp > 1 or scenario.zero else [{"zero": 1}, {"fsdp": 2}]
    yield from shared
    for tp in (2, 4, 8):
        if layout.tp < tp <= layout.gpus // layout.pp:
            yield {"tp": tp}
    best = [options[-1] for options in (losses, shared, again, states, smaller) if options]
    for count in range(2, len(best) + 1):
        for chosen in combinations(best, count):
            yield {name: value for one in chosen for name, value in one.items()}
    if not layout.offload:
        yield {"offload": "activations"}
        yield {"offload": "optimizer"}
