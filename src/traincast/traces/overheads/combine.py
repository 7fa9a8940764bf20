"""One host profile completed by another: ops seen on one host only, scaled to the other's speed."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

_DEFAULTS = ("*", "*Backward")


def filled_from(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
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
