"""What a recommender other than a DLRM is described by: its family, its tables, its sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from math import hypot
from pathlib import Path
from typing import Any

from traincast.models.dlrm.config import OPTIMIZERS
from traincast.models.embeddings.documents import list_entries
from traincast.models.embeddings.read import make_table
from traincast.models.embeddings.table import Table, check_tables
from traincast.models.recommenders.storage import DEVICE, Storage, read_storage
from traincast.utils.errors import TraincastError, make_unknown_error, shorten_value
from traincast.utils.files.reading import read_document

KEY = "recommender"
"""The field by which a description of a recommender is known: it names the family."""
_MOST = 1 << 20  # of any size
_WIDTHS: dict[str, dict[str, tuple[int, ...]]] = {
    "deepfm": {"dense_mlp": (512,), "mlp": (512, 512, 64)},
    "wide-deep": {"mlp": (1024, 512, 256)},
    "two-tower": {"mlp": (512, 256, 128)},
    "din": {"mlp": (200, 80), "attention_mlp": (80, 40)},
    "hstu": {"mlp": (512,)},
    "onetrans": {},
}  # defaults of the lists of widths, and the families
_FIELDS = {
    "deepfm": ("dense_features",),
    "wide-deep": ("dense_features",),
    "two-tower": ("query", "candidate"),
    "din": ("history",),
    "hstu": ("history", "layers", "heads", "head_dim", "attention", "per_action"),
    "onetrans": ("history", "layers", "heads"),
}
_PLACED = ("storage", "sharding")
_SHARDINGS = ("table_wise", "row_wise", "data_parallel")
_EVERY = (KEY, "name", "tables", "batch_size", "optimizer")


@dataclass(frozen=True, slots=True)
class Lengths:
    """Actions of a sample: their mean, the standard deviation from sample to sample, and the most that are kept."""

    mean: float
    spread: float
    longest: int

    @property
    def effective(self) -> int:
        """The length at which equal samples have the pairs of actions of these: the root of the mean square."""
        return max(1, round(hypot(self.mean, self.spread)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Description:
    """A recommender: `mlp` are the widths of its last part, `dense_mlp` of that over numbers, `attention_mlp` of what
    weighs a history. `query` and `candidate` name the tables of the two sides of a two-tower model, `per_action` those
    that every action of a history looks up (the first one if none is named). `storages` say where the rows of tables
    are that are not simply on the device, `shardings` how tables are cut on several GPUs, both by name."""

    recommender: str
    name: str
    tables: tuple[Table, ...]
    batch_size: int = 2048
    optimizer: str = "adam"
    dense_features: int = 13
    dense_mlp: tuple[int, ...] = ()
    mlp: tuple[int, ...] = ()
    attention_mlp: tuple[int, ...] = ()
    history: Lengths = Lengths(100.0, 0.0, 100)
    layers: int = 8
    heads: int = 8
    head_dim: int = 32
    attention: str = "fused"
    query: tuple[str, ...] = ()
    candidate: tuple[str, ...] = ()
    per_action: tuple[str, ...] = ()
    storages: Mapping[str, Storage] = field(default_factory=dict)
    shardings: Mapping[str, str] = field(default_factory=dict)


def is_recommender_document(content: Any) -> bool:
    """Whether a document describes such a recommender."""
    return isinstance(content, Mapping) and KEY in content


def load_recommender_description(path: Path) -> Description:
    """The recommender that a YAML file describes; what is wrong with it is named."""
    try:
        return read_description(read_document(path), path)
    except TraincastError as error:
        raise TraincastError(str(error) if str(path) in str(error) else f"{path}: {error}") from error


def read_description(content: Any, path: Path) -> Description:
    """The recommender of a parsed document."""
    if not is_recommender_document(content):
        raise TraincastError(f"give `{KEY}`, one of {', '.join(_WIDTHS)}")
    family = str(content[KEY])
    if family not in _WIDTHS:
        raise make_unknown_error("recommender", family, _WIDTHS, f"Choose {', '.join(_WIDTHS)}.")
    known = (*_EVERY, *_WIDTHS[family], *_FIELDS[family])
    for name in content:
        if name not in known:
            raise make_unknown_error("field", str(name), known, f"A {family} may have {', '.join(known)}.")
    if "tables" not in content:
        raise TraincastError("no tables; give `tables`, names with rows and dim")
    entries = list(list_entries({"tables": content["tables"]}, str(path)))
    placed = [_take_placement(entry) for entry in entries]
    tables = check_tables([make_table(entry, f"table {n}", path.parent) for n, (entry, _) in enumerate(placed, 1)])
    values: dict[str, Any] = {KEY: family, "name": str(content.get("name", path.stem)), "tables": tables}
    values |= _read_placements(tables, [where for _, where in placed])
    for name, default in _WIDTHS[family].items():
        values[name] = _read_widths(content.get(name, list(default)), name)
    for name in ("batch_size", "dense_features", "layers", "heads", "head_dim"):
        if name in content:
            values[name] = _read_size(content[name], name)
    for name in ("query", "candidate", "per_action"):
        if name in known and (name in content or name != "per_action"):
            values[name] = _read_side(content.get(name), name, tables)
    for name, choices in (("optimizer", OPTIMIZERS), ("attention", ("fused", "padded"))):
        if name in content:
            if content[name] not in choices:
                raise make_unknown_error(name, str(content[name]), choices, f"Choose {', '.join(choices)}.")
            values[name] = content[name]
    if "history" in known:
        values["history"] = _read_lengths(content.get("history", 100))
    made = Description(**values)
    _check(made)
    return made


def _take_placement(entry: Any) -> tuple[Any, dict[str, Any]]:
    """A table's entry without what says how it is kept and cut, and that."""
    if not isinstance(entry, Mapping):
        return entry, {}
    taken = {name: value for name, value in entry.items() if name in _PLACED}
    return {name: value for name, value in entry.items() if name not in _PLACED}, taken


def _read_placements(tables: tuple[Table, ...], placed: list[dict[str, Any]]) -> dict[str, Any]:
    storages, shardings = {}, {}
    for table, where in zip(tables, placed, strict=True):
        label = f"table '{table.name}'"
        if "storage" in where:
            storages[table.name] = read_storage(where["storage"], label)
        if "sharding" in where:
            if where["sharding"] not in _SHARDINGS:
                raise make_unknown_error(
                    "sharding", str(where["sharding"]), _SHARDINGS, f"{label}: choose {', '.join(_SHARDINGS)}."
                )
            shardings[table.name] = where["sharding"]
            if shardings[table.name] == "data_parallel" and storages.get(table.name, DEVICE).kind != "device":
                raise TraincastError(f"{label}: a copied table is on every device; leave out its storage")
    return {"storages": storages, "shardings": shardings}


def _check(what: Description) -> None:
    equal = {table.dim for table in what.tables}
    if what.recommender in ("deepfm", "onetrans") and len(equal) > 1:
        raise TraincastError(
            f"a {what.recommender} has tables of one width; these have {', '.join(map(str, sorted(equal)))}"
        )
    if what.recommender == "onetrans" and (len(what.tables) < 2 or what.tables[0].dim % what.heads):
        raise TraincastError(
            "an onetrans has a table of items, then those of its features, as wide as a multiple of heads"
        )
    kinds = {(table.optimizer, table.dtype, table.weighted) for table in what.tables}
    if len(kinds) > 1 or next(iter(kinds))[1:] != ("fp32", False):
        raise TraincastError("tables of a described recommender are fp32, without weights, under one optimizer")


def _read_size(value: Any, name: str, least: int = 1) -> int:
    if type(value) is not int or not least <= value <= _MOST:
        raise TraincastError(f"{name} {shorten_value(value)}; give an integer from {least} to {_MOST}")
    return value


def _read_widths(value: Any, name: str) -> tuple[int, ...]:
    if not isinstance(value, list) or not value or len(value) > 64:
        raise TraincastError(f"{name} {shorten_value(value)}; give a list of widths")
    return tuple(_read_size(width, name) for width in value)


def _read_side(value: Any, name: str, tables: tuple[Table, ...]) -> tuple[str, ...]:
    names = [table.name for table in tables]
    if not isinstance(value, list) or not value or any(one not in names for one in value):
        raise TraincastError(f"{name} {shorten_value(value)}; give the names of its tables ({', '.join(names[:8])})")
    return tuple(value)


def _read_lengths(value: Any) -> Lengths:
    """A number, or mean, spread and longest."""
    if type(value) in (int, float):
        return Lengths(float(_read_size(round(value), "history")), 0.0, round(value))
    names = [field.name for field in fields(Lengths)]
    if not isinstance(value, Mapping) or "mean" not in value or set(value) - set(names):
        raise TraincastError(f"history {shorten_value(value)}; give a number, or {', '.join(names)}")
    numbers = {name: value.get(name) for name in names}
    for name, number in numbers.items():
        if number is not None and (type(number) not in (int, float) or not 0 <= number <= _MOST):
            raise TraincastError(f"history: {name} {shorten_value(number)}; give a number up to {_MOST}")
    mean, spread = float(numbers["mean"] or 0), float(numbers["spread"] or 0)
    longest = round(numbers["longest"] if numbers["longest"] is not None else mean + 2 * spread)
    if not 1 <= mean <= longest:
        raise TraincastError(f"history: mean {mean:g} and longest {longest}; give 1 or more, and no less than the mean")
    return Lengths(mean, spread, longest)
