"""Embedding tables as data: how often each row is wanted, and what follows for batches and caches."""

from traincast.embeddings.access import Access, Reuse, Uniform, Zipf
from traincast.embeddings.levels import LevelBytes, MemoryLevel, bytes_by_level
from traincast.embeddings.read import load_tables
from traincast.embeddings.table import Pooling, Table, check_tables

__all__ = [
    "Access",
    "LevelBytes",
    "MemoryLevel",
    "Pooling",
    "Reuse",
    "Table",
    "Uniform",
    "Zipf",
    "bytes_by_level",
    "check_tables",
    "load_tables",
]
