"""Settings that a row of Megatron-Bridge leaves out, taken from the nearest release that published the like.

The table names the preset (CUDA graphs, recomputation, how tokens reach experts) of most releases; where it does not,
because the release's files do not say, one rule for all rows takes those of the nearest release (the earlier one of two
as near) that names a preset for the same model, GPU and layout; or else for the same model, GPU and precision; or else
for the same model and GPU.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from traincast_evaluation.suites.published import Row

_LIKE = (  # columns that must be equal, the closest likeness first
    ("set", "model", "device", "bits", "gpus", "tp", "pp", "cp", "ep", "micro_batch", "seq_len"),
    ("set", "model", "device", "bits"),
    ("set", "model", "device"),
)
_PRESET_FILE = "scripts/performance/"
_TAKEN = ("compile", "activation_checkpointing", "notes")


def fill_from_presets(rows: Sequence[Row]) -> dict[int, Row]:
    """Rows by number; those without a preset of their own have the settings of the nearest release that names one."""
    named = [row for row in rows if _PRESET_FILE in row["config_path"] and _read_release(row) is not None]
    return {row.number: _fill_row(row, named) for row in rows}


def _fill_row(row: Row, named: Sequence[Row]) -> Row:
    release = _read_release(row)
    if release is None or _PRESET_FILE in row["config_path"]:
        return row
    for columns in _LIKE:
        like = [other for other in named if _make_preset_key(other, columns) == _make_preset_key(row, columns)]
        if like:
            nearest = min(like, key=lambda other: _compute_release_distance(_read_release(other), release))
            return replace(row, cells={**row.cells, **{column: nearest[column] for column in _TAKEN}})
    return row


def _make_preset_key(row: Row, columns: Sequence[str]) -> tuple[str, ...]:
    """What is compared of a row; remarks in brackets behind a model's name do not count."""
    texts = {"bits": "8" if "8" in row["precision"] else "16", "model": row["model"].partition(" (")[0]}
    return tuple(texts.get(column) or row[column] for column in columns)


def _read_release(row: Row) -> tuple[int, ...] | None:
    """The version of the software that a row names, such as (0, 5, 1)."""
    found = re.search(r"Megatron-Bridge v(\d+)\.(\d+)\.(\d+)", row["software"])
    return tuple(int(part) for part in found.groups()) if found else None


def _compute_release_distance(other: tuple[int, ...] | None, release: tuple[int, ...]) -> tuple[int, bool]:
    """How far a release is from another; of two as near, the earlier one comes first."""
    assert other is not None
    steps = 10 * (10 * other[0] + other[1]) + other[2] - 10 * (10 * release[0] + release[1]) - release[2]
    return abs(steps), steps > 0
