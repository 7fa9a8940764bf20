"""Why a traced step is predicted as it is: the error split into the simulation's, the kernels' and the overheads'
share.

The same instructions are simulated with measured times, with predicted kernels, and with predicted kernels and pooled
overheads. Each difference is one share, so the shares add up to the error of the full prediction.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from traincast.costs.host.profile import HostProfile, load_host_profile, load_usual_host
from traincast.hardware.platform import Platform
from traincast.simulator.prediction.document import make_prediction_document
from traincast.simulator.scenario.scenario import list_scenario_fields
from traincast.simulator.schedule import Code
from traincast.traces.link import Linked
from traincast.traces.overheads.extraction import TYPES as OVERHEAD_TYPES
from traincast.traces.overheads.extraction import Overheads
from traincast.traces.replay.host import TYPES, TracedHost, pool_host
from traincast.traces.replay.kernels import KEPT as KEPT_KERNELS
from traincast.traces.replay.kernels import Known, TracedKernels, predict_kernels
from traincast.traces.replay.steps import (
    Replay,
    compute_device_work,
    compute_steady_seconds,
    select_marked_steps,
    simulate_replay,
)
from traincast.traces.replay.timeline import TimelineInstructions
from traincast.traces.signatures import SignatureReader
from traincast.utils.arrays import FloatArray
from traincast.utils.metrics import Z90

_LEAST_ERROR = 1e-4  # errors below 0.01 % count as that: one that happens to be zero must not make the mean zero


def compute_gmae(errors: Sequence[float]) -> float:
    """Geometric mean of the absolute relative errors; those below 0.01 % count as that."""
    return math.exp(sum(math.log(max(abs(error), _LEAST_ERROR)) for error in errors) / len(errors)) if errors else 0.0


@dataclass(frozen=True, kw_only=True)
class StepShares:
    """One step in seconds: `measured`, and `stages` in which more and more of it is predicted, by what was added last.

    The first stage is "simulation" (replayed with measured times), the last one the full prediction.
    """

    number: int
    measured: float
    stages: Mapping[str, float]

    @property
    def replayed(self) -> float:
        """Seconds of the step simulated with measured times."""
        return self.stages["simulation"]

    @property
    def full(self) -> float:
        """Seconds of the step wholly predicted."""
        return list(self.stages.values())[-1]

    @property
    def error(self) -> float:
        """Signed relative error of the full prediction."""
        return self.full / self.measured - 1.0 if self.measured else 0.0

    def compute_shares(self) -> dict[str, float]:
        """What each stage adds to the relative error; together they are the error."""
        moments = [self.measured, *self.stages.values()]
        changes = zip(self.stages, moments[1:], moments, strict=False)
        return {name: (after - before) / self.measured if self.measured else 0.0 for name, after, before in changes}


OWN_HOST = "of this trace"
"""What the host profile of a prediction is called whose host times are the measured ones."""

FALLBACK_PROFILE = "study-2022"  # pooled from the tables of a study, so that no trace is in it
Pair = tuple[float, float]
"""Measured and predicted seconds."""

_OTHER_SERVER = {"server-2022": "server-dlrm-2022"}  # a profile -> one of the same kind of host, from other traces

_HOST_SIGMA = 0.2  # of all host time under a profile of other machines
_REPLAY_SIGMA = 0.00015  # of steps that are simulated with their own times: 92 % of 48 traces, each source left out
_OTHER_RUN = 0.02  # of the same step in another run, which is what a forecast for another device is held to
_SCALES = 0.1, 10.0  # hosts differ by less; a ratio beyond is a trace whose launches are not what they seem


@dataclass(frozen=True, eq=False, kw_only=True)
class Attribution:
    """The prediction of a traced run and where its error comes from.

    `steps` have the stages simulation, kernels, overheads. `circular` says that the host profile was measured in this
    very trace, so that the overheads' share means little.
    `change_by_family` and `change_by_type` are what replacing only that kernel family, or only that type of overhead
    after all kernels, changes in the mean step, in seconds; since steps wait, these need not add up to the whole.
    `steady` is the mean predicted step in seconds when it goes on for ever (see `steady.py`), never shorter than the
    work that a step gives to a stream. `predicted` are the instructions with predicted kernels, `complete` those with
    pooled overheads too. `traced` is the device of the trace ("" where it does not say), `interval` the 90 % interval
    of the mean predicted step in seconds.
    """

    platform: str
    device: str
    traced: str
    interval: tuple[float, float]
    host_profile: str
    host_scale: float
    circular: bool
    kernels: TracedKernels
    host: TracedHost
    steps: tuple[StepShares, ...]
    predicted: TimelineInstructions
    complete: TimelineInstructions
    full: Replay
    steady: float
    change_by_family: dict[str, float]
    change_by_type: dict[str, float]

    @property
    def is_forecast(self) -> bool:
        """Whether the trace is of another device, so that there is no error to speak of."""
        return bool(self.traced) and self.traced != self.device

    @property
    def difference(self) -> str:
        """What predicted less measured is called: a change from one device to another is no error."""
        return "change" if self.is_forecast else "error"

    @property
    def mean_step(self) -> float:
        """The mean predicted step, in seconds."""
        return sum(step.full for step in self.steps) / len(self.steps)

    @property
    def gmae(self) -> float:
        """Geometric mean of the absolute relative errors of the steps."""
        return compute_gmae([step.error for step in self.steps])

    def sum_by_family(self) -> dict[str, Pair]:
        """(measured, predicted) kernel seconds per step by family of the measured kernel, largest first."""
        return self._sum_kernels(self.kernels.family)

    def sum_by_op(self) -> dict[str, Pair]:
        """(measured, predicted) kernel seconds per step by the op that was lowered, largest first."""
        return self._sum_kernels([op or "(no op)" for op in self.kernels.op])

    def sum_by_type(self) -> dict[str, Pair]:
        """(measured, pooled) host seconds per step by overhead type."""
        sums: dict[str, Pair] = dict.fromkeys(TYPES, (0.0, 0.0))
        for (kind, _), pair in self.sum_host_by_op().items():
            sums[kind] = (sums[kind][0] + pair[0], sums[kind][1] + pair[1])
        return sums

    def sum_host_by_op(self) -> dict[tuple[str, str], Pair]:
        """(measured, pooled) host seconds per step by overhead type and op, the largest differences first."""
        n = len(self.steps)
        return {key: (measured / n, pooled / n) for key, (measured, pooled) in self.host.sum_by_op().items()}

    def _sum_kernels(self, names: Sequence[str]) -> dict[str, Pair]:
        sums: dict[str, Pair] = {}
        n = len(self.steps)
        for name, m, p in zip(names, self.kernels.measured.tolist(), self.kernels.predicted.tolist(), strict=True):
            measured, predicted = sums.get(name, (0.0, 0.0))
            sums[name] = (measured + m / n, predicted + p / n)
        return dict(sorted(sums.items(), key=lambda item: -item[1][0]))

    def to_dict(self) -> dict[str, Any]:
        """Everything, in milliseconds per step; shares are relative to the measured step."""
        n = len(self.steps)
        return {
            "platform": self.platform,
            "host_profile": self.host_profile,
            "host_scale": self.host_scale,
            "host_profile_measured_here": self.circular,
            "framework_version": self.kernels.framework_version,
            "gmae": None if self.is_forecast else self.gmae,
            "forecast": self.is_forecast,
            "step_ms": 1e3 * self.mean_step,
            "interval_ms": [1e3 * seconds for seconds in self.interval],
            "modelled": self.kernels.modelled,
            "steady_step_ms": 1e3 * self.steady,
            "steps": [
                {
                    "number": step.number,
                    "measured_ms": 1e3 * step.measured,
                    "replayed_ms": 1e3 * step.replayed,
                    "with_predicted_kernels_ms": 1e3 * step.stages["kernels"],
                    "predicted_ms": 1e3 * step.full,
                    "error": step.error,
                    "shares": step.compute_shares(),
                }
                for step in self.steps
            ],
            "kernels_by_family": _convert_to_ms(self.sum_by_family()),
            "kernels_by_op": _convert_to_ms(self.sum_by_op()),
            "step_change_by_family_ms": {name: 1e3 * s for name, s in self.change_by_family.items()},
            "overheads_by_type": _convert_to_ms(self.sum_by_type()),
            "step_change_by_overhead_ms": {name: 1e3 * s for name, s in self.change_by_type.items()},
            "overheads_by_op": [
                {"type": kind, "op": op, "measured_ms": 1e3 * m / n, "predicted_ms": 1e3 * p / n}
                for (kind, op), (m, p) in self.host.sum_by_op().items()
            ],
            "kernels_by_source": {known.name.lower(): self._describe_source(known) for known in Known},
        }

    def make_document(self, name: str, notes: Sequence[str]) -> dict[str, Any]:
        """The mean predicted step as the document that every prediction has; `name` is that of the traced run."""
        known = {"workload": name, "on": self.platform, "host": self.host_profile, "gpus": 1}
        n = len(self.steps)
        return make_prediction_document(
            {
                "scenario": {field: known.get(field) for field in list_scenario_fields()},
                "workload": name,
                "platform": self.platform,
                "device": self.device,
                "gpus": 1,
                "iteration_ms": 1e3 * self.mean_step,
                "interval_ms": [1e3 * seconds for seconds in self.interval],
                "host_ms": 1e3 * sum(pooled for _, pooled in self.sum_by_type().values()),
                "per_family": {name: 1e3 * p for name, (_, p) in self.sum_by_family().items()},
                "by_op": {name: 1e3 * p for name, (_, p) in self.sum_by_op().items()},
                "kernels": round(len(self.kernels.op) / n),
                "estimated_ops": [],
                "estimated_ms": 0.0,
                "host_profile": self.host_profile,
                "warnings": list(notes),
                "assumptions": [],
                "given_costs": {},
            },
            reason="a trace does not tell it",
        )

    def _describe_source(self, known: Known) -> dict[str, Any]:
        chosen = self.kernels.known == known
        milliseconds = 1e3 * float(self.kernels.measured[chosen].sum()) / len(self.steps)
        return {"count": int(chosen.sum()), "measured_ms": milliseconds, "kept": known in KEPT_KERNELS}


def _convert_to_ms(pairs: dict[str, Pair]) -> dict[str, dict[str, float]]:
    return {name: {"measured_ms": 1e3 * m, "predicted_ms": 1e3 * p} for name, (m, p) in pairs.items()}


def is_measured_here(profile: HostProfile, linked: Linked) -> bool:
    """Whether a host profile was built from this very trace, as its provenance says."""
    path = linked.trace.path
    return f"{path.parent.name}/{path.name}" in str(profile.provenance)


def choose_profile(platform: Platform, linked: Linked, name: str | None = None) -> HostProfile:
    """The host profile asked for, or the platform's own unless it was measured in this very trace."""
    if name is not None:
        return load_host_profile(name)
    profile = load_usual_host(platform.device)
    if not is_measured_here(profile, linked):
        return profile
    return load_host_profile(_OTHER_SERVER.get(profile.name, FALLBACK_PROFILE))


def compute_host_scale(overheads: Overheads, profile: HostProfile) -> float:
    """How many times as long as the profile's host this one takes, told from its launch calls alone."""
    launches = overheads.table.get(("T4", "launch"))
    if launches is None or profile.t4["launch"] <= 0:
        return 1.0
    return min(max(launches.compute_robust_moments()[0] / profile.t4["launch"], _SCALES[0]), _SCALES[1])


def attribute_error(
    linked: Linked,
    instructions: TimelineInstructions,
    reader: SignatureReader,
    platform: Platform,
    profile: HostProfile,
    scale: float = 1.0,
    *,
    own_host: bool = False,
    explain: bool = True,
) -> Attribution:
    """Predicts a traced run on a platform and splits the error of every step; `scale` makes the profile slower. With
    `own_host` the host's times are those of the trace, and `profile` is not used. Unless `explain`, what each family
    and each type of overhead changes is left out."""
    kernels = predict_kernels(linked, reader, platform.device, own_host=own_host)
    host = pool_host(linked, instructions, profile.scaled(scale))
    host = host.as_measured() if own_host else host
    predicted = replace(instructions, kernel_seconds=_replace_kernel_seconds(linked, instructions, kernels, None))
    complete = replace(predicted, host_seconds=host.replace_measured(instructions.host_seconds, *OVERHEAD_TYPES))
    variants = (instructions, predicted, complete)
    simulations = [simulate_replay(linked, variant) for variant in variants]
    floors = [compute_device_work(linked, variant) for variant in variants]
    families = _list_family_variants(linked, instructions, kernels) if explain else ()
    types = (
        (kind, replace(predicted, host_seconds=host.replace_measured(instructions.host_seconds, kind)))
        for kind in (OVERHEAD_TYPES if explain else ())
    )
    shares = _make_shares(simulations, floors)
    replayed = _OTHER_RUN if kernels.carried else _REPLAY_SIGMA
    spread = kernels.compute_spread(), 0.0 if own_host else _HOST_SIGMA, replayed
    return Attribution(
        platform=platform.key,
        device=platform.device.name,
        traced=linked.trace.device_name,
        interval=_find_interval(linked, complete, sum(step.full for step in shares) / len(shares), *spread),
        host_profile=OWN_HOST if own_host else profile.name,
        host_scale=scale,
        circular=not own_host and is_measured_here(profile, linked),
        kernels=kernels,
        host=host,
        steps=shares,
        predicted=predicted,
        complete=complete,
        full=simulations[-1],
        steady=_compute_steady_seconds(linked, complete, floors[-1]),
        change_by_family=_compute_changes(linked, simulations[0], families),
        change_by_type=_compute_changes(linked, simulations[1], types),
    )


def _list_family_variants(
    linked: Linked, instructions: TimelineInstructions, kernels: TracedKernels
) -> Iterable[tuple[str, TimelineInstructions]]:
    """The measured instructions with the predicted kernels of one family, for each of them."""
    return (
        (family, replace(instructions, kernel_seconds=_replace_kernel_seconds(linked, instructions, kernels, family)))
        for family in sorted(set(kernels.family))
    )


def _find_interval(
    linked: Linked, complete: TimelineInstructions, step: float, kernels: float, host: float, replayed: float
) -> tuple[float, float]:
    """The 90 % interval of a mean step: what it is with all kernels, or all of the host, longer and shorter by theirs.
    `kernels`, `host` and `replayed` (the simulation's) are log-sigmas."""
    variants = {
        name: [
            replace(complete, **{column: getattr(complete, column) * float(np.exp(sign * Z90 * sigma))})
            for sign in (-1.0, 1.0)
        ]
        for name, column, sigma in (("kernels", "kernel_seconds", kernels), ("host", "host_seconds", host))
        if sigma
    }
    base = _compute_mean_step(linked, complete)
    logs = {
        name: [abs(float(np.log(_compute_mean_step(linked, variant) / base))) for variant in pair]
        for name, pair in variants.items()
    }
    low, high = (
        float(np.hypot(replayed * Z90, np.hypot.reduce([pair[side] for pair in logs.values()] or [0.0])))
        for side in (0, 1)
    )
    return step * float(np.exp(-low)), step * float(np.exp(high))


def _compute_mean_step(linked: Linked, variant: TimelineInstructions) -> float:
    """The mean simulated step, never shorter than the work that it gives to a stream; seconds."""
    lengths = np.maximum(simulate_replay(linked, variant).simulated, compute_device_work(linked, variant))
    return max(float(np.mean(lengths)), 1e-12)


def _compute_steady_seconds(linked: Linked, complete: TimelineInstructions, floors: FloatArray) -> float:
    """Seconds of a step that goes on for ever."""
    seconds = float(compute_steady_seconds(linked, [select_marked_steps(linked, complete)])[0])
    return max(seconds / (len(linked.steps) if linked.marked else 1), float(np.mean(floors)))


def _make_shares(simulations: Sequence[Replay], floors: Sequence[FloatArray]) -> tuple[StepShares, ...]:
    """The stages of every step, from simulations as measured, with predicted kernels, and with another host.

    A host that runs ahead of its device does so until the queue is full: a predicted step is never shorter than the
    work that it gives to a stream, except by as much as the measured one is.
    """
    replayed, *others = (replay.simulated for replay in simulations)
    ahead = np.minimum(replayed / np.maximum(floors[0], 1e-12), 1.0)
    stages = [replayed, *(np.maximum(s, ahead * floor) for s, floor in zip(others, floors[1:], strict=True))]
    return tuple(
        StepShares(
            number=step.number,
            measured=step.measured,
            stages=dict(zip(("simulation", "kernels", "overheads"), lengths, strict=True)),
        )
        for step, *lengths in zip(simulations[0].steps, *(stage.tolist() for stage in stages), strict=True)
    )


def _replace_kernel_seconds(
    linked: Linked, instructions: TimelineInstructions, kernels: TracedKernels, family: str | None
) -> FloatArray:
    """Kernel seconds with predicted durations, of one family or of all.

    A copy that holds its host is two instructions: both are scaled. What a kernel waited for a crowded device is
    part of its length and stays.
    """
    chosen = np.array([family is None or f == family for f in kernels.family], dtype=np.bool_)
    rows, measured = kernels.row[chosen], kernels.measured[chosen]
    change = np.zeros(len(linked.events))
    change[rows] = kernels.predicted[chosen] - measured
    length = np.zeros(len(linked.events))
    length[rows] = measured
    seconds = instructions.kernel_seconds.copy()
    launches = np.flatnonzero((instructions.schedule.code == Code.LAUNCH) & (instructions.point >= 0))
    events = instructions.row[launches]
    blocks = np.bincount(events, minlength=len(linked.events))[events]
    share = np.ones(len(launches))
    split = (blocks > 1) & (length[events] > 0)
    share[split] = np.minimum(seconds[launches[split]] / length[events[split]], 1.0)
    seconds[launches] = np.maximum(seconds[launches] + share * change[events], 0.0)
    return seconds


def _compute_changes(
    linked: Linked, base: Replay, variants: Iterable[tuple[str, TimelineInstructions]]
) -> dict[str, float]:
    """Mean change of a step, in seconds, for each variant; the largest first."""
    before = np.mean(base.simulated)
    after = ((name, simulate_replay(linked, variant).simulated) for name, variant in variants)
    changes = {name: float(np.mean(lengths) - before) for name, lengths in after}
    return dict(sorted(changes.items(), key=lambda item: -abs(item[1])))
