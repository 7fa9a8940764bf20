"""What a DLRM's lookups want, drawn from a task's seed: the same on every rank, each taking its share."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from traincast.models.dlrm.config import DlrmConfig
from traincast.models.embeddings.access import draw_rows, parse_access
from traincast.models.placement.plan import Shard
from traincast.utils.arrays import IntArray


@dataclass(frozen=True, slots=True)
class Bags:
    """Row numbers of one EmbeddingBag, and where each sample's begin."""

    indices: torch.Tensor
    offsets: torch.Tensor


def draw_lookups(config: DlrmConfig, samples: int, seed: int) -> list[IntArray]:
    """Row numbers [samples, lookups per sample] of every table."""
    random = np.random.default_rng(seed)
    return [
        draw_rows(parse_access(access), rows, samples * lookups, random).reshape(samples, lookups)
        for access, rows, lookups in zip(config.access, config.rows_per_table, config.lookups_per_table, strict=True)
    ]


def make_bags(wanted: IntArray) -> Bags:
    """All lookups of a table."""
    samples, lookups = wanted.shape
    return Bags(torch.from_numpy(wanted.reshape(-1)), torch.arange(0, samples * lookups, lookups))


def make_shard_bags(wanted: IntArray, shard: Shard) -> Bags:
    """The lookups of a table that fall into the rows of a shard, counted from its first."""
    first, last = shard.rows
    inside = (wanted >= first) & (wanted < last)
    if inside.all():
        return make_bags(wanted - first)
    counts = inside.sum(axis=1)
    return Bags(torch.from_numpy(wanted[inside] - first), torch.from_numpy(np.cumsum(counts) - counts))
