"""Reading hardware descriptions: short TOML or YAML tables, checked field by field."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from traincast.utils.errors import TraincastError, make_unknown_error, shorten_value
from traincast.utils.files.reading import format_path, parse_toml, parse_yaml, read_text

USER_FILES = (".toml", ".yaml", ".yml")
_MAX_FILE_BYTES = 1 << 20  # a limit against damaged files; real ones have a few hundred bytes
_LARGEST = 1e18  # a limit against damaged files: no figure of a sheet comes near


def read_table(path: Traversable) -> dict[str, Any]:
    """The table in a TOML or YAML file."""
    where = f"platform file '{format_path(path.name)}'"
    on_disk = isinstance(path, Path)  # else a file of ours inside a zipped package
    text = read_text(str(path), most=_MAX_FILE_BYTES) if on_disk else path.read_text(encoding="utf-8")
    if path.name.endswith(".toml"):
        return parse_toml(text, where)
    table = parse_yaml(text, where)
    if not isinstance(table, dict):
        raise TraincastError(f"{where} must be a table of 'key: value' lines")
    return table


def read_positive_number(
    key: str, table: dict[str, Any], field: str, *, integer: bool = False, zero: bool = False
) -> Any:
    """A positive number of the table (`zero` also admits 0), or an error that names it."""
    value = table.get(field)
    if isinstance(value, bool) or not isinstance(value, int | float) or not (value > 0 or (zero and value == 0)):
        raise TraincastError(f"platform '{key}' needs a positive number for '{field}', not {shorten_value(value)}")
    if value > _LARGEST or (integer and int(value) != value):
        kind = "an integer" if integer and value <= _LARGEST else "a finite number"
        raise TraincastError(f"platform '{key}' needs {kind} for '{field}', not {shorten_value(value)}")
    return int(value) if integer else float(value)


def read_number_in_range(
    key: str,
    table: dict[str, Any],
    field: str,
    ranges: Mapping[str, tuple[float, float]],
    owner: str,
    *,
    integer: bool = False,
    default: float | None = None,
) -> float:
    """A number of the table within the least and most that any `owner` (GPU, node) has: beyond, its unit is wrong."""
    if default is not None and field not in table:
        return default
    least, most = ranges[field]
    value = float(read_positive_number(key, table, field, integer=integer, zero=least == 0.0))
    if not least <= value <= most:
        raise TraincastError(
            f"platform '{key}': '{field}' is {value:g}, which no {owner} has ({least:g} to {most:g}); check its unit"
        )
    return value


def check_known_fields(key: str, table: dict[str, Any], known: Collection[str]) -> None:
    """Rejects a field that nothing reads: it is misspelt, or its effect is only imagined."""
    for field in table:
        if field not in known:
            raise make_unknown_error("field", str(field), known, f"Platform '{key}' may have {', '.join(known)}.")
