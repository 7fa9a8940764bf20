"""What would make a step fit: edits that save memory, tried one by one and together, the cheapest first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from traincast.planner.what_if.edits.registry import apply_edits, list_trials, parse_edits
from traincast.simulator.prediction.result import Prediction
from traincast.simulator.scenario.fields import list_scenario_fields
from traincast.simulator.scenario.predict import predict
from traincast.simulator.scenario.resolved import Resolved
from traincast.utils.errors import TraincastError

_SHOWN = 6
_MORE_GPUS = (2, 4, 8)  # over which a step of fewer GPUs is tried to be sharded
_JOINED = (
    "loss",
    "sharding",
    "checkpoint",
    "optimizer-state",
    "batch-size",
)  # edits of which several are tried at once


@dataclass(frozen=True, eq=False, slots=True)
class Remedy:
    """Edits, the fields of the scenario that they change, those that change none (`others`), and what comes out."""

    edits: tuple[str, ...]
    fields: dict[str, Any]
    others: tuple[str, ...]
    prediction: Prediction

    @property
    def seconds_per_sample(self) -> float:
        """Of all GPUs together: what the change costs."""
        return self.prediction.iteration * self.prediction.gpus / max(1, count_samples(self.prediction))

    @property
    def text(self) -> str:
        """The change as options of the command line, and as edits of `whatif` where no option says it."""
        words = []
        for name, value in ((name, value) for name, value in self.fields.items() if value is not None):
            option = list_scenario_fields()[name].option
            words.append(option if value is True else f"{option} {value}")
        return " ".join([*words, *self.others])

    def to_dict(self) -> dict[str, Any]:
        """As plain data; keys say their units."""
        result = self.prediction
        return {
            "options": self.text,
            "edits": list(self.edits),
            "used_gb": result.memory.used_bytes / 1e9,
            "fit_probability": result.memory.fit_probability,
            "iteration_ms": 1e3 * result.iteration,
            "gpu_us_per_sample": 1e6 * self.seconds_per_sample,
        }


def count_samples(result: Prediction) -> int:
    """Samples of a step, all GPUs together."""
    if result.parallel is not None:
        return result.parallel.layout.global_batch
    return result.workload.samples * result.gpus


def list_remedies(
    resolved: Resolved, before: Prediction, progress: Callable[[float], None] = lambda _: None
) -> list[Remedy]:
    """Changes under which the step fits, the cheapest first: by the GPU time of a sample, `_SHOWN` of them. Those that
    cannot be applied are left out, and more of what is enough already."""
    singles = list_trials("room", is_layout=resolved.kind == "parallel")
    if before.gpus == 1:  # there is nobody to share with
        singles = [text for text in singles if not text.startswith("sharding=")]
    useful, found = list[str](), list[Remedy]()
    for number, text in enumerate(singles):
        tried = _try_edits(resolved, (text,))
        if tried is not None and tried.prediction.memory.peak_bytes < before.memory.peak_bytes:
            useful.append(text)
        found += [tried] if tried is not None and tried.prediction.fits else []
        progress((number + 1) / len(singles) / 2)
    several = list(_join_edits(useful, before))
    for number, texts in enumerate(several):
        if not any(set(one.edits) <= set(texts) for one in found):
            tried = _try_edits(resolved, texts)
            found += [tried] if tried is not None and tried.prediction.fits else []
        progress(0.5 + (number + 1) / len(several) / 2)
    # what costs time that is not predicted (copies to the host) comes last
    return sorted(found, key=lambda one: ("offload" in one.fields, one.seconds_per_sample, one.text))[:_SHOWN]


def _join_edits(useful: Sequence[str], before: Prediction) -> Iterator[tuple[str, ...]]:
    """Edits to be tried together, few first: the strongest of each kind, and more GPUs."""
    more = [f"gpus={number}" for number in _MORE_GPUS if number > before.gpus]
    for gpus in more:
        yield (gpus,)
        yield gpus, "sharding=zero3"
    strongest = {text.partition("=")[0]: text for text in useful}
    best = [strongest[name] for name in _JOINED if name in strongest]
    for count in range(2, len(best) + 1):
        yield from combinations(best, count)
    for gpus in more[-1:]:
        yield gpus, *(text for text in best if not text.startswith("sharding="))
        yield gpus, "sharding=zero3", *(text for text in best if not text.startswith(("sharding=", "batch-size=")))


def _try_edits(resolved: Resolved, texts: Sequence[str]) -> Remedy | None:
    """The step with edits; None where they cannot be applied."""
    changed, others = resolved, list[str]()
    try:
        for one in parse_edits(texts):
            before, changed = changed.scenario, apply_edits(changed, [one])
            others += [one.text] if changed.scenario == before else []
        result = predict(changed)
    except TraincastError:
        return None
    old, new = resolved.scenario.given(), changed.scenario.given()
    fields = {name: new.get(name) for name in {**new, **old} if old.get(name) != new.get(name)}
    return Remedy(tuple(texts), fields, tuple(others), result)
