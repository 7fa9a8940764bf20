"""Pooled embeddings on their way to the ranks whose samples they belong to, and their gradients back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar

from traincast.ir.ops import Phase
from traincast.models.layers.builder import Communicator, RankBuilder, Ref, Scalars
from traincast.models.placement.kinds import ShardingKind
from traincast.models.sharded_dlrm.layout import Layout, Section
from traincast.models.sharded_dlrm.marks import Mark, ScopeRole

MODULE = "Dlrm"


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
    module = MODULE
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
            self.write_wait(module=MODULE)
            with builder.label_scopes(Mark(ScopeRole.OUT_ACROSS, kind)):
                self._start_all_to_all(builder.across, self._received)

    def finish_forward(self) -> list[Ref]:
        """Waits; gives [own samples, columns] from each sender that sent any."""
        builder, batch = self.builder, self.layout.batch_size
        assert self._received is not None
        reduced = self.section.kind is ShardingKind.ROW_WISE
        builder.open_scope("ReduceScatterBase_Wait" if reduced else self.names.wait, Phase.FORWARD)
        self.write_wait(module=MODULE)
        flat = builder.add_view(self._received, self._received.shape)
        scalars: Scalars = [("size", flat.shape)]
        self._ops["wait"] = builder.add_op("aten::view", [("self", self._received)], [flat], scalars, module=MODULE)
        sizes = [batch * columns for columns in self.parts]
        blocks = [flat]
        if not reduced:
            builder.open_scope("aten::split_with_sizes")
            blocks = [builder.add_view(flat, (size,)) for size in sizes]
            scalars = [("split_sizes", tuple(sizes)), ("dim", 0)]
            self._ops["split"] = builder.add_op(
                "aten::split_with_sizes", [("self", flat)], blocks, scalars, module=MODULE
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
                builder.add_op("aten::view", [("self", block)], [results[-1]], scalars, module=MODULE)
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
            group, flat, self._received, send, receive, module=MODULE, forward=self._ops["wait"]
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
        self._event = builder.add_all_to_all(group, pooled, self._received, send, receive, module=MODULE)
        self._sent = pooled

    def _reduce_scatter(self, group: Communicator, pooled: Ref) -> tuple[int, Ref]:
        builder = self.builder
        builder.open_scope("ReduceScatterBase_Req", Phase.FORWARD)
        part = self.write_empty(pooled, pooled.shape[0] // len(group.ranks))
        arguments = [("output_tensor", part), ("input_tensor", pooled)]
        event = builder.add_collective(
            "_reduce_scatter_base_", "reduce_scatter", group, arguments, part, nbytes=pooled.spec.nbytes, module=MODULE
        )
        self._sent = pooled
        return event, part

    def _write_all_gather(self, group: Communicator, part: Ref) -> tuple[int, Ref]:
        builder = self.builder
        whole = self.write_empty(part, part.shape[0] * len(group.ranks))
        arguments = [("output_tensor", whole), ("input_tensor", part)]
        event = builder.add_collective(
            "_allgather_base_", "all_gather", group, arguments, whole, nbytes=whole.spec.nbytes, module=MODULE
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
            builder.add_op("aten::clone", [("self", grad)], [whole], scalars, module=MODULE, forward=op)
            line = builder.add_view(whole, (grad.shape[0] * grad.shape[1],))
            builder.add_op(
                "aten::_unsafe_view", [("self", whole)], [line], [("size", line.shape)], module=MODULE, forward=op
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
                builder.add_op("aten::zeros", [], [lines[-1]], zeros, module=MODULE, forward=split)
        joined = builder.add_tensor((batch * self.columns,))
        builder.add_op("aten::cat", [("tensors", lines)], [joined], [("dim", 0)], module=MODULE, forward=split)
        builder.free_tensors(*lines)
        return joined
