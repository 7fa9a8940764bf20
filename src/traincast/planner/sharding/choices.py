"""All options of all tables as rows of arrays, and what one of their shards takes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from traincast.models.placement.kinds import ShardingKind
from traincast.models.placement.options import Option
from traincast.utils.arrays import FloatArray, IntArray

NOWHERE = -1
"""In arrays of places: no shard."""
RANKS, NODE, ALL = range(3)
"""Who has shards of an option: ranks of its own choice, the ranks of a node, all."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Choices:
    """All options of all tables as rows: `terms` and `memory` (device and host bytes) of one of their shards, and the
    `group` that looks them up. `rows[t]` are the rows of table t; `base` is the memory that every rank needs anyway."""

    options: tuple[Option, ...]
    table: IntArray
    group: IntArray
    rows: tuple[range, ...]
    terms: FloatArray
    memory: FloatArray
    base: FloatArray
    groups: int
    world_size: int
    gpus_per_node: int

    @cached_property
    def most_slices(self) -> int:
        """The largest number of shards that need a rank each."""
        return max(1, *(option.slices for option in self.options))

    @cached_property
    def slices(self) -> IntArray:
        """How many shards of each option need a rank each."""
        return np.array([option.slices for option in self.options])

    @cached_property
    def shards(self) -> FloatArray:
        """How many shards each option has."""
        return np.array([option.slices or self.world_size for option in self.options], dtype=np.float64)

    @cached_property
    def scope(self) -> IntArray:
        """Who has shards of each option."""
        return np.array([find_scope(option) for option in self.options])

    @property
    def nodes(self) -> int:
        """How many nodes the ranks are on."""
        return -(-self.world_size // self.gpus_per_node)


@dataclass(frozen=True, eq=False, slots=True)
class Weights:
    """Seconds that one shard of each option adds to its rank, and bytes on the device; both per row of the choices.

    `capacity` is the bytes of a rank's device for shards, `average` the seconds of a rank when all tables are whole.
    """

    seconds: FloatArray
    device_bytes: FloatArray
    capacity: float
    average: float


def find_scope(option: Option) -> int:
    """Who has shards of an option."""
    return NODE if option.kind is ShardingKind.TABLE_ROW_WISE else RANKS if option.slices else ALL
