"""TorchRec sharding plans as JSON of their fields, to and from `Plan`. Needs no TorchRec.

The layout is that of TorchRec's own `ShardingPlan._serialize()`: `{"plan": {module: {table: {"sharding_type",
"compute_kernel", "ranks", "shards": [{"shard_offsets", "shard_sizes", "placement"}]}}}}`, and `"cache_params":
{"load_factor"}` where a table is cached. A `"sharding_spec": {"shards": ...}` is read too.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from traincast.models.embeddings.table import MAX_DIM, MAX_ROWS, Table
from traincast.models.placement.plan import (
    ComputeKernel,
    Placement,
    Plan,
    Shard,
    ShardingKind,
    check_placement,
    check_plan,
)
from traincast.planner.torchrec.tables import (
    check_choice,
    check_integer,
    check_mapping,
    check_number,
    check_sequence,
    check_text,
    shorten_name,
)
from traincast.utils.errors import TraincastError
from traincast.utils.files.reading import read_document

MAX_RANKS = 1 << 16
"""More than any job has: a longer list of shards is a mistake."""
DEFAULT_CACHE_FRACTION = 0.2
"""Share of the rows that FBGEMM caches on the device when a plan does not say."""
KIND_OF = {
    "data_parallel": ShardingKind.DATA_PARALLEL,
    "table_wise": ShardingKind.TABLE_WISE,
    "row_wise": ShardingKind.ROW_WISE,
    "column_wise": ShardingKind.COLUMN_WISE,
    "table_row_wise": ShardingKind.TABLE_ROW_WISE,
    "table_column_wise": ShardingKind.COLUMN_WISE,
}
"""Our kind of sharding for TorchRec's. Table-column-wise is column-wise with all slices in one node."""
_PLACEMENT = re.compile(r"rank:(\d{1,9})/[a-z]{1,16}(:\d{1,9})?")
_HARMLESS = ("stochastic_rounding", "bounds_check_mode")  # they move no byte to another place
_UNREAD = ("enforce_hbm", "output_dtype", "key_value_params")
_PARAMETER = (
    "sharding_type", "compute_kernel", "ranks", "shards", "sharding_spec", "cache_params", *_HARMLESS, *_UNREAD,
)  # fmt: skip


def load_plan(path: Path, tables: Sequence[Table], *, world_size: int, gpus_per_node: int) -> Plan:
    """The plan in a JSON file; it must be for these tables and this many ranks."""
    try:
        return plan_from_json(read_document(path), tables, world_size=world_size, gpus_per_node=gpus_per_node)
    except TraincastError as error:
        raise TraincastError(str(error) if str(path) in str(error) else f"{path}: {error}") from error


def plan_from_json(content: Any, tables: Sequence[Table], *, world_size: int, gpus_per_node: int) -> Plan:
    """The plan that parsed JSON describes, its placements in the order of `tables`."""
    check_integer(world_size, "world_size", 1, MAX_RANKS)
    by_name = {table.name: table for table in tables}
    placements: dict[str, Placement] = {}
    for module, parameters in _read_modules(content).items():
        for name, parameter in check_mapping(parameters, f"module '{shorten_name(module)}'").items():
            where = f"table '{shorten_name(name)}'"
            if name in placements:
                raise TraincastError(f"{where} is in two modules of the plan; give each table its own name")
            if name not in by_name:
                raise TraincastError(f"the plan places {where}, which is not one of these; it is for other tables")
            placements[name] = _read_placement(parameter, where, by_name[name], world_size, gpus_per_node)
    plan = Plan(tuple(placements), tuple(placements.values()), world_size)
    return check_plan(plan, tables, world_size, gpus_per_node)


def plan_to_json(
    plan: Plan, tables: Sequence[Table], *, gpus_per_node: int, modules: Mapping[str, str], device: str = "cuda"
) -> dict[str, Any]:
    """The plan as TorchRec writes it. `modules` says the path of the module that owns each table (by name)."""
    plan = check_plan(plan, tables, plan.world_size, gpus_per_node)
    shards: list[list[Shard]] = [[] for _ in tables]
    for shard in plan.make_shards(tables):
        shards[shard.table].append(shard)
    written: dict[str, dict[str, Any]] = {}
    for table, placement, cut in zip(tables, plan.placements, shards, strict=True):
        if table.name not in modules:
            raise TraincastError(f"table '{table.name}' has no module; name the module that owns it")
        parameter = _write_parameter(table, placement, cut, gpus_per_node, device)
        written.setdefault(modules[table.name], {})[table.name] = parameter
    return {"plan": written}


def _read_modules(content: Any) -> Mapping[str, Any]:
    outer = check_mapping(content, "the plan")
    if set(outer) == {"plan"}:
        outer = check_mapping(outer["plan"], "'plan'")
    if not outer:
        raise TraincastError("the plan has no modules; give a sharding for each table")
    return outer


def _read_placement(entry: Any, where: str, table: Table, world_size: int, gpus_per_node: int) -> Placement:
    fields = check_mapping(entry, where, _PARAMETER)
    for name in ("sharding_type", "compute_kernel"):
        if name not in fields:
            raise TraincastError(f"{where}: no {name}; give one")
    for name in _UNREAD:
        if fields.get(name) is not None:
            raise TraincastError(f"{where}: {name} {reprlib.repr(fields[name])} cannot be represented; leave it null")
    kind = KIND_OF[check_choice(fields["sharding_type"], f"sharding_type of {where}", KIND_OF)]
    kernel = ComputeKernel(check_choice(fields["compute_kernel"], f"compute_kernel of {where}", list(ComputeKernel)))
    listed = _read_shards(fields, where)
    placement = Placement(
        kind, _read_ranks(fields, where, kind, listed, world_size), kernel, _read_cache(fields, where, kernel)
    )
    check_placement(table, placement, world_size, gpus_per_node)
    if listed is not None:
        _check_cut(table, placement, listed, where, world_size)
    elif not kind.copied:
        raise TraincastError(f"{where}: {kind} without shards; list their sizes, offsets and placements")
    return placement


def _read_cache(fields: Mapping[str, Any], where: str, kernel: ComputeKernel) -> float:
    load = None
    if fields.get("cache_params") is not None:
        params = check_mapping(fields["cache_params"], f"{where}: cache_params")
        load = params.get("load_factor")
        for name in ("reserved_memory", "precision"):
            if params.get(name) not in (None, 0, 0.0):
                raise TraincastError(f"{where}: cache_params {name} cannot be represented; leave it null")
    if not kernel.cached:
        return 0.0
    return DEFAULT_CACHE_FRACTION if load is None else check_number(load, f"{where}: load_factor")


def _read_ranks(
    fields: Mapping[str, Any], where: str, kind: ShardingKind, listed: Sequence[Shard] | None, world_size: int
) -> tuple[int, ...]:
    """Ranks by position; TorchRec leaves them out where all are meant."""
    if fields.get("ranks") is None:
        if kind.everywhere:
            return tuple(range(world_size))
        if listed is None:
            raise TraincastError(f"{where}: no ranks; give one for each shard")
        return tuple(shard.rank for shard in listed)
    values = check_sequence(fields["ranks"], f"{where}: ranks", MAX_RANKS)
    return tuple(check_integer(value, f"{where}: ranks", 0, world_size - 1) for value in values)


def _read_shards(fields: Mapping[str, Any], where: str) -> tuple[Shard, ...] | None:
    shards, spec = fields.get("shards"), fields.get("sharding_spec")
    if spec is not None:
        if shards is not None:
            raise TraincastError(f"{where}: both shards and sharding_spec; give one of them")
        shards = check_mapping(spec, f"{where}: sharding_spec", ("shards",)).get("shards")
    if shards is None:
        return None
    return tuple(
        _read_shard(shard, f"{where}: shard") for shard in check_sequence(shards, f"{where}: shards", MAX_RANKS)
    )


def _read_shard(entry: Any, where: str) -> Shard:
    fields = check_mapping(entry, where, ("shard_sizes", "shard_offsets", "placement"))
    (top, rows), (left, columns) = (
        (
            check_integer(_read_pair(fields, "shard_offsets", where)[axis], f"{where} offset", 0, most),
            check_integer(_read_pair(fields, "shard_sizes", where)[axis], f"{where} size", 0, most),
        )
        for axis, most in ((0, MAX_ROWS), (1, MAX_DIM))
    )
    place = check_text(fields.get("placement"), f"{where} placement")
    match = _PLACEMENT.fullmatch(place)
    if match is None:
        raise TraincastError(f"{where} placement is {reprlib.repr(place)}; give it as 'rank:0/cuda:0'")
    return Shard(0, int(match[1]), (top, top + rows), (left, left + columns))


def _read_pair(fields: Mapping[str, Any], name: str, where: str) -> Sequence[Any]:
    pair = check_sequence(fields.get(name), f"{where} {name}", 2)
    if len(pair) != 2:
        raise TraincastError(f"{where} {name} has {len(pair)} numbers; give rows and columns")
    return pair


def _check_cut(table: Table, placement: Placement, listed: Sequence[Shard], where: str, world_size: int) -> None:
    """Rejects shards that are cut otherwise than this kind of sharding cuts them."""
    if placement.kind.copied:
        raise TraincastError(f"{where}: data_parallel with shards; a table that is copied has none")
    wanted = Plan((table.name,), (placement,), world_size).make_shards([table])
    if len(wanted) != len(listed):
        raise TraincastError(f"{where}: {len(listed)} shards for {len(wanted)} ranks; give one for each")
    for position, (have, want) in enumerate(zip(listed, wanted, strict=True)):
        if have != want:
            raise TraincastError(
                f"{where}: shard {position} has rows {have.rows} and columns {have.columns} on rank {have.rank}; "
                f"{placement.kind} has rows {want.rows} and columns {want.columns} on rank {want.rank}"
            )


def _write_parameter(
    table: Table, placement: Placement, shards: Sequence[Shard], gpus_per_node: int, device: str
) -> dict[str, Any]:
    parameter: dict[str, Any] = {
        "sharding_type": placement.kind.value,
        "compute_kernel": placement.kernel.value,
        "ranks": list(placement.ranks),
    }
    if not placement.kind.copied:
        parameter["shards"] = [
            {
                "shard_offsets": [shard.rows[0], shard.columns[0]],
                "shard_sizes": [shard.height, shard.width],
                "placement": f"rank:{shard.rank}/{device}{f':{shard.rank % gpus_per_node}' if device != 'cpu' else ''}",
            }
            for shard in shards
        ]
    if placement.kernel.cached:
        if not placement.cache_fraction < 1.0:
            raise TraincastError(
                f"table '{table.name}' caches all of its rows, which TorchRec rejects; give it kernel 'fused'"
            )
        parameter["cache_params"] = {"load_factor": placement.cache_fraction}
    return parameter
