#!/usr/bin/env python
"""Writes docs/reference/prediction.md: the scenario field by field and the JSON document of a prediction key by key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from traincast.simulator.prediction.document import SCHEMA, make_document_schema
from traincast.simulator.scenario.kinds import KINDS, USED
from traincast.simulator.scenario.scenario import GROUPS, FieldInfo, list_scenario_fields

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reference" / "prediction.md"
INTRODUCTION = f"""# Scenario and prediction

Written by `python scripts/write_prediction.py` from the declarations.

A **scenario** is everything that can be asked about one step. Its fields are the options of `traincast predict`, the
keywords of `traincast.predict`, the fields of the server and of `--file scenario.yaml`, and the edits of `whatif --set`
and `sweep --vary`. A field that a step does not use is an error.

A **prediction** is one JSON document (`--json`, `.to_dict()`, `/api/answer`) with the same keys for every workload and
platform. A part that cannot be had is null, and `reasons` says why. `schema` is {SCHEMA}; it is raised when a key
changes its meaning or goes.
"""


def scenario_text() -> str:
    """The fields by group, and which kind of step uses which."""
    lines = ["## Scenario", ""]
    for group, title in GROUPS.items():
        members = [info for info in list_scenario_fields().values() if info.group == group]
        lines += [f"### {title.capitalize()}", "", "| field | values | meaning | default |", "|---|---|---|---|"]
        lines += [f"| `{info.name}` | {_values(info)} | {info.help} | {info.default} |" for info in members]
        lines.append("")
    lines += ["### Which step uses which field", "", "| a step from | uses |", "|---|---|"]
    for kind, words in KINDS.items():
        used = ", ".join(f"`{name}`" for name in list_scenario_fields() if name in USED[kind])
        lines.append(f"| {words} | {used} |")
    return "\n".join([*lines, ""])


def _values(info: FieldInfo) -> str:
    if info.choices:
        return ", ".join(map(str, info.choices))
    if info.kind in ("integer", "number"):
        return f"{info.kind}, {info.limits}"
    return info.kind


def document_text() -> str:
    """The keys of the document."""
    schema = make_document_schema()
    properties = schema["$defs"][schema["$ref"].rpartition("/")[2]]["properties"]
    lines = ["## Prediction", "", "| key | type | meaning |", "|---|---|---|"]
    for key, described in properties.items():
        kinds: list[dict[str, Any]] = described.get("anyOf", [described])
        meaning = next(str(kind["description"]) for kind in [described, *kinds] if "description" in kind)
        names = " or ".join(str(kind.get("type", "any")) for kind in kinds)
        lines.append(f"| `{key}` | {names} | {meaning} |")
    return "\n".join([*lines, ""])


def page_text() -> str:
    """The page."""
    return "\n".join([INTRODUCTION, scenario_text(), document_text()])


if __name__ == "__main__":
    PAGE.write_text(page_text(), encoding="utf-8")
