"""The built-in table sets: two of MLPerf, and two that show the statistics of public production-like data sets."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from traincast.models.embeddings.access import parse_access
from traincast.models.embeddings.synthesis import Recipe, synthesise_tables
from traincast.models.embeddings.table import Pooling, Table, check_tables
from traincast.utils.errors import make_unknown_error

_DATA = Path(__file__).parent / "data"
BUILTIN_SETS = ("mlperf-dlrm", "mlperf-dlrm-v2", "dlrm-2021-856", "dlrm-2022-788")


@cache
def load_builtin_tables(name: str) -> tuple[Table, ...]:
    """The tables of a built-in set. docs/how-it-works/models.md says what of them is published, what assumed."""
    if name not in BUILTIN_SETS:
        raise make_unknown_error("table set", name, BUILTIN_SETS, f"Choose from {', '.join(BUILTIN_SETS)}.")
    content: dict[str, Any] = json.loads((_DATA / f"{name}.json").read_text(encoding="utf-8"))
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
