"""Advice: the edits that apply, alone and in pairs, by what they would gain, with what each costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from traincast.planner.fitting.remedies import Remedy, list_remedies
from traincast.planner.what_if.edits.registry import Requirement, list_trials, parse_edits
from traincast.planner.what_if.money import Prices
from traincast.planner.what_if.result import WhatIf, compare_predictions, find_bottleneck, prepare_both_sides
from traincast.simulator.prediction.result import Prediction
from traincast.simulator.prediction.verdict import split_critical_path
from traincast.simulator.scenario.predict import predict
from traincast.simulator.scenario.resolved import Resolved
from traincast.utils.display.text import format_milliseconds
from traincast.utils.errors import TraincastError
from traincast.utils.results import Records, Result

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
    same = " for as many samples" if scale != 1 else ""
    unsure = "" if result.per_sample.certain else "; the gain is within the uncertainty"
    return (
        f"of the critical path{same}, {most} falls from {format_milliseconds(before.get(most, 0.0))} to "
        f"{format_milliseconds(after.get(most, 0.0))} ms; what is left is mostly {left} ({share:.0%}){unsure}"
    )
