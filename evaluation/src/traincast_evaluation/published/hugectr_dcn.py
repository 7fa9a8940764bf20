"""A step of HugeCTR's DCNv2 (MLPerf 3.0 on): an embedding collection placed by the published planner, with Adagrad.

On one node a table is on one GPU, or its rows on a few, and one all-to-all brings what they pooled to the samples'
GPUs. On several nodes a table is a node's, its rows on all GPUs there: sums are reduced inside of the node, then
exchanged between the GPUs of equal places. Small tables are on every GPU; their gradients go with the all-reduce.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from traincast.ir.ops import Phase, StorageKind
from traincast.ir.program import Program
from traincast.models.dlrm.config import DLRM_V2
from traincast.models.embeddings import Pooling, Table, Zipf
from traincast.models.embeddings.table import Part, total_load
from traincast.models.layers.builder import Communicator, RankBuilder, Ref, Scalars
from traincast_evaluation.published.hugectr_dense import DIM, DenseStep
from traincast_evaluation.published.hugectr_plan import compute_capacity_bytes, count_adagrad_bytes, plan_tables
from traincast_evaluation.published.nvidia_dlrm import SKEW
from traincast_evaluation.published.run import Run

_EMBEDDING, _KEYS = 6, 7  # streams, alongside those of the communicators
_KEYS_GROUP = (1 << 20) + 1  # number of a communicator of its own
# as configured: what sending a table costs alongside a lookup, and the bytes below which every GPU has a table, on one
# node and on several (MEM_COMM_BW_RATIO over MEM_COMM_WORK_RATIO, DP_SHARDING_THRESHOLD)
_ONE_NODE, _NODES = (7 / 4, 8e6), (67 / 4, 12.5e6)
_KEY_BYTES = 4


@dataclass(frozen=True, slots=True)
class _Rows:
    """`share` of the rows of a table, which a sample wants `hotness` of altogether."""

    table: Table
    hotness: int
    share: float = 1.0

    @property
    def part(self) -> Part:
        """As a load: MLPerf's data give every index a bag of its own, made once, so that a table with 100 lookups is
        wanted like 100 tables with one each."""
        return Part(self.table, DIM, self.share * self.hotness)

    @property
    def height(self) -> float:
        """Rows."""
        return self.share * self.table.rows

    def lookups(self, samples: int) -> float:
        """Lookups of this many samples."""
        return self.share * self.hotness * samples


@dataclass(frozen=True, slots=True)
class _Held:
    """What a rank has: parts of tables for the samples of all ranks, and whole `copied` ones for its own."""

    parts: tuple[_Rows, ...]
    copied: tuple[_Rows, ...]

    @property
    def columns(self) -> int:
        """Pooled columns that its parts give."""
        return DIM * len(self.parts)


def write_dcn(run: Run) -> tuple[list[Program], tuple[int, ...]]:
    """A program for every rank that differs, and which rank runs which."""
    held = _place_tables(run)
    keys: dict[tuple[object, ...], int] = {}
    several = run.gpus > run.gpus_per_node
    ranks = tuple(
        # between nodes every rank has partners of its own
        keys.setdefault((rank if several else 0, parts), len(keys))
        for rank, parts in enumerate(held)
    )
    programs: list[Program] = []
    for number in range(len(keys)):
        rank, like = ranks.index(number), programs[0] if programs else None
        builder = RankBuilder(run.global_batch // run.gpus, rank, run.gpus, run.gpus_per_node, like)
        programs.append(_Step(builder, held, run).program())
    return programs, ranks


def _place_tables(run: Run) -> list[_Held]:
    tables = [
        Table(
            name=f"t{i}", rows=rows, dim=DIM, pooling=Pooling.from_constant(1), access=Zipf(SKEW), optimizer="adagrad"
        )
        for i, rows in enumerate(DLRM_V2.rows_per_table)
    ]
    hotness = DLRM_V2.lookups_per_table
    nodes = -(-run.gpus // run.gpus_per_node)
    buckets = run.gpus if nodes == 1 else nodes
    table_cost, copied_below = _ONE_NODE if nodes == 1 else _NODES
    plan = plan_tables(
        hotness, count_adagrad_bytes(DLRM_V2.rows_per_table, DIM), buckets, table_cost=table_cost,
        copied_below=copied_below if run.gpus > 1 else 0.0, capacity=compute_capacity_bytes(run.gpus // buckets),
    )  # fmt: skip
    mates = run.gpus // buckets
    copied = tuple(_Rows(tables[t], hotness[t]) for t in plan.copied)
    return [
        _Held(
            tuple(_Rows(tables[t], hotness[t], 1.0 / (mates * plan.splits[t])) for t in plan.buckets[rank // mates]),
            copied,
        )
        for rank in range(run.gpus)
    ]


def _load(parts: Sequence[_Rows], samples: int) -> Scalars:
    load = tuple(int(value) for value in total_load([rows.part for rows in parts], samples).round())
    longest = max(rows.share * rows.hotness for rows in parts)
    return [("load", load), ("longest_bag", ceil(longest)), ("total_rows", _count_rows_of_shard(parts))]


def _count_rows_of_shard(parts: Sequence[_Rows]) -> int:
    return max(1, round(sum(rows.height for rows in parts)))


class _Step(DenseStep):
    """One rank's step in the order it runs."""

    def __init__(self, builder: RankBuilder, held: list[_Held], run: Run) -> None:
        super().__init__(builder, builder.batch_size, cross=True)
        self.whole, self.several = run.global_batch, run.gpus > run.gpus_per_node
        self.held = held[builder.rank]
        # columns of the results that come from each rank that this one collectives with
        group = builder.across if self.several else builder.world
        self.group, self.columns = group, [held[rank].columns for rank in group.ranks]
        self.copied_rows = _count_rows_of_shard(self.held.copied) if self.held.copied else 0

    def program(self) -> Program:
        """Everything."""
        builder = self.builder
        self.begin(_EMBEDDING, _KEYS)
        self._prepare_keys()
        embedded = self._embed()
        bottom = self.bottom_forward()
        builder.wait_for_event(self.ready)
        self.top_forward(bottom, embedded)
        grad = self.interaction_backward()
        self._update_rows(grad)
        self.bottom_backward(builder.add_view(grad, (self.local, DIM), (grad.spec.numel // self.local, 1)))
        self.reduce(self.copied_rows * DIM, sent=self.sent if self.several else -1)
        self.update("adagrad", after=_EMBEDDING)
        self.end(_EMBEDDING, _KEYS)
        return builder.build_program()

    def _rail_shape(self) -> tuple[int, int]:
        """Of the sums that one GPU of a node has for those of its place in all nodes."""
        return self.whole // len(self.builder.within.ranks), self.held.columns

    def _prepare_keys(self) -> None:
        """Keys of the next batch to the ranks that look them up, and sorted there for the update."""
        builder = self.builder
        builder.open_scope("hugectr::DataDistributor", Phase.INPUT)
        keys = self._keys(self.held.parts, self.whole)
        if builder.world_size > 1:
            each = self.local * DLRM_V2.lookups // builder.world_size
            sent, received = (builder.add_tensor((each * builder.world_size,), "int32") for _ in range(2))
            group, splits = Communicator(_KEYS_GROUP, builder.world.ranks), [each] * builder.world_size
            builder.wait_for_event(builder.add_all_to_all(group, sent, received, splits, splits, stream=_KEYS), _KEYS)
        if self.held.parts:
            scalars = [("bits", 32)]
            builder.add_op("hugectr::index_calculation", [("keys", keys)], [], scalars, stream=_KEYS)

    def _look_up(self, parts: Sequence[_Rows], samples: int) -> Ref:
        """Pooled rows of the parts, in half precision: [samples, columns]."""
        builder, columns = self.builder, DIM * len(parts)
        result = builder.add_tensor((samples, len(parts), DIM), self.dtype)
        arguments = [("weights", self._weights(parts)), ("indices", self._keys(parts, samples))]
        builder.add_op(
            "traincast::batched_embedding_forward", arguments, [result], _load(parts, samples), stream=_EMBEDDING
        )
        return builder.add_view(result, (samples, columns))

    def _weights(self, parts: Sequence[_Rows]) -> Ref:
        return self.builder.add_resident_tensor((_count_rows_of_shard(parts), DIM), StorageKind.PARAMETER)

    def _keys(self, parts: Sequence[_Rows], samples: int) -> Ref:
        lookups = round(sum(rows.lookups(samples) for rows in parts))
        return self.builder.add_resident_tensor((lookups,), StorageKind.INPUT, "int32")

    def _embed(self) -> Ref:
        """Everything that this rank's samples pool: [samples, tables, dim]."""
        builder = self.builder
        builder.open_scope("hugectr::EmbeddingCollection", Phase.FORWARD)
        if self.held.parts:
            pooled = self._look_up(self.held.parts, self.whole)
            if self.several:
                pooled = self._within("_reduce_scatter_base_", "reduce_scatter", pooled, self._rail_shape())
        else:
            pooled = builder.add_tensor((0, 0), self.dtype)
        received = [self._exchange(pooled, forward=True) if builder.world_size > 1 else pooled]
        if self.held.copied:
            received.append(self._look_up(self.held.copied, self.local))
        embedded = builder.add_tensor((self.local, DLRM_V2.num_tables, DIM), self.dtype)
        builder.add_op("aten::cat", [("tensors", received)], [embedded], [("dim", 1)], stream=_EMBEDDING)
        self.ready = builder.record_event(_EMBEDDING)
        return embedded

    def _exchange(self, source: Ref, *, forward: bool) -> Ref:
        """What this rank pooled to the samples' ranks, or gradients of it back."""
        builder, ranks = self.builder, len(self.group.ranks)
        pooled, samples = [self.local * self.held.columns] * ranks, [self.local * columns for columns in self.columns]
        send, receive = (pooled, samples) if forward else (samples, pooled)
        received = builder.add_tensor((sum(receive),), self.dtype)
        flat = builder.add_view(source, (sum(send),))
        builder.wait_for_event(
            builder.add_all_to_all(self.group, flat, received, send, receive, stream=_EMBEDDING), _EMBEDDING
        )
        rows = self.local if forward else self.local * ranks
        return builder.add_view(received, (rows, sum(receive) // rows))

    def _within(self, name: str, kind: str, source: Ref, shape: tuple[int, int]) -> Ref:
        """A collective between the GPUs of a node that gives a tensor of this shape."""
        builder = self.builder
        result = builder.add_tensor(shape, self.dtype)
        largest = max(source.spec.nbytes, result.spec.nbytes)
        arguments = [("output", result), ("input", source)]
        event = builder.add_collective(name, kind, builder.within, arguments, result, nbytes=largest, stream=_EMBEDDING)
        builder.wait_for_event(event, _EMBEDDING)
        return result

    def _update_rows(self, grad: Ref) -> None:
        """Gradients repeated for every part, sent to the tables, summed by row and applied."""
        builder = self.builder
        builder.open_scope("hugectr::EmbeddingCollectionBackward", Phase.BACKWARD)
        builder.wait_for_event(builder.record_event(0), _EMBEDDING)
        if self.held.copied:
            lookups = self._keys(self.held.copied, self.local)
            sums = builder.add_resident_tensor((self.copied_rows, DIM), StorageKind.GRADIENT)
            values = builder.add_view(grad, (lookups.shape[0], DIM), (0, 1))
            arguments = [("self", sums), ("index", lookups), ("source", values)]
            builder.add_op("aten::index_add_", arguments, [], [("dim", 0), ("alpha", 1)], stream=_EMBEDDING)
        if builder.world_size > 1:
            wanted = builder.add_tensor((self.local, sum(self.columns)), self.dtype)
            strided = builder.add_view(grad, (self.local, sum(self.columns)), (grad.spec.numel // self.local, 1))
            copy: Scalars = [("memory_format", "contiguous_format")]
            builder.add_op("aten::clone", [("self", strided)], [wanted], copy, stream=_EMBEDDING)
            grad = self._exchange(wanted, forward=False)
            self.sent = builder.record_event(_EMBEDDING)
        if not self.held.parts:
            return
        if self.several:
            grad = self._within("_allgather_base_", "all_gather", grad, (self.whole, self.held.columns))
        grad = builder.add_view(grad, (self.whole, self.held.columns))
        arguments = [("grad_output", grad), ("weights", self._weights(self.held.parts)),
                     ("indices", self._keys(self.held.parts, self.whole))]  # fmt: skip
        builder.add_op("hugectr::update_adagrad", arguments, [], _load(self.held.parts, self.whole), stream=_EMBEDDING)
