"""Indices on their way to the ranks that hold the tables, pooled embeddings on their way to the samples, and gradients
back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from traincast.ir.ops import DTYPE_BYTES, Phase, StorageKind
from traincast.models.layers.builder import Arguments, Communicator, RankBuilder, Ref, Scalars
from traincast.models.placement.plan import ShardingKind
from traincast.models.sharded_dlrm.layout import Batch, Layout, Mark, ScopeRole, Section

INPUTS_MODULE = "Dlrm.tables"
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
        builder.wait_for_event(event, module=INPUTS_MODULE)
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
    offsets = builder.compute(name, [("t_in", lengths)], shape, dtype=dtype, module=INPUTS_MODULE)
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
    builder.add_op(name, arguments, outputs, module=INPUTS_MODULE)
    return moved


def _exchange_sizes(builder: RankBuilder, tensors: int) -> None:
    """How much every rank will send: made on the host, exchanged, and read back by the host."""
    shape = (builder.world_size * tensors,)
    item = DTYPE_BYTES["int64"]
    host = builder.add_resident_tensor(shape, StorageKind.INPUT, "int64", "cpu")
    builder.open_scope("aten::to", Phase.FORWARD)
    sent = builder.add_device_copy(host, module=INPUTS_MODULE)
    builder.open_scope("SplitsAllToAllAwaitable")
    received = builder.add_tensor(shape, "int64")
    event = builder.add_collective(
        "alltoall_base_", "all_to_all", builder.world, [("output", received), ("input", sent)], received,
        nbytes=shape[0] * item, module=INPUTS_MODULE,
    )  # fmt: skip
    builder.wait_for_event(event, module=INPUTS_MODULE)
    builder.open_scope("aten::to")
    result = builder.add_device_copy(received, "cpu", module=INPUTS_MODULE)
    builder.free_tensors(sent, received, result)


def _write_all_to_all(builder: RankBuilder, source: Ref, send: list[int], receive: list[int]) -> tuple[Ref, int]:
    builder.open_scope("c10d::alltoall_base_", Phase.FORWARD)
    output = builder.add_tensor((sum(receive),), source.spec.dtype)
    return output, builder.add_all_to_all(builder.world, source, output, send, receive, module=INPUTS_MODULE)


OUTPUTS_MODULE = "Dlrm"


@dataclass(frozen=True, slots=True)
class HostOpNames:
    """Host ops of a collective: sending, waiting, and both of the gradients' way back.

    `keeps`: what came is kept until gradients come, and those until backward ends.
    """

    send: str
    wait: str
    send_back: str
    wait_back: str
    keeps: bool


TORCHREC = HostOpNames(
    "All2All_Pooled_Req", "All2All_Pooled_Wait", "All2All_Pooled_WaitBackward", "All2All_Pooled_ReqBackward",
    keeps=False,
)  # fmt: skip
REFERENCE = HostOpNames(
    "ExchangeRequest", "ExchangeWait", "ExchangeWaitBackward", "ExchangeRequestBackward", keeps=True
)


@dataclass(slots=True, eq=False)
class OutputCommunication(ABC):
    """What the kernels of a section gave on one rank, on its way to the ranks of its samples, and its gradients
    back."""

    builder: RankBuilder
    layout: Layout
    section: Section
    module: ClassVar[str]
    _event: int = field(default=-1, init=False)
    _sent: Ref | None = field(default=None, init=False)
    _received: Ref | None = field(default=None, init=False)
    _ops: dict[str, int] = field(default_factory=dict, init=False)

    @property
    @abstractmethod
    def columns(self) -> int:
        """Columns of every sample after the collective."""

    @abstractmethod
    def start_forward(self, pooled: Ref) -> None:
        """Sends what was looked up (flat) on its way."""

    @abstractmethod
    def finish_forward(self) -> list[Ref]:
        """Waits; gives what came."""

    @abstractmethod
    def start_backward(self, grads: list[Ref]) -> None:
        """Sends the gradients of what `finish_forward` gave on their way back."""

    @abstractmethod
    def finish_backward(self) -> Ref:
        """Waits; gives the gradients of what was looked up (flat)."""

    def write_wait(self, *, module: str = "") -> None:
        """Waits for the collective; NCCL holds what it sends until then."""
        self.builder.wait_for_event(self._event, module=module)
        if self._sent is not None:
            self.builder.free_tensors(self._sent)

    def write_empty(self, like: Ref, elements: int, forward: int = -1) -> Ref:
        """Room for what comes."""
        scalars: Scalars = [("size", (elements,)), ("dtype", None)]
        return self.builder.compute(
            "aten::new_empty", [("self", like)], (elements,), scalars, dtype=like.spec.dtype, module=self.module,
            forward=forward,
        )  # fmt: skip


@dataclass(slots=True, eq=False)
class PooledOutputs(OutputCommunication):
    """The collective of one section on one rank. `pooled` is [samples of all ranks, columns] before, [own samples, ..]
    after; `parts` are the columns that come from each sender."""

    names: HostOpNames
    module = OUTPUTS_MODULE
    parts: list[int] = field(init=False)
    _part_ops: list[int] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        columns, kind = self.section.columns, self.section.kind
        if kind is ShardingKind.TABLE_ROW_WISE:
            columns = tuple(columns[rank] for rank in range(0, self.builder.world_size, self.layout.gpus_per_node))
        elif kind.everywhere:
            columns = columns[:1]
        self.parts = list(columns)

    @property
    def columns(self) -> int:
        """Columns of every sample after the collective."""
        return sum(self.parts)

    def start_forward(self, pooled: Ref) -> None:
        """Sends the pooled embeddings of all samples (flat) on their way."""
        builder, kind = self.builder, self.section.kind
        with builder.label_scopes(Mark(ScopeRole.OUT, kind)):
            if not kind.by_rows:
                self._start_all_to_all(builder.world, pooled)
                return
            group = builder.world if kind is ShardingKind.ROW_WISE else builder.within
            self._event, self._received = self._reduce_scatter(group, pooled)
        if kind is ShardingKind.TABLE_ROW_WISE:
            builder.open_scope("ReduceScatterBase_Wait")
            self.write_wait(module=OUTPUTS_MODULE)
            with builder.label_scopes(Mark(ScopeRole.OUT_ACROSS, kind)):
                self._start_all_to_all(builder.across, self._received)

    def finish_forward(self) -> list[Ref]:
        """Waits; gives [own samples, columns] from each sender that sent any."""
        builder, batch = self.builder, self.layout.batch_size
        assert self._received is not None
        reduced = self.section.kind is ShardingKind.ROW_WISE
        builder.open_scope("ReduceScatterBase_Wait" if reduced else self.names.wait, Phase.FORWARD)
        self.write_wait(module=OUTPUTS_MODULE)
        flat = builder.add_view(self._received, self._received.shape)
        scalars: Scalars = [("size", flat.shape)]
        self._ops["wait"] = builder.add_op(
            "aten::view", [("self", self._received)], [flat], scalars, module=OUTPUTS_MODULE
        )
        sizes = [batch * columns for columns in self.parts]
        blocks = [flat]
        if not reduced:
            builder.open_scope("aten::split_with_sizes")
            blocks = [builder.add_view(flat, (size,)) for size in sizes]
            scalars = [("split_sizes", tuple(sizes)), ("dim", 0)]
            self._ops["split"] = builder.add_op(
                "aten::split_with_sizes", [("self", flat)], blocks, scalars, module=OUTPUTS_MODULE
            )
        results = []
        for block, columns in zip(blocks, self.parts, strict=True):
            if not columns:
                continue
            with builder.label_scopes(Mark(ScopeRole.VIEW, self.section.kind)):
                builder.open_scope("aten::view")
            results.append(builder.add_view(block, (batch, columns)))
            scalars = [("size", (batch, -1))]
            self._part_ops.append(
                builder.add_op("aten::view", [("self", block)], [results[-1]], scalars, module=OUTPUTS_MODULE)
            )
        return results

    def start_backward(self, grads: list[Ref]) -> None:
        """Sends the gradients of what `finish_forward` gave on their way back."""
        builder, kind = self.builder, self.section.kind
        with builder.label_scopes(Mark(ScopeRole.JOIN, kind)):
            flat = self._join_gradients(grads)
        if self.names.keeps and self._received is not None:
            builder.free_tensors(self._received)
        with builder.label_scopes(Mark(ScopeRole.BACK, kind)):
            builder.open_scope(
                "ReduceScatterBase_WaitBackward" if kind is ShardingKind.ROW_WISE else self.names.send_back
            )
        if kind is ShardingKind.ROW_WISE:
            self._event, self._received = self._write_all_gather(builder.world, flat)
            return
        group = builder.across if kind is ShardingKind.TABLE_ROW_WISE else builder.world
        send = [self.layout.batch_size * columns for columns in self.parts]
        receive = [self.layout.batch_size * self._count_own_columns()] * len(group.ranks)
        self._received = self.write_empty(flat, sum(receive), self._ops["wait"])
        self._event = builder.add_all_to_all(
            group, flat, self._received, send, receive, module=OUTPUTS_MODULE, forward=self._ops["wait"]
        )
        self._sent = flat

    def finish_backward(self) -> Ref:
        """Waits; gives the gradients of this rank's pooled embeddings (flat)."""
        builder = self.builder
        assert self._received is not None
        builder.open_scope(self.names.wait_back, Phase.BACKWARD)
        self.write_wait()
        if self.section.kind is ShardingKind.TABLE_ROW_WISE:
            with builder.label_scopes(Mark(ScopeRole.BACK_WITHIN, self.section.kind)):
                builder.open_scope("ReduceScatterBase_ReqBackward")
            self._event, gathered = self._write_all_gather(builder.within, self._received)
            self.write_wait()
            return gathered
        return self._received

    def _count_own_columns(self) -> int:
        return self.section.columns[self.builder.rank]

    def _start_all_to_all(self, group: Communicator, pooled: Ref) -> None:
        builder, batch = self.builder, self.layout.batch_size
        send = [batch * self._count_own_columns()] * len(group.ranks)
        receive = [batch * columns for columns in self.parts]
        builder.open_scope(self.names.send, Phase.FORWARD)
        self._received = self.write_empty(pooled, sum(receive))
        self._event = builder.add_all_to_all(group, pooled, self._received, send, receive, module=OUTPUTS_MODULE)
        self._sent = pooled

    def _reduce_scatter(self, group: Communicator, pooled: Ref) -> tuple[int, Ref]:
        builder = self.builder
        builder.open_scope("ReduceScatterBase_Req", Phase.FORWARD)
        part = self.write_empty(pooled, pooled.shape[0] // len(group.ranks))
        arguments = [("output_tensor", part), ("input_tensor", pooled)]
        event = builder.add_collective(
            "_reduce_scatter_base_",
            "reduce_scatter",
            group,
            arguments,
            part,
            nbytes=pooled.spec.nbytes,
            module=OUTPUTS_MODULE,
        )
        self._sent = pooled
        return event, part

    def _write_all_gather(self, group: Communicator, part: Ref) -> tuple[int, Ref]:
        builder = self.builder
        whole = self.write_empty(part, part.shape[0] * len(group.ranks))
        arguments = [("output_tensor", whole), ("input_tensor", part)]
        event = builder.add_collective(
            "_allgather_base_", "all_gather", group, arguments, whole, nbytes=whole.spec.nbytes, module=OUTPUTS_MODULE
        )
        self._sent = part
        return event, whole

    def _join_gradients(self, grads: list[Ref]) -> Ref:
        """Gradients by sender, one after the other: a copy each out of the rows they are in, and one together."""
        builder, batch = self.builder, self.layout.batch_size
        copies = []
        for grad, op in zip(reversed(grads), reversed(self._part_ops), strict=True):
            builder.open_scope("ViewBackward0", Phase.BACKWARD)
            whole = builder.add_tensor(grad.shape)
            scalars: Scalars = [("memory_format", "contiguous_format")]
            builder.add_op("aten::clone", [("self", grad)], [whole], scalars, module=OUTPUTS_MODULE, forward=op)
            line = builder.add_view(whole, (grad.shape[0] * grad.shape[1],))
            builder.add_op(
                "aten::_unsafe_view",
                [("self", whole)],
                [line],
                [("size", line.shape)],
                module=OUTPUTS_MODULE,
                forward=op,
            )
            builder.free_tensors(grad)
            copies.append(line)
        copies.reverse()
        if self.section.kind is ShardingKind.ROW_WISE:
            return copies[0]
        builder.open_scope("SplitWithSizesBackward0", Phase.BACKWARD)
        split, lines, have = self._ops["split"], [], iter(copies)
        for columns in self.parts:
            if columns:
                lines.append(next(have))
            else:
                lines.append(builder.add_tensor((0,)))
                zeros: Scalars = [("size", (0,)), ("dtype", "float32")]
                builder.add_op("aten::zeros", [], [lines[-1]], zeros, module=OUTPUTS_MODULE, forward=split)
        joined = builder.add_tensor((batch * self.columns,))
        builder.add_op("aten::cat", [("tensors", lines)], [joined], [("dim", 0)], module=OUTPUTS_MODULE, forward=split)
        builder.free_tensors(*lines)
        return joined
