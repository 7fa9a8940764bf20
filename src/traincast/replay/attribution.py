"""Why a traced step is predicted as it is: the error split into the walk's, the kernels' and the overheads' share.

The same instructions are walked with measured times, with predicted kernels, and with predicted kernels and pooled
overheads. Each difference is one share, so the shares add up to the error of the full prediction.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from traincast.arrays import FloatArray
from traincast.host.overheads import Overheads
from traincast.host.profile import HostProfile, load_host_profile
from traincast.platform.platform import Platform
from traincast.replay.host import KEPT, TYPES, TracedHost, pooled_host
from traincast.replay.kernels import TracedKernels, predict_kernels
from traincast.replay.timeline import Replay, TimelineInstructions, rewalk
from traincast.traces.link import Linked
from traincast.traces.signatures import SignatureReader
from traincast.walk.schedule import Code

FALLBACK_PROFILE = "study-2022"
_OTHER_SERVER = {"server-2022": "server-dlrm-2022"}  # a profile -> one of the same kind of host, from other traces


@dataclass(frozen=True, slots=True)
class StepShares:
    """One step, all in seconds. `full - measured = walk + kernels + overheads`.

    `unscaled` is the full prediction with the host profile as it is, not scaled to this host.
    """

    number: int
    measured: float
    replayed: float
    with_kernels: float
    full: float
    unscaled: float

    @property
    def error(self) -> float:
        """Signed relative error of the full prediction."""
        return self.full / self.measured - 1.0 if self.measured else 0.0

    def share(self, name: str) -> float:
        """What "walk", "kernels" or "overheads" adds to the relative error."""
        before, after = {
            "walk": (self.measured, self.replayed),
            "kernels": (self.replayed, self.with_kernels),
            "overheads": (self.with_kernels, self.full),
        }[name]
        return (after - before) / self.measured if self.measured else 0.0


@dataclass(frozen=True, eq=False, kw_only=True)
class Attribution:
    """The prediction of a traced run and where its error comes from.

    `circular` says that the host profile was measured in this very trace, so that the overheads' share means little.
    `by_family` and `by_type` are what replacing only that kernel family, or only that type of overhead after all
    kernels, changes in the mean step, in seconds; since steps wait, these need not add up to the whole.
    `predicted` are the instructions with predicted kernels, `complete` those with pooled overheads too.
    """

    platform: str
    host_profile: str
    host_scale: float
    circular: bool
    kernels: TracedKernels
    host: TracedHost
    steps: tuple[StepShares, ...]
    predicted: TimelineInstructions
    complete: TimelineInstructions
    full: Replay
    by_family: dict[str, float]
    by_type: dict[str, float]


def measured_here(profile: HostProfile, linked: Linked) -> bool:
    """Whether a host profile was built from this very trace, as its provenance says."""
    path = linked.trace.path
    return f"{path.parent.name}/{path.name}" in str(profile.provenance)


def choose_profile(platform: Platform, linked: Linked, name: str | None = None) -> HostProfile:
    """The host profile asked for, or the platform's own unless it was measured in this very trace."""
    if name is not None:
        return load_host_profile(name)
    profile = load_host_profile(platform.device.host)
    if not measured_here(profile, linked):
        return profile
    return load_host_profile(_OTHER_SERVER.get(profile.name, FALLBACK_PROFILE))


def host_scale(overheads: Overheads, profile: HostProfile) -> float:
    """How many times as long as the profile's host this one takes, told from its launch calls alone."""
    launches = overheads.table.get(("T4", "launch"))
    if launches is None or profile.t4["launch"] <= 0:
        return 1.0
    return min(max(launches.robust()[0] / profile.t4["launch"], 0.1), 10.0)


def attribute(
    linked: Linked,
    instructions: TimelineInstructions,
    reader: SignatureReader,
    platform: Platform,
    profile: HostProfile,
    scale: float = 1.0,
) -> Attribution:
    """Predicts a traced run on a platform and splits the error of every step; `scale` makes the host slower."""
    kernels = predict_kernels(linked, reader, platform.device)
    host = pooled_host(linked, instructions, profile.scaled(scale))
    types = tuple(kind for kind in TYPES if kind != KEPT)
    predicted = replace(instructions, kernel_seconds=_replaced(linked, instructions, kernels, None))
    unscaled, complete = (
        replace(predicted, host_seconds=pooled.replaced(instructions.host_seconds, *types))
        for pooled in (pooled_host(linked, instructions, profile), host)
    )
    walks = [rewalk(linked, variant) for variant in (instructions, predicted, unscaled, complete)]
    families = sorted(set(kernels.family))
    return Attribution(
        platform=platform.key,
        host_profile=profile.name,
        host_scale=scale,
        circular=measured_here(profile, linked),
        kernels=kernels,
        host=host,
        steps=tuple(
            StepShares(a.number, a.measured, a.walked, b.walked, d.walked, c.walked)
            for a, b, c, d in zip(*(walked.steps for walked in walks), strict=True)
        ),
        predicted=predicted,
        complete=complete,
        full=walks[-1],
        by_family=_changes(
            linked,
            walks[0],
            {f: replace(instructions, kernel_seconds=_replaced(linked, instructions, kernels, f)) for f in families},
        ),
        by_type=_changes(
            linked,
            walks[1],
            {t: replace(predicted, host_seconds=host.replaced(instructions.host_seconds, t)) for t in types},
        ),
    )


def _replaced(
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
    pieces = np.bincount(events, minlength=len(linked.events))[events]
    share = np.ones(len(launches))
    split = (pieces > 1) & (length[events] > 0)
    share[split] = np.minimum(seconds[launches[split]] / length[events[split]], 1.0)
    seconds[launches] = np.maximum(seconds[launches] + share * change[events], 0.0)
    return seconds


def _changes(linked: Linked, base: Replay, variants: dict[str, TimelineInstructions]) -> dict[str, float]:
    """Mean change of a step, in seconds, for each variant; the largest first."""
    before = np.mean([step.walked for step in base.steps])
    changes = {
        name: float(np.mean([step.walked for step in rewalk(linked, variant).steps]) - before)
        for name, variant in variants.items()
    }
    return dict(sorted(changes.items(), key=lambda item: -abs(item[1])))
