"""A step of HugeCTR's DLRM (MLPerf 0.7 to 2.1), alike on all GPUs."""

from __future__ import annotations

from traincast.embeddings import Pooling, Table, Zipf
from traincast.embeddings.load import Part, total_load
from traincast.programs.dlrm.config import CRITEO_ROWS
from traincast.programs.published.hugectr_dense import DIM, DenseStep
from traincast.programs.published.hugectr_hybrid import HybridRows, hybrid_rows
from traincast.programs.published.node_exchanges import NodeExchanges
from traincast.programs.published.nvidia_dlrm import SKEW
from traincast.programs.published.run import Run
from traincast.programs.rank_tape import RankTape
from traincast.programs.tape import Ref, Scalars
from traincast.workload.ops import Phase, StorageKind
from traincast.workload.program import Program

_EMBEDDING = 6  # stream, beside those of the communicators


def write_dlrm(run: Run, *, hybrid: bool, overlap: bool) -> tuple[list[Program], tuple[int, ...]]:
    """One program for all ranks; without `hybrid` every row is on one GPU only (MLPerf 0.7), without `overlap` the
    embeddings run before and after the dense part instead of beside it (before MLPerf 1.1)."""
    tables = [
        Table(name=f"t{i}", rows=rows, dim=DIM, pooling=Pooling.constant(1), access=Zipf(SKEW))
        for i, rows in enumerate(CRITEO_ROWS)
    ]
    rows = hybrid_rows(tables, run) if hybrid else HybridRows(0, 0, 1.0)
    programs: list[Program] = []
    several = run.gpus > run.gpus_per_node
    for rank in range(run.gpus if several else 1):  # between nodes every rank has partners of its own
        like = programs[0] if programs else None
        tape = RankTape(run.global_batch // run.gpus, rank, run.gpus, run.gpus_per_node, like)
        programs.append(_Step(tape, tables, rows, several_nodes=several, overlap=overlap).program())
    return programs, tuple(range(run.gpus)) if several else (0,) * run.gpus


class _Step(DenseStep):
    """One rank's step in the order it runs."""

    def __init__(
        self, tape: RankTape, tables: list[Table], rows: HybridRows, *, several_nodes: bool, overlap: bool
    ) -> None:
        super().__init__(tape, tape.builder.batch_size, cross=False)
        self.tables, self.rows, self.several_nodes = len(tables), rows, several_nodes
        self.stream = _EMBEDDING if overlap else 0
        self.exchanges = NodeExchanges(tape, several_nodes=several_nodes, stream=self.stream)
        self.grouped = NodeExchanges(tape, several_nodes=several_nodes, stream=0)
        load = total_load([Part(table, DIM) for table in tables], self.local)
        self.load: Scalars = [
            ("load", tuple(int(value) for value in load.round())), ("longest_bag", 1),
            ("total_rows", sum(table.rows for table in tables)),
        ]  # fmt: skip
        height = sum(table.rows for table in tables) // tape.world_size
        self.weights = tape.resident((height, DIM), StorageKind.PARAMETER)
        self.lookups = self.local * self.tables
        self.infrequent = round(rows.infrequent_share * self.lookups)

    def program(self) -> Program:
        """Everything."""
        tape = self.tape
        self.begin(_EMBEDDING)
        embedded = self._embed()
        bottom = self.bottom_forward()
        tape.wait(self.ready)
        self.top_forward(bottom, embedded)
        grad = self.interaction_backward()
        self._update_rows(grad)
        self.bottom_backward(tape.view(grad, (self.local, DIM), (grad.spec.numel // self.local, 1)))
        if self.several_nodes:
            tape.scope("hugectr::AllReduce", Phase.BACKWARD)
            self.grouped.all_reduce(self.count + self.rows.frequent * DIM)
            tape.scope("hugectr::HybridEmbeddingBackward")
            self._add(self.weights, grad, self.infrequent + self.rows.touched)
        else:
            self.reduce(0)
        self.update("sgd", after=self.stream)
        self.end(_EMBEDDING)
        return tape.build()

    def _embed(self) -> Ref:
        """Rows of this rank's samples: frequent ones from its own copies, which are brought up to date first."""
        tape = self.tape
        tape.scope("hugectr::HybridEmbedding", Phase.FORWARD)
        if not self.several_nodes:
            self.exchanges.all_to_all(self.rows.touched * DIM)
        result = tape.new((self.local, self.tables, DIM), self.dtype)
        arguments = [("weights", self.weights), ("indices", self._indices(self.lookups))]
        tape.op("traincast::batched_embedding_forward", arguments, [result], self.load, stream=self.stream)
        self.exchanges.all_to_all(self.infrequent * DIM)
        self.ready = tape.record(self.stream)
        return result

    def _update_rows(self, grad: Ref) -> None:
        """Gradients to the owners of infrequent rows; those of frequent ones are summed over ranks; SGD."""
        tape, rows = self.tape, self.rows
        tape.scope("hugectr::HybridEmbeddingBackward", Phase.BACKWARD)
        tape.wait(tape.record(0), self.stream)
        self.exchanges.all_to_all(self.infrequent * DIM)
        if rows.frequent:
            self._add(tape.resident((rows.touched, DIM), StorageKind.GRADIENT), grad, self.lookups - self.infrequent)
        if not self.several_nodes:
            self.exchanges.all_to_all(rows.touched * DIM)
            self._add(self.weights, grad, self.infrequent + rows.touched)

    def _indices(self, count: int) -> Ref:
        return self.tape.resident((count,), StorageKind.INPUT, "int32")

    def _add(self, target: Ref, grad: Ref, count: int) -> None:
        """So many rows of gradients added where they belong."""
        tape = self.tape
        arguments = [("self", target), ("index", self._indices(count)), ("source", tape.view(grad, (count, DIM)))]
        tape.op("aten::index_add_", arguments, [], [("dim", 0), ("alpha", 1)], stream=self.stream)
