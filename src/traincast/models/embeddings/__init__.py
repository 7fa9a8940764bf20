"""Embedding tables as data: how often each row is accessed, and what follows for batches and caches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from traincast.models.embeddings.access import Access, Folded, Power, Reuse, Uniform, Zipf
from traincast.models.embeddings.table import (
    LevelBytes,
    MemoryLevel,
    Pooling,
    Table,
    check_tables,
    compute_bytes_by_level,
)

if TYPE_CHECKING:
    from traincast.models.embeddings.read import load_tables

__all__ = [
    "Access",
    "Folded",
    "LevelBytes",
    "MemoryLevel",
    "Pooling",
    "Power",
    "Reuse",
    "Table",
    "Uniform",
    "Zipf",
    "check_tables",
    "compute_bytes_by_level",
    "load_tables",
]


def __getattr__(name: str) -> Any:
    """Readers of tables load when accessed: predictions of models that need none should not pay for them."""
    if name == "load_tables":
        from traincast.models.embeddings.read import load_tables

        return load_tables
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
