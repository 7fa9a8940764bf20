"""Reading hardware descriptions: short TOML or YAML tables, checked field by field."""

from __future__ import annotations

import tomllib
from collections.abc import Collection
from importlib.resources.abc import Traversable
from typing import Any

from traincast.errors import TraincastError, unknown

USER_FILES = (".toml", ".yaml", ".yml")
_MAX_FILE_BYTES = 1 << 20
_LARGEST = 1e18


def read_table(path: Traversable) -> dict[str, Any]:
    """The table in a TOML or YAML file."""
    data = path.read_bytes()
    if len(data) > _MAX_FILE_BYTES:
        raise TraincastError(f"platform file '{path.name}' is larger than {_MAX_FILE_BYTES} bytes")
    try:
        text = data.decode("utf-8")
        return tomllib.loads(text) if path.name.endswith(".toml") else _yaml(path.name, text)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise TraincastError(f"platform file '{path.name}' is not valid TOML: {error}") from None


def _yaml(name: str, text: str) -> dict[str, Any]:
    import yaml

    try:
        table = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise TraincastError(f"platform file '{name}' is not valid YAML: {str(error).splitlines()[0]}") from None
    if not isinstance(table, dict):
        raise TraincastError(f"platform file '{name}' must be a table of 'key: value' lines")
    return {str(key): value for key, value in table.items()}


def number(key: str, table: dict[str, Any], field: str, *, integer: bool = False, zero: bool = False) -> Any:
    """A positive number of the table (`zero` also admits 0), or an error that names it."""
    value = table.get(field)
    if isinstance(value, bool) or not isinstance(value, int | float) or not (value > 0 or (zero and value == 0)):
        raise TraincastError(f"platform '{key}' needs a positive number for '{field}', not {value!r}")
    if value > _LARGEST or (integer and int(value) != value):
        kind = "whole" if integer and value <= _LARGEST else "finite"
        raise TraincastError(f"platform '{key}' needs a {kind} number for '{field}', not {value!r}")
    return int(value) if integer else float(value)


def known_fields(key: str, table: dict[str, Any], known: Collection[str]) -> None:
    """Refuses a field that nothing reads: it is misspelt, or its effect is only imagined."""
    for field in table:
        if field not in known:
            raise unknown("field", str(field), known, f"Platform '{key}' may have {', '.join(known)}.")
