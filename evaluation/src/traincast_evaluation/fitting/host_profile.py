"""A host profile from measured overheads, and one completed by another: ops seen on one host only, scaled to the
other's speed."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from traincast.costs.host.profile import ISSUERS, PYTHON, get_current_name
from traincast.traces.overheads.extraction import LONGEST_GAP, TYPES, Distribution, Overheads
from traincast.utils.errors import TraincastError

_MIN_SAMPLES = 3  # fewer do not make a mean that outliers could be told from
_DEFAULTS = ("*", "*Backward")  # stand for ops nobody measured
_RUNTIME = ("launch", "memcpy", "memset")


def pool_overheads(overheads: Sequence[Overheads]) -> Overheads:
    """All samples of several traces together."""
    table: dict[tuple[str, str], Distribution] = {}
    for key, distribution in (entry for one in overheads for entry in one.table.items()):
        table[key] = table[key].merge_with(distribution) if key in table else distribution
    return Overheads(table)


def build_host_profile(workloads: Sequence[Overheads], provenance: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON form of a host profile (microseconds; see `HostProfile`) from the overheads of one or more workloads.

    T1 is the plain mean of the gaps under 100 us: longer ones are work of the user's own. Ops seen fewer than three
    times only count towards the medians that stand for unknown ops. `spread` is the relative deviation of an op's host
    time around its mean, averaged with the time spent in each op.
    """
    overheads = pool_overheads(workloads)
    launch = overheads.table.get(("T4", "launch"))
    gaps = overheads.select_type("T1")
    if launch is None or PYTHON not in gaps:
        raise TraincastError("a host profile needs a trace with ops that launch kernels")
    t4 = {name: _compute_mean_us(overheads.table.get(("T4", name), launch)) for name in _RUNTIME}
    waits = overheads.table.get(("T4", "synchronize"), launch)
    t4["synchronize"] = _convert_to_us(waits.compute_quantile(0.05))  # a call that found nothing to wait for
    return {
        "t1_us": {
            name: _round_us(1e6 * gaps.get(name, gaps[PYTHON]).compute_mean_below(LONGEST_GAP)) for name in ISSUERS
        },
        "t2_us": _tabulate_means(overheads.select_type("T2")),
        "t3_us": _tabulate_means(overheads.select_type("T3")),
        "t4_us": t4,
        "t5_us": _tabulate_means(overheads.select_type("T5")),
        "alone_us": _tabulate_means(overheads.select_type("alone")),
        "spread": round(_compute_profile_spread(overheads), 3),
        "provenance": dict(provenance),
        "distributions_us": {
            kind: {op: d.summarise_us() for op, d in overheads.select_type(kind).items() if d.count >= _MIN_SAMPLES}
            for kind in TYPES
        },
    }


def fill_host_profile(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON form of profile `first` with the ops that only `second` knows, scaled to the first host.

    The scale is the median ratio of T2 over the ops both know, so a slower host contributes which ops are
    expensive and not how slow it is. It is recorded in the provenance.
    """
    both = [op for op in first["t2_us"] if op in second["t2_us"] and op not in _DEFAULTS and second["t2_us"][op] > 0]
    scale = statistics.median(first["t2_us"][op] / second["t2_us"][op] for op in both)
    tables = {
        key: {**{op: round(scale * us, 3) for op, us in second[key].items() if op not in _DEFAULTS}, **first[key]}
        for key in ("t2_us", "t3_us", "t5_us", "alone_us")
    }
    provenance = {
        **first["provenance"],
        "filled_from": second["provenance"],
        "filled_scale": round(scale, 4),
        "ops_in_both": len(both),
    }
    kept = {key: first[key] for key in ("t1_us", "t4_us", "spread")}
    return {**kept, **tables, "provenance": provenance}


def _tabulate_means(distributions: Mapping[str, Distribution]) -> dict[str, float]:
    """Means by op, and medians over ops for those nobody measured: "*", and "*Backward" for autograd nodes."""
    means = {op: _compute_mean_us(d) for op, d in distributions.items()}
    table = {get_current_name(op): means[op] for op, d in sorted(distributions.items()) if d.count >= _MIN_SAMPLES}
    nodes = [us for op, us in means.items() if "Backward" in op]
    ops = [us for op, us in means.items() if op.startswith("aten::")] or list(means.values()) or [0.0]
    return {"*": _round_us(statistics.median(ops)), "*Backward": _round_us(statistics.median(nodes or ops)), **table}


def _compute_profile_spread(overheads: Overheads) -> float:
    weighted = total = 0.0
    for kind in ("T2", "T3", "T5", "alone"):
        for distribution in overheads.select_type(kind).values():
            mean, deviation = distribution.compute_robust_moments()
            if distribution.count >= _MIN_SAMPLES and mean > 0:
                weighted += distribution.total * deviation / mean
                total += distribution.total
    return weighted / total if total else 0.0


def _compute_mean_us(distribution: Distribution) -> float:
    return _convert_to_us(distribution.compute_robust_moments()[0])


def _convert_to_us(seconds: float) -> float:
    return _round_us(1e6 * seconds)


def _round_us(us: float) -> float:
    return round(us, 3)
