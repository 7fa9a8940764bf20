"""Layouts that stand for many plans: one rank has a batch of every group, and sends all pooled rows of its kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from traincast.models.data_parallel.buckets import BUCKET_BYTES
from traincast.models.embeddings.table import ITEM_BYTES
from traincast.models.placement.kinds import ComputeKernel, ShardingKind
from traincast.models.sharded_dlrm.layout import Batch, Layout, Section
from traincast.planner.sharding.lookups import TableGroup

RANK = 0
"""The rank whose program is compiled."""


@dataclass(frozen=True, slots=True)
class Heaviest:
    """What a rank may have in a group at most, about: parts of tables, lookups, elements, and pooled columns."""

    tables: float
    lookups: float
    elements: float
    columns: float


def merge_layouts(layouts: Sequence[Layout]) -> Layout:
    """One layout with the batches of all: of each kind and form those of the first that has them."""
    sections: dict[ShardingKind, Section] = {}
    for section in (section for layout in layouts for section in layout.sections):
        before = sections.setdefault(section.kind, section)
        known = {get_batch_form(batch) for batches in before.ranks for batch in batches}
        ranks = [
            (*batches, *(batch for batch in more if get_batch_form(batch) not in known))
            for batches, more in zip(before.ranks, section.ranks, strict=True)
        ]
        sections[section.kind] = replace(before, ranks=tuple(ranks))
    return replace(layouts[0], sections=tuple(sections[kind] for kind in ShardingKind if kind in sections))


def make_typical_layout(layout: Layout, columns: int) -> Layout:
    """The layout with a batch of every group on the compiled rank, its own or one like that of another rank, and
    nothing on other ranks where they may lack tables; nearly all of the `columns` are the first batch's."""
    left, sections = columns, []
    for section in layout.sections:
        first = {get_batch_form(batch): batch for batches in reversed(section.ranks) for batch in reversed(batches)}
        batches = tuple(replace(first[form], columns=1) for form in sorted(first))
        left -= len(batches)
        sections.append(replace(section, ranks=_spread_batches(section.kind, layout, batches)))
    head = sections[0].ranks[RANK]
    wide = (replace(head[0], columns=max(1, left + 1)), *head[1:])
    sections[0] = replace(sections[0], ranks=_spread_batches(sections[0].kind, layout, wide))
    return replace(layout, sections=tuple(sections))


def _spread_batches(kind: ShardingKind, layout: Layout, batches: tuple[Batch, ...]) -> tuple[tuple[Batch, ...], ...]:
    """The batches of all ranks, given those of the compiled one: it shares tables with all, with its node, or with
    nobody."""
    mates = kind.count_sharers(layout.world_size, layout.gpus_per_node)
    return (batches,) * mates + ((),) * (layout.world_size - mates)


def get_batch_form(batch: Batch) -> tuple[ComputeKernel, str, bool, str]:
    """What tables must have in common to share a kernel."""
    return batch.kernel, batch.dtype, batch.weighted, batch.optimizer


def list_held_batches(layout: Layout, groups: Sequence[TableGroup]) -> dict[int, Batch]:
    """What the compiled rank looks up, by number of the group."""
    numbers = {group: number for number, group in enumerate(groups)}
    return {
        numbers[TableGroup(section.kind, *get_batch_form(batch))]: batch
        for section in layout.sections
        for batch in section.ranks[RANK]
    }


def make_least_layout(layout: Layout) -> Layout:
    """The layout with sorts of as few launches as there can be: a plan adds those that it needs. Several groups of
    data-parallel tables fill a bucket of gradients each."""
    sections = []
    for section in layout.sections:
        full = len(section.ranks[RANK]) > 1 and section.kind.copied
        least = [
            tuple(_make_least_batch(batch, layout.world_size, full) for batch in batches) for batches in section.ranks
        ]
        sections.append(replace(section, ranks=tuple(least)))
    return replace(layout, sections=tuple(sections))


def _make_least_batch(batch: Batch, lookups: int, full: bool) -> Batch:
    """One lookup for the samples of each rank: without any, its kernels would not be launched."""
    elements = BUCKET_BYTES[-1] // ITEM_BYTES[batch.dtype] if full else batch.elements
    load = tuple(min(value, lookups) for value in batch.load)
    return replace(batch, rows=1, lookups=lookups, load=load, elements=elements)


def scale_layout(layout: Layout, load: float, groups: Sequence[TableGroup], heaviest: Sequence[Heaviest]) -> Layout:
    """The layout with `load` times the heaviest lookups, elements and columns, in more tables. Ranks without tables
    get lookups too, so that as many arrive as are sent, but no columns: the compiled rank stays the only sender."""
    number = {id(batch): group for group, batch in list_held_batches(layout, groups).items()}
    sections = []
    for section in layout.sections:
        heavy = tuple(_scale_batch(batch, load, heaviest[number[id(batch)]]) for batch in section.ranks[RANK])
        silent = tuple(replace(batch, columns=0) for batch in heavy)
        ranks = [heavy if batches else silent for batches in section.ranks]
        sections.append(replace(section, ranks=tuple(ranks)))
    return replace(layout, sections=tuple(sections))


def _scale_batch(batch: Batch, load: float, heaviest: Heaviest) -> Batch:
    more = load * heaviest.lookups / max(1, batch.lookups)
    values = tuple(round(more * value) for value in batch.load)
    return replace(
        batch,
        load=values,
        tables=max(1, round(load * heaviest.tables)),
        lookups=max(1, round(load * heaviest.lookups)),
        elements=max(1, round(load * heaviest.elements)),
        columns=max(1, round(load * heaviest.columns)),
        cached_elements=max(1, round(more * batch.cached_elements)),
        fetched_rows=min(1, batch.fetched_rows),  # bytes from the host are counted on their own
        fetched_bytes=min(1, batch.fetched_bytes),
    )
