"""Advice: the edits that apply by what they would gain, which numbers of a platform a step depends on, and what to
measure next."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from traincast.planner.fitting import Remedy, list_remedies
from traincast.planner.what_if.edits.registry import Requirement, list_trials, parse_edits
from traincast.planner.what_if.money import Prices
from traincast.planner.what_if.result import (
    WhatIf,
    compare_predictions,
    find_bottleneck,
    list_error_sources,
    prepare_both_sides,
)
from traincast.simulator.prediction.result import Prediction, split_critical_path
from traincast.simulator.scenario.predict import predict
from traincast.simulator.scenario.resolved import Resolved
from traincast.utils.display.text import format_milliseconds
from traincast.utils.errors import TraincastError
from traincast.utils.metrics import Part, compute_half_width, rank_by_remaining_width
from traincast.utils.results import Records, Result

_STEP = 1.05  # each number is changed by so much, both ways
NUMBERS = {
    "memory bandwidth": ("memory-speed", 1),
    "SM clock": ("clock-speed", 1),
    "launch cost": ("launch-speed", -1),
    "host overheads": ("host-speed", -1),
    "link bandwidth": ("link-speed", 1),
    "network bandwidth": ("nic-speed", 1),
    "link latency": ("link-latency", 1),
}
"""A platform's numbers, the edit that changes each, and whether the number grows or falls with the edit's value."""


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class Sensitivity(Result):
    """`elasticities`: per cent that the step grows when a number grows by one per cent. `measurements`: by what would
    be measured, the half-width of the 90 % interval (as a share of the step) that would be left."""

    step: Prediction
    elasticities: dict[str, float]
    measurements: dict[str, float]
    half_width: float

    def to_dict(self) -> dict[str, Any]:
        """The result as plain data."""
        return {
            "iteration_ms": 1e3 * self.step.iteration,
            "interval_half_width": self.half_width,
            "elasticities": self.elasticities,
            "half_width_if_measured": self.measurements,
        }

    def headline(self) -> str:
        """The number that matters most, and the measurement that would help most."""
        number = max(self.elasticities, key=lambda name: abs(self.elasticities[name]))
        first = self.step.headline().split("\n")[0]
        lines = [
            f"{first}: {format_milliseconds(self.step.iteration)} ms per step",
            f"depends most on the {number}: elasticity {self.elasticities[number]:+.2f}",
        ]
        if self.measurements:
            best = next(iter(self.measurements))
            left = self.measurements[best]
            lines.append(f"measuring {best} narrows the interval from ±{self.half_width:.1%} to ±{left:.1%}")
        return "\n".join(lines)

    def records(self) -> Records:
        """Tables "elasticities" and "measurements"."""
        return {
            "elasticities": [{"number": name, "elasticity": value} for name, value in self.elasticities.items()],
            "measurements": [{"measured": name, "half_width": value} for name, value in self.measurements.items()],
        }


def analyse_sensitivity(resolved: Resolved) -> Sensitivity:
    """Elasticities of a step and what its interval is made of."""
    step = predict(resolved)
    found = {
        name: _measure_elasticity(resolved, edit, sign)
        for name, (edit, sign) in NUMBERS.items()
        if _is_relevant(resolved, edit)
    }
    elasticities = dict(sorted(found.items(), key=lambda item: -abs(item[1])))
    parts = _list_measurements(resolved, step)
    return Sensitivity(
        step=step,
        elasticities=elasticities,
        measurements=rank_by_remaining_width(parts),
        half_width=compute_half_width(parts),
    )


def _is_relevant(resolved: Resolved, edit: str) -> bool:
    return resolved.gpus > 1 or edit not in ("link-speed", "nic-speed", "link-latency")


def _measure_elasticity(resolved: Resolved, edit: str, sign: int) -> float:
    times = [
        predict(prepare_both_sides(resolved, parse_edits([f"{edit}={factor!r}"]))[1]).iteration
        for factor in (1 / _STEP, _STEP)
    ]
    return sign * math.log(times[1] / times[0]) / (2 * math.log(_STEP))


def _list_measurements(resolved: Resolved, step: Prediction) -> dict[str, Part]:
    """What a step's interval is made of, by what a measurement would be of. A kernel's own errors average out in a
    step and are no part of its interval."""
    found: dict[str, list[tuple[float, float]]] = {}
    for source, sigma in list_error_sources(resolved, step).items():
        assert isinstance(source, tuple)
        kind = str(source[0])
        if kind == "kernel" or not sigma > 0:
            continue
        name = {
            "family": f"{source[1]} kernels", "host": "the host's overheads",
            "release": "a step with this software", "setup": "a step on this system", "layout": "a step of this layout",
            "unknown": "ops that are not known",
        }[kind]  # fmt: skip
        found.setdefault(name, []).append((_compute_share(step, kind, str(source[1])), sigma))
    return {name: _merge_sources(entries) for name, entries in found.items()}


def _merge_sources(entries: list[tuple[float, float]]) -> Part:
    """Sources of one name as one part."""
    share = sum(share for share, _ in entries)
    return Part(share, math.hypot(*(sigma for _, sigma in entries)) / share)


def _compute_share(step: Prediction, kind: str, name: str) -> float:
    """The share of the step's time that a source of errors is about; all of it where that is not one of its parts."""
    seconds = {
        "family": step.by_family.get(name, 0.0), "host": step.device_idle, "unknown": step.estimated_seconds
    }.get(kind, step.iteration)  # fmt: skip
    return seconds / step.iteration if seconds > 0 else 1.0


_PAIRED = 7  # the best edits alone, of which all pairs are tried
_EXPLAINED = 3
_COSTS = ("dollars_per_million_samples", "most_kwh_per_million_samples", "run_hours", "run_dollars", "run_most_kwh")
_LEAST_GAIN = 1e-4  # of the time of a sample: below, an edit changes nothing


@dataclass(frozen=True, eq=False, kw_only=True)
class Suggestion:
    """One or two edits with what they would change; `risk` is what they may cost besides time."""

    answer: WhatIf
    risk: str
    why: str = ""

    @property
    def gain(self) -> float:
        """Share of the time of a sample that is saved."""
        return 1.0 - self.answer.per_sample.ratio

    @property
    def certain(self) -> bool:
        """Whether the gain is larger than its uncertainty."""
        return self.answer.per_sample.certain

    def to_dict(self) -> dict[str, Any]:
        """As plain data; keys say their units."""
        low, high = self.answer.per_sample.ratio_interval
        held = self.answer.after.needed_bytes - self.answer.before.needed_bytes
        cost = self.answer.cost_after.to_dict()
        return {
            "edits": list(self.answer.edits),
            "gain": self.gain,
            "gain_interval": [1 - high, 1 - low],
            "larger_than_uncertainty": self.certain,
            "iteration_ms": 1e3 * self.answer.after.iteration,
            "memory_change_gb": held / 1e9,
            "fits": self.answer.after.fits,
            **{name: cost[name] for name in _COSTS},
            "risk": self.risk,
            "why": self.why,
        }


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class Advice(Result):
    """Suggestions, the largest gain first (those that do not fit in memory last); `refused` says of edits why they
    cannot be applied, `useless` names those that change nothing or make a sample slower. `remedies` come before all
    others where the step does not fit: what would make it."""

    before: Prediction
    suggestions: tuple[Suggestion, ...]
    refused: dict[str, str]
    useless: tuple[str, ...]
    remedies: tuple[Remedy, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The result as plain data."""
        name, share = find_bottleneck(self.before)
        return {
            "iteration_ms": 1e3 * self.before.iteration,
            "bottleneck": name,
            "bottleneck_share": share,
            "fits": self.before.fits,
            "remedies": [one.to_dict() for one in self.remedies],
            "suggestions": [one.to_dict() for one in self.suggestions],
            "refused": self.refused,
            "useless": list(self.useless),
        }

    def headline(self) -> str:
        """What limits the step, and the best changes."""
        name, share = find_bottleneck(self.before)
        first = self.before.headline().split("\n")[0]
        lines = [
            f"{first}: {format_milliseconds(self.before.iteration)} ms per step, {share:.0%} of its critical path is "
            f"{name}"
        ]
        if not self.before.fits:
            help = f"would fit with {self.remedies[0].text}" if self.remedies else "nothing that was tried makes it fit"
            lines.insert(1, f"does not fit: {help}")
        best = [one for one in self.suggestions if one.answer.after.fits][:_EXPLAINED]
        lines += [f"{' + '.join(one.answer.edits)}: {one.gain:.1%} less time a sample" for one in best]
        return "\n".join(lines if best else [*lines, "no edit makes it faster"])

    def records(self) -> Records:
        """Table "suggestions"."""
        return {"suggestions": [{**one.to_dict(), "edits": " + ".join(one.answer.edits)} for one in self.suggestions]}


def advise(
    resolved: Resolved, prices: Prices | None = None, *, progress: Callable[[float], None] = lambda _: None
) -> Advice:
    """Tries the edits that apply to a step, alone and the best of them in pairs."""
    before = predict(resolved)
    alone, refused = [], dict[str, str]()
    texts = list_trials("time", is_layout=resolved.kind == "parallel")
    for number, text in enumerate(texts):
        tried = _try_edits(resolved, before, [text], prices)
        if isinstance(tried, str):
            refused[text] = tried
        else:
            alone.append(tried)
        progress(0.5 * (number + 1) / len(texts))
    useful = sorted(filter(_is_useful, alone), key=_rank_suggestion)
    pairs = list(combinations([one.answer.edits[0] for one in useful[:_PAIRED]], 2))
    together = []
    for number, pair in enumerate(pairs):
        tried = _try_edits(resolved, before, pair, prices)
        if not isinstance(tried, str):
            together.append(tried)
        progress(0.5 + 0.5 * (number + 1) / len(pairs))
    single = {one.answer.edits[0]: one for one in useful}
    together = [one for one in together if _is_better(one, [single[edit] for edit in one.answer.edits])]
    ranked = sorted([*useful, *together], key=_rank_suggestion)
    useless = tuple(one.answer.edits[0] for one in alone if not _is_useful(one))
    return Advice(
        before=before, suggestions=_explain_first(ranked), refused=refused, useless=useless,
        remedies=() if before.fits else tuple(list_remedies(resolved, before)),
    )  # fmt: skip


def _is_useful(one: Suggestion) -> bool:
    """Whether it saves time, or makes a step fit that does not fit as it is."""
    return one.gain > _LEAST_GAIN or one.answer.after.fits > one.answer.before.fits


def _is_better(pair: Suggestion, single: Sequence[Suggestion]) -> bool:
    """Whether two edits together bring more than each of them alone: the step fits, or a sample takes less time."""
    fits = pair.answer.after.fits
    alike = [one.gain for one in single if one.answer.after.fits >= fits]
    return not alike or (fits >= any(one.answer.after.fits for one in single) and pair.gain > max(alike) + _LEAST_GAIN)


def _rank_suggestion(one: Suggestion) -> tuple[bool, float]:
    """What fits comes first, of that what saves most."""
    return not one.answer.after.fits, -one.gain


def _try_edits(resolved: Resolved, before: Prediction, texts: Sequence[str], prices: Prices | None) -> Suggestion | str:
    """What edits bring, or why they cannot be applied."""
    try:
        wanted = parse_edits(texts)
        base, changed = prepare_both_sides(resolved, wanted)
        after = predict(changed)
        start = before if base is resolved else predict(base)
        result = compare_predictions(base, start, changed, after, wanted, prices)
    except TraincastError as error:
        return str(error)
    return Suggestion(answer=result, risk=_describe_risk(wanted))


def _describe_risk(wanted: Sequence[Requirement]) -> str:
    """What edits may cost besides time; what all of them cost of one thing is said together."""
    notes: dict[str, list[str]] = {}
    for risk in dict.fromkeys(one.risk for one in wanted if one.risk):
        thing, _, what = risk.rpartition(": ")
        notes.setdefault(thing, []).append(what)
    return "; ".join(f"{thing}: {', '.join(whats)}" if thing else "; ".join(whats) for thing, whats in notes.items())


def _explain_first(ranked: Sequence[Suggestion]) -> tuple[Suggestion, ...]:
    return tuple(
        Suggestion(answer=one.answer, risk=one.risk, why=explain_change(one.answer) if number < _EXPLAINED else "")
        for number, one in enumerate(ranked)
    )


def explain_change(result: WhatIf) -> str:
    """Why a change helps, from the critical paths before and after, per sample of a step before."""
    scale = result.cost_before.samples / result.cost_after.samples
    before = split_critical_path(result.before)
    after = {name: scale * seconds for name, seconds in split_critical_path(result.after).items()}
    saved = {name: before.get(name, 0.0) - after.get(name, 0.0) for name in {**before, **after}}
    most = max(saved, key=lambda name: saved[name])
    left, share = find_bottleneck(result.after)
    same = "for as many samples " if scale != 1 else ""
    unsure = "" if result.per_sample.certain else "; the gain is within the uncertainty"
    return (
        f"{same}the critical path has {format_milliseconds(after.get(most, 0.0))} ms of {most} instead of "
        f"{format_milliseconds(before.get(most, 0.0))}; what is left is mostly {left} ({share:.0%}){unsure}"
    )
