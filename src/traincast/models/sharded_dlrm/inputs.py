"""Indices on their way to the ranks that hold the tables, as TorchRec's `KJTAllToAll` sends them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from traincast.ir.ops import DTYPE_BYTES, Phase, StorageKind
from traincast.models.layers.builder import Arguments, RankBuilder, Ref
from traincast.models.sharded_dlrm.layout import Batch, Section
from traincast.models.sharded_dlrm.marks import Mark, Role

MODULE = "Dlrm.tables"
LENGTH_DTYPE = "int32"


@dataclass(frozen=True, slots=True)
class Features:
    """Lookups in jagged form: `values` are row numbers, `weights` those of weighted lookups.

    `bags` holds the length of every bag ([tables * samples]), or where each starts and the last one ends. `order` says
    where each lookup was before it was dealt out to blocks of rows; only unpooled rows need it.
    """

    bags: Ref
    values: Ref
    weights: Ref | None
    order: Ref | None = None


def copy_features(
    builder: RankBuilder, tables: int, lookups: int, samples: int, dtype: str, *, weighted: bool, offsets: bool = False
) -> Features:
    """The lookups of a batch, copied from the host; with `offsets` as where each bag starts instead of its length."""
    bags = (tables * samples + 1, dtype) if offsets else (tables * samples, LENGTH_DTYPE)
    refs = []
    for size, kind in ((lookups, dtype), bags, *([(lookups, "float32")] if weighted else [])):
        refs.append(builder.copied_in((size,), kind))
    return Features(refs[1], refs[0], refs[2] if weighted else None)


def ordered(builder: RankBuilder, sections: Sequence[Section], local: Features, batch: int) -> list[Features]:
    """The lookups in the order of where they go: one permutation, of which each section has a part."""
    counts = [(section.features * batch, section.own_lookups) for section in sections]
    with builder.labelled(Mark(Role.ORDER)):
        whole = _permuted(builder, sum(n for n, _ in counts), sum(n for _, n in counts), local)
    return [_part(builder, whole, lengths, lookups) for lengths, lookups in counts]


def redistribute(
    builder: RankBuilder, section: Section, features: Features, batch: int, *, with_order: bool = False
) -> Features | None:
    """The lookups of this rank's parts for the samples of all ranks; None when it has no part.

    Sizes first, which the host waits for; then lengths, row numbers and weights. `with_order` keeps where lookups were
    that are dealt out to blocks of rows.
    """
    world, rank = builder.world_size, builder.rank
    lookups = [section.local_lookups(holder) for holder in range(world)]
    if section.kind.by_rows:
        with builder.labelled(Mark(Role.BUCKET, section.kind)):
            features = _bucketized(builder, sum(section.tables) * batch, features, with_order)
    tensors = [features.bags, features.values, *([] if features.weights is None else [features.weights])]
    with builder.labelled(Mark(Role.SIZES, section.kind)):
        _exchange_sizes(builder, len(tensors))
    arrived = []
    for number, tensor in enumerate(tensors):
        counts = lookups if number else [count * batch for count in section.tables]
        with builder.labelled(Mark(Role.VALUES if number else Role.LENGTHS, section.kind, number=max(0, number - 1))):
            arrived.append(_exchange(builder, tensor, counts, [counts[rank]] * world))
    builder.scope("KJTAllToAllTensorsAwaitable", Phase.FORWARD)
    for _, event in arrived:
        builder.wait(event, module=MODULE)
    builder.free(*tensors)
    if not section.tables[rank]:
        return None
    received = Features(arrived[0][0], arrived[1][0], arrived[2][0] if len(arrived) > 2 else None)
    with builder.labelled(Mark(Role.ARRIVE, section.kind)):
        result = _permuted(builder, received.bags.shape[0], received.values.shape[0], received)
    builder.free(*(tensor for tensor, _ in arrived))
    return replace(result, order=features.order)


def split(builder: RankBuilder, features: Features, batches: Sequence[Batch], samples: int) -> list[Features]:
    """The lookups of each kernel."""
    return [_part(builder, features, batch.tables * samples, batch.lookups) for batch in batches]


def _part(builder: RankBuilder, whole: Features, lengths: int, lookups: int) -> Features:
    return Features(
        builder.view(whole.bags, (lengths,)),
        builder.view(whole.values, (lookups,)),
        None if whole.weights is None else builder.view(whole.weights, (lookups,)),
        whole.order,
    )


def offsets_of(builder: RankBuilder, lengths: Ref, dtype: str) -> Ref:
    """Where each bag starts."""
    builder.scope("fbgemm::asynchronous_complete_cumsum", Phase.FORWARD)
    offsets = builder.new((lengths.shape[0] + 1,), dtype)
    builder.op("fbgemm::asynchronous_complete_cumsum", [("t_in", lengths)], [offsets], module=MODULE)
    builder.free(lengths)
    return offsets


def _permuted(builder: RankBuilder, lengths: int, lookups: int, features: Features) -> Features:
    """Features in another order: one op, a kernel for lengths and one for the rest."""
    builder.scope("fbgemm::permute_2D_sparse_data", Phase.FORWARD)
    return _moved(builder, "fbgemm::permute_2D_sparse_data", lengths, lookups, features)


def _bucketized(builder: RankBuilder, lengths: int, features: Features, with_order: bool) -> Features:
    """Row numbers sorted by the rank that holds their block of rows."""
    name, lookups = "fbgemm::block_bucketize_sparse_features", features.values.shape[0]
    builder.scope(name, Phase.FORWARD)
    return _moved(builder, name, lengths, lookups, features, with_order=with_order)


def _moved(
    builder: RankBuilder, name: str, lengths: int, lookups: int, features: Features, *, with_order: bool = False
) -> Features:
    dtype = features.values.spec.dtype
    moved = Features(
        builder.new((lengths,), LENGTH_DTYPE),
        builder.new((lookups,), dtype),
        None if features.weights is None else builder.new((lookups,)),
        builder.new((lookups,), dtype) if with_order else None,
    )
    arguments: Arguments = [("lengths", features.bags), ("indices", features.values)]
    outputs = [moved.bags, moved.values]
    if features.weights is not None and moved.weights is not None:
        arguments = [*arguments, ("weights", features.weights)]
        outputs.append(moved.weights)
    outputs += [] if moved.order is None else [moved.order]
    builder.op(name, arguments, outputs, module=MODULE)
    return moved


def _exchange_sizes(builder: RankBuilder, tensors: int) -> None:
    """How much every rank will send: made on the host, exchanged, and read back by the host."""
    shape = (builder.world_size * tensors,)
    item = DTYPE_BYTES["int64"]
    host = builder.resident(shape, StorageKind.INPUT, "int64", "cpu")
    builder.scope("aten::to", Phase.FORWARD)
    sent = builder.moved(host, module=MODULE)
    builder.scope("SplitsAllToAllAwaitable")
    received = builder.new(shape, "int64")
    event = builder.collective(
        "alltoall_base_", "all_to_all", builder.world, [("output", received), ("input", sent)], received,
        nbytes=shape[0] * item, module=MODULE,
    )  # fmt: skip
    builder.wait(event, module=MODULE)
    builder.scope("aten::to")
    answer = builder.moved(received, "cpu", module=MODULE)
    builder.free(sent, received, answer)


def _exchange(builder: RankBuilder, source: Ref, send: list[int], receive: list[int]) -> tuple[Ref, int]:
    builder.scope("c10d::alltoall_base_", Phase.FORWARD)
    output = builder.new((sum(receive),), source.spec.dtype)
    return output, builder.all_to_all(builder.world, source, output, send, receive, module=MODULE)
