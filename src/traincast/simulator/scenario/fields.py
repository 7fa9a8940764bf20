"""Scenarios from keywords and from files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from traincast.simulator.scenario.field_info import GROUPS as GROUPS
from traincast.simulator.scenario.field_info import FieldInfo as FieldInfo
from traincast.simulator.scenario.scenario import Scenario
from traincast.simulator.scenario.scenario import list_scenario_fields as list_scenario_fields
from traincast.utils.errors import TraincastError, make_unknown_error, shorten_value
from traincast.utils.files.reading import format_path, read_document


def make_scenario(values: Mapping[str, Any]) -> Scenario:
    """The scenario that keywords describe; an unknown one is named with the nearest known."""
    known = list_scenario_fields()
    plain: dict[str, Any] = {}
    for name, value in values.items():
        if name not in known:
            raise make_unknown_error("keyword", name, known, f"Choose from {', '.join(known)}.")
        if value is None:
            continue
        if name == "fsdp" and isinstance(value, bool):
            value = 2 if value else None
        elif name in ("stage_layers", "overlap", "graph_modules") and not isinstance(value, str):
            value = ",".join(str(part) for part in value)
        elif isinstance(value, Path):
            value = str(value)
        plain[name] = value
    return Scenario(**plain)


def read_scenario(path: str | Path, *, also: Iterable[str] = ()) -> dict[str, Any]:
    """The fields of a scenario file (YAML, TOML or JSON) as keywords; `also` are other keys that it may have."""
    content, where = read_document(path), format_path(path)
    known = [*list_scenario_fields(), *also]
    if not isinstance(content, Mapping):
        raise TraincastError(f"{where}: not a scenario; write fields by name, such as `workload: resnet50`")
    values = {str(key).replace("-", "_"): value for key, value in content.items()}
    for name, value in values.items():
        if name not in known:
            names = ", ".join(known)
            raise TraincastError(f"{where}: {make_unknown_error('field', name, known, f'It may have {names}.')}")
        info = list_scenario_fields().get(name)
        if info is not None and info.kind == "text" and not isinstance(value, str | int):
            raise TraincastError(f"{where}: `{name}` {shorten_value(value)}: give text")
    return {name: str(value) if _is_text(name) else value for name, value in values.items()}


def _is_text(name: str) -> bool:
    info = list_scenario_fields().get(name)
    return info is not None and info.kind == "text"
