"""Plans in files: JSON or YAML, one plan or several by name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from traincast.models.placement.kinds import ComputeKernel, ShardingKind
from traincast.models.placement.plan import Placement, Plan
from traincast.utils.errors import TraincastError, shorten_value
from traincast.utils.files.reading import read_document

MAX_PLANS = 10_000
"""Each is simulated in full: a longer file is most likely a mistake."""
_PLAN_FIELDS = ("world_size", "tables")
_PLACEMENT_FIELDS = ("kind", "ranks", "kernel", "cache_fraction")


def convert_plan_to_json(plan: Plan) -> dict[str, Any]:
    """A plan as plain data: `world_size`, and `tables` by name with kind, ranks, kernel (and cache_fraction)."""
    return {
        "world_size": plan.world_size,
        "tables": dict(zip(plan.tables, map(_format_placement, plan.placements), strict=True)),
    }


def _format_placement(placement: Placement) -> dict[str, Any]:
    entry = {"kind": placement.kind.value, "ranks": list(placement.ranks), "kernel": placement.kernel.value}
    return entry | ({"cache_fraction": placement.cache_fraction} if placement.cache_fraction else {})


def read_plan_from_json(content: Any, label: str = "the plan") -> Plan:
    """A plan from plain data; every complaint begins with `label`."""
    if not isinstance(content, Mapping) or set(content) != set(_PLAN_FIELDS):
        raise TraincastError(f"{label}: give 'world_size' and 'tables', and nothing else")
    size, tables = content["world_size"], content["tables"]
    if not (_is_integer(size) and size >= 1):
        raise TraincastError(f"{label}: world_size {shorten_value(size)}; give an integer number of ranks, 1 or more")
    if not isinstance(tables, Mapping) or not tables:
        raise TraincastError(f"{label}: 'tables' must map the name of each table to its placement")
    placements = tuple(_read_placement(entry, f"{label}, table '{name}'") for name, entry in tables.items())
    return Plan(tuple(str(name) for name in tables), placements, size)


def _read_placement(entry: Any, label: str) -> Placement:
    if not isinstance(entry, Mapping) or not {"kind", "ranks"} <= set(entry) <= set(_PLACEMENT_FIELDS):
        raise TraincastError(f"{label}: give kind and ranks, and optionally kernel and cache_fraction")
    ranks, share = entry["ranks"], entry.get("cache_fraction", 0.0)
    if not isinstance(ranks, list) or not all(_is_integer(rank) for rank in ranks):
        raise TraincastError(f"{label}: ranks {shorten_value(ranks)}; give a list of integers")
    if isinstance(share, bool) or not isinstance(share, int | float):
        raise TraincastError(f"{label}: cache_fraction {shorten_value(share)}; give a number")
    try:
        kind = ShardingKind(str(entry["kind"]))
        kernel = ComputeKernel(str(entry.get("kernel", "dense" if kind.copied else "fused")))
    except TraincastError as error:
        raise TraincastError(f"{label}: {error}") from None
    return Placement(kind, tuple(ranks), kernel, float(share))


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def load_plans(path: Path) -> dict[str, Plan]:
    """The plans of a file by name: one plan, or `plans:` with a mapping of names to plans."""
    content = read_document(path)
    if not isinstance(content, Mapping) or set(content) != {"plans"}:
        return {path.stem: read_plan_from_json(content, str(path))}
    plans = content["plans"]
    if not isinstance(plans, Mapping) or not plans or len(plans) > MAX_PLANS:
        raise TraincastError(f"{path}: 'plans' must map names to plans, 1 to {MAX_PLANS} of them")
    return {str(name): read_plan_from_json(entry, f"{path}: plan '{name}'") for name, entry in plans.items()}
