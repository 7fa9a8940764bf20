"""Indices on their way to the ranks that hold the tables, as TorchRec's `KJTAllToAll` sends them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from traincast.ir.ops import DTYPE_BYTES, Phase, StorageKind
from traincast.models.layers.builder import Arguments, RankBuilder, Ref
from traincast.models.sharded_dlrm.layout import Batch, Section
from traincast.models.sharded_dlrm.marks import Mark, ScopeRole

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
        refs.append(builder.add_input_copy((size,), kind))
    return Features(refs[1], refs[0], refs[2] if weighted else None)


def make_resident_features(
    builder: RankBuilder, tables: int, lookups: int, samples: int, *, weighted: bool = False
) -> Features:
    """The lookups of a batch, on the device before the step or copied by it elsewhere."""
    return Features(
        builder.add_resident_tensor((tables * samples,), StorageKind.INPUT, LENGTH_DTYPE),
        builder.add_resident_tensor((lookups,), StorageKind.INPUT, "int64"),
        builder.add_resident_tensor((lookups,), StorageKind.INPUT) if weighted else None,
    )


def order_by_section(builder: RankBuilder, sections: Sequence[Section], local: Features, batch: int) -> list[Features]:
    """The lookups in the order of where they go: one permutation, of which each section has a part."""
    counts = [(section.features * batch, section.own_lookups) for section in sections]
    with builder.label_scopes(Mark(ScopeRole.ORDER)):
        whole = _write_reordering(builder, _PERMUTE, sum(n for n, _ in counts), sum(n for _, n in counts), local)
    return [_make_part(builder, whole, lengths, lookups) for lengths, lookups in counts]


def redistribute_lookups(
    builder: RankBuilder, section: Section, features: Features, batch: int, *, with_order: bool = False
) -> Features | None:
    """The lookups of this rank's parts for the samples of all ranks; None when it has no part.

    Sizes first, which the host waits for; then lengths, row numbers and weights. `with_order` keeps where lookups were
    that are dealt out to blocks of rows.
    """
    world, rank = builder.world_size, builder.rank
    lookups = [section.count_local_lookups(holder) for holder in range(world)]
    if section.kind.by_rows:
        with builder.label_scopes(Mark(ScopeRole.BUCKET, section.kind)):
            features = _write_reordering(
                builder, _BUCKETIZE, sum(section.tables) * batch, features.values.shape[0], features,
                with_order=with_order,
            )  # fmt: skip
    tensors = [features.bags, features.values, *([] if features.weights is None else [features.weights])]
    with builder.label_scopes(Mark(ScopeRole.SIZES, section.kind)):
        _exchange_sizes(builder, len(tensors))
    arrived = []
    for number, tensor in enumerate(tensors):
        counts = lookups if number else [count * batch for count in section.tables]
        with builder.label_scopes(
            Mark(ScopeRole.VALUES if number else ScopeRole.LENGTHS, section.kind, number=max(0, number - 1))
        ):
            arrived.append(_write_all_to_all(builder, tensor, counts, [counts[rank]] * world))
    builder.open_scope("KJTAllToAllTensorsAwaitable", Phase.FORWARD)
    for _, event in arrived:
        builder.wait_for_event(event, module=MODULE)
    builder.free_tensors(*tensors)
    if not section.tables[rank]:
        return None
    received = Features(arrived[0][0], arrived[1][0], arrived[2][0] if len(arrived) > 2 else None)
    with builder.label_scopes(Mark(ScopeRole.ARRIVE, section.kind)):
        sizes = (received.bags.shape[0], received.values.shape[0])
        result = _write_reordering(builder, _PERMUTE, *sizes, received)
    builder.free_tensors(*(tensor for tensor, _ in arrived))
    return replace(result, order=features.order)


def split_by_kernel(builder: RankBuilder, features: Features, batches: Sequence[Batch], samples: int) -> list[Features]:
    """The lookups of each kernel."""
    return [_make_part(builder, features, batch.tables * samples, batch.lookups) for batch in batches]


def _make_part(builder: RankBuilder, whole: Features, lengths: int, lookups: int) -> Features:
    return Features(
        builder.add_view(whole.bags, (lengths,)),
        builder.add_view(whole.values, (lookups,)),
        None if whole.weights is None else builder.add_view(whole.weights, (lookups,)),
        whole.order,
    )


def write_offsets(builder: RankBuilder, lengths: Ref, dtype: str) -> Ref:
    """Where each bag starts."""
    builder.open_scope("fbgemm::asynchronous_complete_cumsum", Phase.FORWARD)
    name, shape = "fbgemm::asynchronous_complete_cumsum", (lengths.shape[0] + 1,)
    offsets = builder.compute(name, [("t_in", lengths)], shape, dtype=dtype, module=MODULE)
    builder.free_tensors(lengths)
    return offsets


_PERMUTE = "fbgemm::permute_2D_sparse_data"  # features in another order: a kernel for lengths, one for the rest
_BUCKETIZE = "fbgemm::block_bucketize_sparse_features"  # row numbers sorted by the rank that holds their block of rows


def _write_reordering(
    builder: RankBuilder, name: str, lengths: int, lookups: int, features: Features, *, with_order: bool = False
) -> Features:
    """Features moved by one of these ops, in a scope of its own."""
    builder.open_scope(name, Phase.FORWARD)
    dtype = features.values.spec.dtype
    moved = Features(
        builder.add_tensor((lengths,), LENGTH_DTYPE),
        builder.add_tensor((lookups,), dtype),
        None if features.weights is None else builder.add_tensor((lookups,)),
        builder.add_tensor((lookups,), dtype) if with_order else None,
    )
    arguments: Arguments = [("lengths", features.bags), ("indices", features.values)]
    outputs = [moved.bags, moved.values]
    if features.weights is not None and moved.weights is not None:
        arguments = [*arguments, ("weights", features.weights)]
        outputs.append(moved.weights)
    outputs += [] if moved.order is None else [moved.order]
    builder.add_op(name, arguments, outputs, module=MODULE)
    return moved


def _exchange_sizes(builder: RankBuilder, tensors: int) -> None:
    """How much every rank will send: made on the host, exchanged, and read back by the host."""
    shape = (builder.world_size * tensors,)
    item = DTYPE_BYTES["int64"]
    host = builder.add_resident_tensor(shape, StorageKind.INPUT, "int64", "cpu")
    builder.open_scope("aten::to", Phase.FORWARD)
    sent = builder.add_device_copy(host, module=MODULE)
    builder.open_scope("SplitsAllToAllAwaitable")
    received = builder.add_tensor(shape, "int64")
    event = builder.add_collective(
        "alltoall_base_", "all_to_all", builder.world, [("output", received), ("input", sent)], received,
        nbytes=shape[0] * item, module=MODULE,
    )  # fmt: skip
    builder.wait_for_event(event, module=MODULE)
    builder.open_scope("aten::to")
    result = builder.add_device_copy(received, "cpu", module=MODULE)
    builder.free_tensors(sent, received, result)


def _write_all_to_all(builder: RankBuilder, source: Ref, send: list[int], receive: list[int]) -> tuple[Ref, int]:
    builder.open_scope("c10d::alltoall_base_", Phase.FORWARD)
    output = builder.add_tensor((sum(receive),), source.spec.dtype)
    return output, builder.add_all_to_all(builder.world, source, output, send, receive, module=MODULE)
