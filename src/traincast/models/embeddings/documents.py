"""The forms in which people write down their tables, as one list of entries; table sets made up to show published
statistics.

Published are the lookups and different rows of all tables together, and how both spread over reuse bins. The lookups of
each bin are dealt to tables so that sums over tables meet the published figures exactly; how tables differ is assumed.

A document is a list of tables, `tables:` with one (beside it, fields that all of them share), TorchRec's `modules:`, or
names with numbers of rows. A table's fields are ours (rows, dim, pooling) or TorchRec's (num_embeddings, embedding_dim,
pooling_factors).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from math import ceil
from pathlib import Path
from random import Random
from statistics import NormalDist
from typing import Any

import numpy as np

from traincast.models.embeddings.access import Reuse, parse_access
from traincast.models.embeddings.reuse import BIN_EDGES, ReuseHistogram
from traincast.models.embeddings.table import Pooling, Table, check_tables
from traincast.utils.arrays import FloatArray
from traincast.utils.errors import TraincastError, make_unknown_error, shorten_value

POOLING_SPREAD = 1.0  # of the natural logarithm of pooling over tables
HOTNESS_SPREAD = 0.35  # of the natural logarithm by which a table prefers a bin over the one below
HEIGHT_MEDIAN = 10.0  # rows of a table over the different rows of one batch
HEIGHT_SPREAD = 1.0  # of its natural logarithm
DIMS = (32, 64, 128)
_OWNER_ROWS = 2.0  # rows of a bin that a table owns at least, so that rare hot rows belong to few tables
_OWNER_ROOM = 4.0  # lookups of an owner over the counts of the bin
_ROUNDS = 300  # of proportional fitting, after which totals are within 1 %


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """Published statistics of a batch of `batch_size` samples over all `tables`, and the seed of what is assumed."""

    tables: int
    batch_size: int
    lookups: float
    unique_rows: float
    row_shares: tuple[float, ...]
    access_shares: tuple[float, ...]
    seed: int


def synthesise_tables(recipe: Recipe, *, optimizer: str = "rowwise_adagrad") -> tuple[Table, ...]:
    """The tables of a recipe, the same for the same seed."""
    dealt, rows, sizes = _draw_tables(recipe)
    return tuple(
        Table(
            name=f"t{i}",
            rows=height,
            dim=dim,
            pooling=Pooling.from_constant(float(dealt[i].sum()) / recipe.batch_size),
            access=Reuse(_make_histogram(rows[i], dealt[i])),
            optimizer=optimizer,
        )
        for i, (height, dim) in enumerate(sizes)
    )


def list_table_sizes(recipe: Recipe) -> list[tuple[int, int]]:
    """Rows and columns of the tables of a recipe, without what is looked up in them."""
    return _draw_tables(recipe)[2]


def _draw_tables(recipe: Recipe) -> tuple[FloatArray, FloatArray, list[tuple[int, int]]]:
    """Lookups and rows that are looked up, by table and bin, and the size of every table."""
    random = Random(recipe.seed)
    total = ReuseHistogram(
        lookups=recipe.lookups,
        unique_rows=recipe.unique_rows,
        row_shares=tuple(recipe.row_shares),
        access_shares=tuple(recipe.access_shares),
        precision=0.001,
    )
    bin_rows, bin_lookups = total.compute_counts()
    lookups = np.exp(POOLING_SPREAD * _draw_scores(recipe.tables, random))
    lookups *= bin_lookups.sum() / lookups.sum()
    dealt = _distribute_lookups(lookups, bin_rows, bin_lookups, random)
    rows = dealt * (bin_rows / np.maximum(bin_lookups, 1e-300))
    height = HEIGHT_MEDIAN * np.exp(HEIGHT_SPREAD * _draw_scores(recipe.tables, random))
    dims = [DIMS[i % len(DIMS)] for i in range(recipe.tables)]
    random.shuffle(dims)
    heights = [ceil(max(float(height[i]), 1.0) * float(rows[i].sum())) for i in range(recipe.tables)]
    return dealt, rows, list(zip(heights, dims, strict=True))


def _distribute_lookups(
    lookups: FloatArray, bin_rows: FloatArray, bin_lookups: FloatArray, random: Random
) -> FloatArray:
    """Lookups by table and bin: sums over tables are `bin_lookups`, sums over bins nearly `lookups`."""
    hotness = HOTNESS_SPREAD * _draw_scores(len(lookups), random)
    octave = np.arange(len(bin_rows)) - 0.5 * len(bin_rows)
    dealt = lookups[:, None] * np.exp(hotness[:, None] * octave) * _choose_owners(lookups, bin_rows, random)
    for _ in range(_ROUNDS):
        dealt *= (lookups / dealt.sum(axis=1))[:, None]
        dealt *= bin_lookups / np.maximum(dealt.sum(axis=0), 1e-300)
    return dealt


def _choose_owners(lookups: FloatArray, bin_rows: FloatArray, random: Random) -> FloatArray:
    """1 where a table may own rows of a bin: it makes enough lookups, and the bin has rows enough for its owners."""
    owners = np.zeros((len(lookups), len(bin_rows)))
    for number, rows in enumerate(bin_rows):
        able = [int(i) for i in np.flatnonzero(lookups >= _OWNER_ROOM * (BIN_EDGES[number] + 1))]
        most = max(1, int(rows / _OWNER_ROWS))
        chosen = able if len(able) <= most else random.sample(able, most)
        owners[chosen or [int(np.argmax(lookups))], number] = 1.0
    return owners


def _make_histogram(rows: FloatArray, lookups: FloatArray) -> ReuseHistogram:
    return ReuseHistogram(
        lookups=float(lookups.sum()),
        unique_rows=float(rows.sum()),
        row_shares=tuple(float(share) for share in rows / rows.sum()),
        access_shares=tuple(float(share) for share in lookups / lookups.sum()),
    )


def _draw_scores(count: int, random: Random) -> FloatArray:
    """Evenly spaced quantiles of the standard normal distribution, shuffled."""
    scores = [NormalDist().inv_cdf((i + 0.5) / count) for i in range(count)]
    random.shuffle(scores)
    return np.array(scores)


DEFAULT_DIM = 128
"""Columns of tables of which only the rows are said."""
ASSUMED_DIM = f"nothing says how wide the tables are: {DEFAULT_DIM} columns each (write `dim` beside `tables`)"
_SAME = {
    "num_embeddings": "rows", "embedding_dim": "dim", "data_type": "dtype", "pooling_factor": "pooling",
    "pooling_factors": "pooling", "is_weighted": "weighted",
}  # fmt: skip
_OURS = "traincast"  # where a config of TorchRec's has fields of ours
_UNPOOLED = "NONE"
_POOLINGS = ("SUM", "MEAN", _UNPOOLED)
# fields of TorchRec's configs that change nothing of which bytes a training step moves
_UNUSED = (
    "weight_init_max", "weight_init_min", "init_fn", "need_pos", "num_embeddings_post_pruning", "input_dim",
    "enable_embedding_update", "stash_weights",
)  # fmt: skip
_UNKNOWN = ("total_num_buckets", "use_virtual_table", "virtual_table_eviction_policy")  # unless they are off


def is_table_document(content: Any) -> bool:
    """Whether a document describes tables, and nothing else."""
    if isinstance(content, list):
        return bool(content) and all(isinstance(entry, Mapping) and "name" in entry for entry in content)
    if not isinstance(content, Mapping) or not content:
        return False
    return "tables" in content or "modules" in content or _has_only_rows(content)


def list_entries(content: Any, where: str) -> Iterator[Any]:
    """The tables of a document, one after the other, as they are written there."""
    if isinstance(content, list):
        yield from content
        return
    if not isinstance(content, Mapping) or not content:
        raise TraincastError(f"{where}: give `tables` with a list of tables, or names with their numbers of rows")
    if "modules" in content:
        yield from (entry for _, entry in list_module_entries(content["modules"], where))
        return
    tables, shared = content.get("tables", content), {}
    if "tables" in content:
        shared = {str(name): value for name, value in content.items() if name != "tables"}
    if isinstance(tables, list):
        yield from (share_fields(entry, shared) for entry in tables)
    elif isinstance(tables, Mapping) and tables and _is_named(tables):
        width = {"dim": DEFAULT_DIM} if lacks_width(content) else {}
        for name, value in tables.items():
            fields = dict(value) if isinstance(value, Mapping) else {"rows": value, **width}
            yield share_fields({"name": name, **fields}, shared)
    else:
        raise TraincastError(f"{where}: give `tables` with a list of tables, or names with their numbers of rows")


def list_module_entries(modules: Any, where: str) -> Iterator[tuple[str, Any]]:
    """The tables of TorchRec's modules, each with the path of its module."""
    if not isinstance(modules, Mapping):
        raise TraincastError(f"{where}: modules {shorten_value(modules)}; give names with the `tables` of each")
    for path, module in modules.items():
        if not isinstance(module, Mapping) or not isinstance(module.get("tables"), list):
            raise TraincastError(f"{where}: module {shorten_value(path)}; give its `tables`")
        shared = {"is_weighted": module["is_weighted"]} if "is_weighted" in module else {}
        yield from ((str(path), share_fields(entry, shared)) for entry in module["tables"])


def lacks_width(content: Any) -> bool:
    """Whether a document has names and rows of tables, and nothing says how wide they are."""
    if not isinstance(content, Mapping) or "modules" in content:
        return False
    tables = content.get("tables", content)
    said = "tables" in content and bool({"dim", "embedding_dim"} & set(content))
    return isinstance(tables, Mapping) and bool(tables) and _has_only_rows(tables) and not said


def translate_fields(entry: Mapping[Any, Any], label: str) -> dict[str, Any]:
    """A table's fields in our own words."""
    fields: dict[str, Any] = {}
    beside = entry.get(_OURS)
    given = [item for item in entry.items() if item[0] != _OURS or not isinstance(beside, Mapping)]
    for name, value in [*given, *(beside.items() if isinstance(beside, Mapping) else ())]:
        if name in _UNUSED or (name in _UNKNOWN and value in (None, False)):
            continue
        if name in _UNKNOWN:
            raise TraincastError(f"{label}: {name} {shorten_value(value)} cannot be represented; leave it out")
        if name == "feature_names":
            if not isinstance(value, list) or len(value) != 1:
                raise TraincastError(
                    f"{label}: feature_names {shorten_value(value)}; give the one that the table serves"
                )
            continue
        if name == "pooling" and _get_enum(value) in _POOLINGS:
            if _get_enum(value) == _UNPOOLED and entry.get("pooling_factors", [1]) != [1]:
                raise TraincastError(f"{label}: pooling NONE with more than one lookup a sample cannot be represented")
            continue
        ours = _SAME.get(str(name), str(name))
        if ours in fields:
            raise TraincastError(f"{label}: {name} and another field both say its {ours}; give one of them")
        fields[ours] = _translate_value(str(name), value)
    return fields


def _translate_value(name: str, value: Any) -> Any:
    if name == "pooling_factors" and isinstance(value, list) and len(value) == 1:
        return value[0]
    return str(_get_enum(value)).lower() if name == "data_type" else value


def _get_enum(value: Any) -> Any:
    """The name of an enum's member, whether or not its class stands before it."""
    return value.rpartition(".")[2] if isinstance(value, str) else value


def share_fields(entry: Any, shared: Mapping[str, Any]) -> Any:
    """A table with fields that it shares with others, unless it has its own; what is no mapping stays as it is."""
    return {**shared, **entry} if isinstance(entry, Mapping) else entry


def _has_only_rows(content: Mapping[Any, Any]) -> bool:
    return all(type(value) is int for value in content.values())


def _is_named(tables: Mapping[Any, Any]) -> bool:
    return _has_only_rows(tables) or all(isinstance(value, Mapping) for value in tables.values())


_DATA = Path(__file__).parent / "data"
BUILTIN_SETS = ("mlperf-dlrm", "mlperf-dlrm-v2", "dlrm-2021-856", "dlrm-2022-788")


def list_builtin_sizes(name: str) -> list[tuple[int, int]]:
    """Rows and columns of the tables of a built-in set, which is quicker than loading them."""
    content = _read_builtin(name)
    if "recipe" in content:
        return list_table_sizes(Recipe(**content["recipe"]))
    return [(rows, content["dim"]) for rows in content["rows"]]


def _read_builtin(name: str) -> dict[str, Any]:
    if name not in BUILTIN_SETS:
        raise make_unknown_error("table set", name, BUILTIN_SETS, f"Choose from {', '.join(BUILTIN_SETS)}.")
    content: dict[str, Any] = json.loads((_DATA / f"{name}.json").read_text(encoding="utf-8"))
    return content


@cache
def load_builtin_tables(name: str) -> tuple[Table, ...]:
    """The tables of a built-in set. docs/how-it-works/models.md says what of them is published, what assumed."""
    content = _read_builtin(name)
    if "recipe" in content:
        return check_tables(synthesise_tables(Recipe(**content["recipe"])))
    return check_tables(
        [
            Table(
                name=f"t{i}",
                rows=rows,
                dim=content["dim"],
                pooling=Pooling.from_constant(pooling),
                access=parse_access(content["access"]),
                optimizer=content["optimizer"],
            )
            for i, (rows, pooling) in enumerate(zip(content["rows"], content["pooling"], strict=True))
        ]
    )
