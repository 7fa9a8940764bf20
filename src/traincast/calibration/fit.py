"""Samples become a profile: a model per kind of op, caches as they show in the samples, host time per event, waits
inside a step; and its errors.

Small steps are run on several ranks at once. What each takes on the wall's clock beyond the simulation of its own plan
(`rank_plan`), with collectives as they take alone, is divided by their number.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

from traincast.costs.cpu.collectives import CollectiveModels, CpuCollective, fit_collectives, is_collective
from traincast.costs.cpu.estimator import KindModel, fit_few, fit_kind, fit_terms, solve_non_negative
from traincast.costs.cpu.features import OTHER, Caches, Features, estimate_rough_prices, get_family, get_kind
from traincast.costs.cpu.op_costs import HOST_EVENTS
from traincast.costs.cpu.profile import Profile, fit_crowding
from traincast.costs.cpu.samples import Sample, average_visits, group_visits, is_copy, select_calm_samples
from traincast.simulator.cpu.instructions import RankPlan, Stretch, compute_step_seconds
from traincast.utils.arrays import FloatArray
from traincast.utils.errors import TraincastError
from traincast.utils.metrics import ErrorRow, compute_error_row, is_within_interval

_MOST_STRETCHES = 10_000
_CALM_SHARE = 0.5  # of the steps, those alongside which the reference took least: neighbours make ranks wait, too
_UNSTEADY = 1.0  # relative spread of a step beyond which it says too little: ranks that wait for each other spread


def write_plan_text(plan: RankPlan) -> str:
    """A plan as JSON, its computing as shares of the whole."""
    whole = sum(one.seconds for one in plan.stretches) or 1.0
    stretches = [[round(one.seconds / whole, 6), one.calls, one.awaits] for one in plan.stretches]
    return json.dumps([stretches, [[one.kind, one.message_bytes, one.sent] for one in plan.exchanges]])


def parse_plan(text: str, seconds: float) -> RankPlan:
    """The plan that `plan_text` wrote, of a rank that computes for so long."""
    try:
        stretches, exchanges = json.loads(text)
        plan = RankPlan(
            tuple(Stretch(seconds * float(share), int(calls), int(awaits)) for share, calls, awaits in stretches),
            tuple(
                CpuCollective(str(kind), int(size), tuple(int(part) for part in sent)) for kind, size, sent in exchanges
            ),
        )
        if not 0 < len(plan.stretches) <= _MOST_STRETCHES:
            raise ValueError(f"{len(plan.stretches)} stretches")
        for one in plan.stretches:
            if not (one.seconds >= 0.0 and max(one.calls, one.awaits) < len(plan.exchanges)):
                raise ValueError(f"a stretch of {one}")
    except (TypeError, ValueError) as error:
        raise TraincastError(f"a step of ranks in the store is damaged ({error}); measure it again") from None
    return plan


def add_late_collectives(
    models: CollectiveModels, steps: Iterable[Sample], reference: float, jitter: float
) -> CollectiveModels:
    """The models with what collectives take longer inside a step: the median over the calmer half of the steps of ranks
    whose collectives were all measured, at least none."""
    late = []
    for step in sorted(steps, key=lambda one: one.reference_wall):
        if step.spread < _UNSTEADY:
            plan = parse_plan(step.plan, reference * step.busy / step.reference_busy)
            if plan.exchanges and all(models.knows([one] * step.ranks) for one in plan.exchanges):
                simulated = compute_step_seconds([plan] * step.ranks, models.cost, jitter)
                late.append((reference * step.ratio("wall") - simulated) / len(plan.exchanges))
    calm = late[: math.ceil(_CALM_SHARE * len(late))]
    return replace(models, late=max(0.0, float(f"{np.median(calm):.4g}"))) if calm else models


_USUAL = Caches(1e6, 8e6)
_L2 = (256e3, 384e3, 512e3, 768e3, 1e6, 1.5e6, 2e6, 3e6)
_L3 = (3e6, 4e6, 6e6, 8e6, 12e6, 16e6, 24e6, 32e6, 48e6, 64e6)
_OWN_TERMS = [0, 4, 5, 6, 7]  # of a kind that streams: a call, its code, elements, strided ones; bytes are shared
_OWN = len(_OWN_TERMS)
_CODE_TERMS = slice(4, 6)  # code from the L3 and from memory
_MOST_CODE = (40e-6, 150e-6)  # seconds
_FEWEST = 4  # samples of a kind
_NONE: Mapping[str, KindModel] = {}
STREAMING = ("elementwise", "reduction")
"""Families whose kinds share the price of a byte."""
_DISTURBED = 0.25  # relative spread beyond which a sample says too little
_HOST_SPREAD = 0.25
# seconds per host event on a server core (host/data, eager PyTorch 2): what small steps cannot tell apart stays near it
_HOST_PRIOR = np.array([60e-6, 8e-6, 2e-6, 8e-6, 3e-6, 4e-6, 15e-6, 150e-6])
_HOST_WEIGHT = 0.5  # of that, against one for a small step
# how far what is left of a small step may be off: a share of the usual host time, and one of its kernels, which were
# timed in other repetitions
_HOST_OFF, _KERNELS_OFF = 0.2, 0.03


def fit_profile(samples: Iterable[Sample], identity: Mapping[str, Any], clock: str) -> tuple[Profile, list[ErrorRow]]:
    """The profile of all samples, with the errors that a fit on four fifths of them makes on the others."""
    from threadpoolctl import threadpool_limits

    with threadpool_limits(1):  # many small matrices: on a busy machine threads would mostly wait for each other
        return _fit_profile(list(samples), identity, clock)


def _fit_profile(every: list[Sample], identity: Mapping[str, Any], clock: str) -> tuple[Profile, list[ErrorRow]]:
    single = [sample for sample in every if not is_collective(sample.signature)]
    calm = select_calm_samples(single)
    together = [sample for sample in calm if sample.plan]
    steady = [sample for sample in calm if sample.spread < _DISTURBED and not sample.plan]
    crowding, steps = fit_crowding(steady, clock), [sample for sample in steady if sample.signature is None]
    steady = [sample for sample in steady if sample.ranks == 1]
    ops = [sample for sample in steady if sample.signature is not None and not is_copy(sample.signature)]
    if len(ops) < 2 * _FEWEST:
        raise TraincastError(f"the store holds {len(ops)} steady samples; measure for longer with 'traincast bench'")
    reference = float(np.median([s.reference_busy if clock == "busy" else s.reference_wall for s in steady]))
    again = _compute_repeat_noise([s for s in ops if not s.found], clock)
    ops = [average_visits(several) for several in group_visits(ops)]
    kept, held = [s for s in ops if not s.held_out], [s for s in ops if s.held_out]
    caches = _choose_caches([s for s in kept if not s.found], reference, clock)
    tried = _fit_models(kept, caches, reference, clock)
    parts = {"": held, "alone: ": [s for s in held if not s.found], "in steps: ": [s for s in held if s.found]}
    errors = [
        row for where, some in parts.items() for row in _compute_errors(tried, some, caches, reference, clock, where)
    ]
    errors += again
    models = _fit_few_models(ops, caches, reference, clock) | _fit_models(ops, caches, reference, clock, tried)
    exchanges, exchange_errors = fit_collectives([s for s in every if is_collective(s.signature)], reference)
    jitter = _compute_jitter(steps)
    exchanges = add_late_collectives(exchanges, together, reference, jitter)
    errors = [*errors, *exchange_errors]
    profile = Profile(
        identity=identity, clock=clock, reference=reference, caches=caches, models=models, host={},
        host_spread=_HOST_SPREAD, errors=tuple(_make_error_row(error) for error in errors), samples=len(every),
        exchanges=exchanges, crowding=crowding, jitter=jitter,
    )  # fmt: skip
    return _add_host(profile, steps), errors


def _make_error_row(error: ErrorRow) -> dict[str, Any]:
    return {
        "family": error.group, "n": error.n, "gmae": error.gmae, "mape": error.mape, "median": error.median,
        "worst": error.worst, "bias": error.bias, "covered": error.covered,
    }  # fmt: skip


def _group_by_kind(
    samples: Sequence[Sample], caches: Caches, reference: float, clock: str
) -> dict[str, list[tuple[Features, float]]]:
    kinds: dict[str, list[tuple[Features, float]]] = {}
    for sample in samples:
        features = sample.features(caches)
        kinds.setdefault(features.kind, []).append((features, reference * sample.ratio(clock)))
    return kinds


def _fit_models(
    samples: Sequence[Sample], caches: Caches, reference: float, clock: str, like: Mapping[str, KindModel] = _NONE
) -> dict[str, KindModel]:
    """A model of each kind; those of most of the samples (`like`) say where to search."""
    kinds = {k: p for k, p in _group_by_kind(samples, caches, reference, clock).items() if len(p) >= _FEWEST}
    streaming = {k: points for k, points in kinds.items() if points[0][0].family in STREAMING}
    shared = _fit_streaming_kinds(streaming)
    models = {kind: _fit_kind(points, shared.get(kind), like.get(kind)) for kind, points in kinds.items()}
    every = [point for points in (streaming or kinds).values() for point in points]
    terms = np.array([f.terms[:4] for f, _ in every])
    seconds = np.array([s for _, s in every])
    none = np.zeros((0, 0))
    models[OTHER] = KindModel(
        coefficients=fit_terms(terms, seconds), places=none, weights=np.zeros(0),
        inverse=none, lengths=np.zeros(0), amplitude=0.5, noise=0.5,
    )  # fmt: skip
    return models


def _fit_kind(
    points: list[tuple[Features, float]], coefficients: FloatArray | None, like: KindModel | None
) -> KindModel:
    terms = np.array([features.terms for features, _ in points])
    places = np.array([features.place for features, _ in points])
    seconds = np.array([taken for _, taken in points])
    if coefficients is None:
        coefficients = fit_terms(terms, seconds, _bound_coefficients(terms.shape[1]))
    return fit_kind(terms, places, seconds, coefficients, like=like)


def _fit_few_models(samples: Sequence[Sample], caches: Caches, reference: float, clock: str) -> dict[str, KindModel]:
    """Of kinds with too few samples to be fitted: a store of one step's ops may have one of each."""
    models = {}
    for kind, points in _group_by_kind(samples, caches, reference, clock).items():
        if len(points) < _FEWEST:
            terms, places = (
                np.array([getattr(features, name) for features, _ in points]) for name in ("terms", "place")
            )
            models[kind] = fit_few(
                terms, places, np.array([taken for _, taken in points]), estimate_rough_prices(points[0][0])
            )
    return models


def _bound_coefficients(terms: int) -> FloatArray:
    """The highest prices of an op's terms: code that is some hundred lines long cannot take longer to fetch, and only
    that of small ops is told apart from the rest."""
    most = np.full(terms, np.inf)
    most[_CODE_TERMS] = _MOST_CODE
    return most


def _fit_streaming_kinds(kinds: Mapping[str, list[tuple[Features, float]]]) -> dict[str, FloatArray]:
    """Coefficients of kinds that stream through memory: a byte costs the same in all of them, a call, its
    code and an element have their own price in each."""
    if not kinds:
        return {}
    rows, taken = [], []
    for number, points in enumerate(kinds.values()):
        for features, seconds in points:
            row = np.zeros(3 + _OWN * len(kinds))
            row[:3] = features.terms[1:4]
            row[3 + _OWN * number :][:_OWN] = features.terms[_OWN_TERMS]
            rows.append(row)
            taken.append(seconds)
    most = np.concatenate([np.full(3, np.inf), *[_bound_coefficients(3 + _OWN)[_OWN_TERMS]] * len(kinds)])
    solution = fit_terms(np.array(rows), np.array(taken), most)
    parts = {kind: solution[3 + _OWN * number :][:_OWN] for number, kind in enumerate(kinds)}
    return {kind: np.concatenate([part[:1], solution[:3], part[1:]]) for kind, part in parts.items()}


def _choose_caches(samples: Sequence[Sample], reference: float, clock: str) -> Caches:
    """The cache sizes under which the terms alone explain elementwise ops best."""
    plain = [sample for sample in samples if _is_plain(sample)]
    if len(plain) < 4 * _FEWEST:
        return _USUAL

    @cache  # both rounds ask for many of the same
    def left_over(caches: Caches) -> float:
        total = 0.0
        for points in _group_by_kind(plain, caches, reference, clock).values():
            columns = np.array([f.terms for f, _ in points]) / np.array([s for _, s in points])[:, None]
            total += float(np.sum(np.abs(columns @ solve_non_negative(columns, np.ones(len(points))) - 1.0)))
        return total

    best = _USUAL
    for _ in range(2):  # each for the other
        best = min((Caches(best.l2, l3) for l3 in _L3), key=left_over)
        best = min((Caches(l2, best.l3) for l2 in _L2), key=left_over)
    return best


def _is_plain(sample: Sample) -> bool:
    assert sample.signature is not None
    return get_family(sample.signature.name.partition("::")[2].rstrip("_")) == "elementwise"


def _compute_errors(
    models: Mapping[str, KindModel], held: Sequence[Sample], caches: Caches, reference: float, clock: str,
    where: str = "",
) -> list[ErrorRow]:  # fmt: skip
    rows: dict[str, list[tuple[float, float, float, str]]] = {}
    for sample in held:
        features = sample.features(caches)
        if features.kind in models:
            predicted, sigma = models[features.kind].predict(features.terms, features.place)
            assert sample.signature is not None
            shapes = " ".join("x".join(map(str, spec.shape)) for spec in sample.signature.inputs[:3])
            state = "in a step" if sample.found else f"after {sample.between / 1e6:.1f} MB"
            rows.setdefault(features.family, []).append(
                (predicted, reference * sample.ratio(clock), sigma, f"{features.kind} {shapes} {state}")
            )
    errors = []
    for family, points in sorted(rows.items()):
        guessed, measured, sigmas = (np.array(column) for column in list(zip(*points, strict=True))[:3])
        names, inside = [point[3] for point in points], is_within_interval(guessed, measured, sigmas)
        errors.append(compute_error_row("held out", where + family, guessed, measured, names, inside=inside))
    return errors


def _compute_jitter(steps: Sequence[Sample]) -> float:
    """How far what a rank computes deviates from step to step, in the median of the small steps of several ranks."""
    spreads = [step.spread for step in steps if step.ranks > 1]
    return float(f"{np.median(spreads):.4g}") if spreads else 0.0


def _compute_repeat_noise(samples: Sequence[Sample], clock: str) -> list[ErrorRow]:
    """How far a second measurement of the same is from the first: noise of single ones, which no model foresees."""
    families: dict[str, list[tuple[float, float, str]]] = {}
    for first, *others in group_visits(samples):
        assert first.signature is not None
        kind = get_kind(first.signature)
        families.setdefault(get_family(kind), []).extend((first.ratio(clock), s.ratio(clock), kind) for s in others)
    rows = []
    for family, pairs in sorted((family, pairs) for family, pairs in families.items() if pairs):
        once, again, names = zip(*pairs, strict=True)
        rows.append(compute_error_row("held out", f"measured again: {family}", once, again, names))
    return rows


def _add_host(profile: Profile, steps: Sequence[Sample]) -> Profile:
    """Host seconds per event, and by how much kernels take longer than their medians add up to (the median of a sum of
    times with long tails is more than the sum of their medians), from what small steps take beyond their ops."""
    rows, left = list[FloatArray](), list[float]()
    for step in steps:
        events = np.zeros(len(HOST_EVENTS))  # stores of earlier versions have fewer
        events[: len(step.events)] = step.events
        kernels = profile.reference * step.kernels
        off = float(np.hypot(_HOST_OFF * (events @ _HOST_PRIOR), _KERNELS_OFF * kernels))
        rows.append(np.append(events, kernels) / off)
        left.append(profile.reference * step.ratio(profile.clock) / off)
    prior = np.hstack([np.diag(_HOST_WEIGHT / _HOST_PRIOR), np.zeros((len(_HOST_PRIOR), 1))])
    *per_event, longer = solve_non_negative(
        np.concatenate([np.array(rows).reshape(-1, len(HOST_EVENTS) + 1), prior]),
        np.concatenate([left, np.full(len(_HOST_PRIOR), _HOST_WEIGHT)]),
    )
    host = dict(zip(HOST_EVENTS, (float(f"{value:.4g}") for value in per_event), strict=True))
    return replace(profile, host=host, longer=float(f"{longer:.4g}"))
