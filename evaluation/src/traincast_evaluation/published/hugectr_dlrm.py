"""A step of HugeCTR's DLRM (MLPerf 0.7 to 2.1), alike on all GPUs; its hybrid embedding on several nodes is in
`hugectr_dlrm_nodes`."""

from __future__ import annotations

from traincast.ir.ops import Phase, StorageKind
from traincast.ir.program import Program
from traincast.models.dlrm.config import CRITEO_ROWS
from traincast.models.embeddings import Pooling, Table, Zipf
from traincast.models.layers.builder import RankBuilder, Ref
from traincast_evaluation.published.hugectr_dense import DIM
from traincast_evaluation.published.hugectr_dlrm_nodes import NodesStep
from traincast_evaluation.published.hugectr_hybrid import HybridRows, count_hybrid_rows
from traincast_evaluation.published.hugectr_rows import EMBEDDING, RowsStep
from traincast_evaluation.published.nvidia_dlrm import SKEW
from traincast_evaluation.published.run import Run


def write_dlrm(run: Run, *, hybrid: bool, overlap: bool, early: bool) -> tuple[list[Program], tuple[int, ...]]:
    """One program for all ranks; without `hybrid` every row is on one GPU only, without `overlap` the embeddings run
    before and after the dense part instead of alongside it (both MLPerf 0.7); `early` as of MLPerf 1.0."""
    tables = [
        Table(name=f"t{i}", rows=rows, dim=DIM, pooling=Pooling.from_constant(1), access=Zipf(SKEW))
        for i, rows in enumerate(CRITEO_ROWS)
    ]
    rows = count_hybrid_rows(tables, run, by_default=early) if hybrid else HybridRows(0, 0, 1.0)
    builder = RankBuilder(run.global_batch // run.gpus, 0, run.gpus, run.gpus_per_node)
    step = NodesStep if hybrid and run.gpus > run.gpus_per_node else _Step
    return [step(builder, tables, rows, overlap=overlap, early=early).program()], (0,) * run.gpus


class _Step(RowsStep):
    """One rank's step in the order it runs."""

    def program(self) -> Program:
        """Everything."""
        builder = self.builder
        self.begin(EMBEDDING)
        embedded = self._embed()
        bottom = self.bottom_forward()
        builder.wait_for_event(self.ready)
        self.top_forward(bottom, embedded)
        grad = self.interaction_backward()
        self._update_rows(grad)
        self.bottom_backward(self.bottom_part(grad))
        self.reduce(0)
        self.update("sgd", after=self.stream)
        self.end(EMBEDDING)
        return builder.build_program()

    def _embed(self) -> Ref:
        """Rows of this rank's samples: frequent ones from its own copies, which are brought up to date first."""
        self.builder.open_scope("hugectr::HybridEmbedding", Phase.FORWARD)
        self.find_rows(1)
        self._all_to_all(self.rows.touched * DIM)
        result = self.look_up(self.lookups, 1.0, self.stream)
        self._all_to_all(self.infrequent * DIM)
        self.ready = self.builder.record_event(self.stream)
        return result

    def _update_rows(self, grad: Ref) -> None:
        """Gradients to the owners of infrequent rows; those of frequent ones are summed over ranks; SGD."""
        builder, rows = self.builder, self.rows
        builder.open_scope("hugectr::HybridEmbeddingBackward", Phase.BACKWARD)
        builder.wait_for_event(builder.record_event(0), self.stream)
        self._all_to_all(self.infrequent * DIM)
        if rows.frequent:
            self.add(
                builder.add_resident_tensor((rows.touched, DIM), StorageKind.GRADIENT),
                grad,
                self.lookups - self.infrequent,
            )
        self._all_to_all(rows.touched * DIM)
        self.add(self.weights, grad, self.infrequent + rows.touched)

    def _all_to_all(self, numel: int) -> None:
        """This many numbers of every rank, shared out evenly between all."""
        builder, ranks = self.builder, self.builder.world_size
        each = numel // ranks
        if ranks == 1 or not each:
            return
        splits = [each] * ranks
        sent, received = (builder.add_tensor((sum(splits),), self.dtype) for _ in range(2))
        builder.wait_for_event(
            builder.add_all_to_all(builder.world, sent, received, splits, splits, stream=self.stream), self.stream
        )
