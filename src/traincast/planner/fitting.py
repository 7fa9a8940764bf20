"""Whether a step fits in memory, with what fills it, what would make it fit (each change predicted), and the largest
that fits."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from traincast.ir.workload import MAX_BATCH, MAX_SEQ_LEN
from traincast.planner.what_if.edits.registry import apply_edits, list_trials, parse_edits
from traincast.simulator.memory.device_memory import DeviceMemory, LargestBlock
from traincast.simulator.prediction.result import Prediction, state_memory
from traincast.simulator.scenario.predict import predict
from traincast.simulator.scenario.resolved import Resolved
from traincast.simulator.scenario.scenario import list_scenario_fields
from traincast.utils.errors import TraincastError
from traincast.utils.results import Records, Result

_SHOWN = 6
_NUMBER = re.compile(r"=x?[\d.]+(?= |$)")
_MORE_GPUS = (2, 4, 8)  # over which a step of fewer GPUs is tried to be sharded
_JOINED = ("attention", "loss", "sharding", "checkpoint", "optimizer-state", "batch-size")
"""Edits of which several are tried at once."""


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
            "needed_gb": result.needed_bytes / 1e9,
            "fit_probability": result.fit_probability,
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
    enough = {text for one in found for text in one.edits}
    several = list(_join_edits([text for text in useful if text not in enough], before))
    for number, texts in enumerate(several):
        if not any(set(one.edits) <= set(texts) for one in found):
            tried = _try_edits(resolved, texts)
            found += [tried] if tried is not None and tried.prediction.fits else []
        progress(0.5 + (number + 1) / len(several) / 2)
    # what costs time that is not predicted (copies to the host) comes last
    found.sort(key=lambda one: ("offload" in one.fields, one.seconds_per_sample, one.text))
    best = dict[str, Remedy]()  # of changes that differ in numbers alone
    for one in found:
        best.setdefault(_NUMBER.sub("", " ".join(one.edits)), one)
    return list(best.values())[:_SHOWN]


def _join_edits(useful: Sequence[str], before: Prediction) -> Iterator[tuple[str, ...]]:
    """Edits to be tried together, few first: the strongest of each kind that is not enough alone, and more GPUs."""
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


AXES = {"batch-size": MAX_BATCH, "seq-len": MAX_SEQ_LEN, "rows": 10_000_000}
"""What may be as large as fits, and its largest value; rows are hundredths of those that every table has."""
_LARGEST = 8


@dataclass(frozen=True, slots=True)
class Largest:
    """The largest value of an axis under which the step fits, and how sure that is; 0: not even the smallest does.
    That of rows is how many times as many every table has."""

    axis: str
    value: float
    probability: float

    @property
    def text(self) -> str:
        """The value as it is said."""
        return f"x{self.value:g} of every table" if self.axis == "rows" else f"{self.value:g}"


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class Fit(Result):
    """Whether a step fits. `remedies` are changes under which one that does not fit would, the cheapest first."""

    prediction: Prediction
    remedies: tuple[Remedy, ...] = ()
    largest: Largest | None = None

    @property
    def memory(self) -> DeviceMemory:
        """The memory of the fullest rank."""
        return self.prediction.memory

    @property
    def fits(self) -> bool:
        """Whether it is more likely than not that the step fits."""
        return self.prediction.fits

    def to_dict(self) -> dict[str, Any]:
        """The result as plain data; keys say their units."""
        p = self.prediction
        return {
            "fits": self.fits,
            "fit_probability": self.prediction.fit_probability,
            "workload": p.workload.name,
            "platform": p.platform.key,
            "gpus": p.gpus,
            "batch_size": p.workload.batch_size,
            "memory": {**self.memory.to_dict(), "largest": self.list_culprits()},
            "ranks": [
                {"ranks": list(one.ranks), "allocated_gb": one.memory.peak_bytes / 1e9,
                 "by_category_gb": {name: nbytes / 1e9 for name, nbytes in one.memory.by_kind.items()}}
                for one in p.ranks
            ],
            "by_module_gb": {name: nbytes / 1e9 for name, nbytes in list(self.memory.by_module.items())[:32]},
            "remedies": [one.to_dict() for one in self.remedies],
            "max": None if self.largest is None else {
                "axis": self.largest.axis, "value": self.largest.value, "fit_probability": self.largest.probability,
            },
        }  # fmt: skip

    def list_culprits(self, most: int = _LARGEST) -> list[dict[str, Any]]:
        """What takes most at the peak: category, module, the line that makes its largest tensor ("" where the step was
        not captured from code), GB and how many blocks."""
        lines, missing = self.prediction.workload.lines, self.prediction.left_out_bytes
        blocks = self.memory.list_largest(most)
        if missing:
            blocks = [LargestBlock("embedding_table", "rows that the step does not hold", missing, 1), *blocks][:most]
        blocks = sorted(blocks, key=lambda one: -one.nbytes)
        return [{**one.to_dict(), "line": lines.get(one.module, "")} for one in blocks]

    def headline(self) -> str:
        """The verdict."""
        probability = self.prediction.fit_probability
        verdict = state_memory(self.prediction)
        sure = "" if "(" in verdict else f"; {probability if self.fits else 1 - probability:.0%} sure"
        return f"{verdict[:1].upper()}{verdict[1:]} of {self.prediction.platform.device.name}{sure}"

    def records(self) -> Records:
        """Tables "largest" (what fills the peak) and "remedies"."""
        return {
            "largest": self.list_culprits(),
            "remedies": [one.to_dict() for one in self.remedies],
        }


def answer_fit(
    resolved: Resolved, *, largest: str | None = None, progress: Callable[[float], None] = lambda _: None
) -> Fit:
    """Whether a step fits; `largest` names what is to be as large as fits (of `AXES`)."""
    before = predict(resolved)
    found = None if largest is None else find_largest(resolved, largest)
    remedies = () if before.fits else tuple(list_remedies(resolved, before, progress))
    return Fit(prediction=before, remedies=remedies, largest=found)


def find_largest(resolved: Resolved, axis: str) -> Largest:
    """The largest value of an axis under which the step fits, by doubling and halving."""
    if axis not in AXES:
        raise TraincastError(f"`max` '{axis}' is not known; give {', '.join(AXES)}")
    unit = 2 * resolved.scenario.cp if axis == "seq-len" and resolved.scenario.cp else 1  # ranks of `cp` share halves
    most, known = AXES[axis] // unit, dict[int, float]()

    def weigh(count: int) -> float:
        value = count * unit
        if value not in known:
            try:
                known[value] = predict(_enlarge(resolved, axis, value)).fit_probability
            except TraincastError as error:
                _, _, why = str(error).rpartition(f"edit rows=x{value / 100:g}: ")  # a trial, which nobody asked for
                raise TraincastError(f"`max` {axis}: {why}") from None
        return known[value]

    low, high = 0, 1
    while high <= most and weigh(high) >= 0.5:
        low, high = high, 2 * high
    while high - low > max(1, low // 64):
        middle = (low + high) // 2
        if middle <= most and weigh(middle) >= 0.5:
            low = middle
        else:
            high = middle
    value = low * unit
    return Largest(axis, value / 100 if axis == "rows" else value, known.get(value, 0.0))


def _enlarge(resolved: Resolved, axis: str, value: int) -> Resolved:
    """The step with another value of an axis."""
    if axis == "rows":
        [change] = parse_edits([f"rows=x{value / 100:g}"])
        return change.edit.apply(resolved, change.value)
    if axis == "seq-len":
        return resolved.changed(seq_len=value)
    scenario = resolved.scenario
    name = "batch_size" if scenario.micro_batch is None else "micro_batch"
    return resolved.changed(**{name: value, **({"global_batch": None} if scenario.global_batch else {})})
