"""A step of HugeCTR's DLRM on several nodes, alike on all GPUs, with its own collectives instead of NCCL's.

Infrequent rows: a kernel writes what node mates must send into their buffers, then every GPU writes to those of its
place in other nodes. Gradients of frequent rows, which every GPU has, are summed with those of the dense part in one
all-reduce (`one_shot_all_reduce`).
"""

from __future__ import annotations

from traincast.ir.ops import Phase, StorageKind
from traincast.ir.program import Program
from traincast.models.layers.builder import Communicator, Ref
from traincast_evaluation.published.hugectr_dense import DIM
from traincast_evaluation.published.hugectr_rows import EMBEDDING, RowsStep

_SIDE = 7  # stream of lookups of frequent rows, while others are on their way
_ROWS_GROUP = (1 << 20) + 2  # numbers of the collectives' own flags: rows do not wait for sums
_SUMS_GROUP = (1 << 20) + 3


class NodesStep(RowsStep):
    """One rank's step in the order it runs."""

    def program(self) -> Program:
        """Everything."""
        builder = self.builder
        self.begin(EMBEDDING, _SIDE)
        embedded = self._embed()
        bottom = self.bottom_forward()
        builder.wait_for_event(self.ready)
        self.top_forward(bottom, embedded)
        grad = self.interaction_backward()
        if self.early:
            self._one_after_the_other(grad)
        else:
            self._sum_frequent(grad)
            summed = builder.record_event(self.stream)
            self._send_gradients(grad)
            self.bottom_backward(self.bottom_part(grad))
            self._reduce(summed)
        self._update_frequent()
        self.update("sgd", after=self.stream)
        self.end(EMBEDDING, _SIDE)
        return builder.build_program()

    def _one_after_the_other(self, grad: Ref) -> None:
        """Gradients as MLPerf 1.0's code took them: dense ones, sums, exchanged rows."""
        builder = self.builder
        self.bottom_backward(self.bottom_part(grad))
        self._sum_frequent(grad)
        self._reduce(builder.record_event(self.stream))
        builder.wait_for_event(builder.record_event(0), self.stream)
        self._send_gradients(grad)

    def _embed(self) -> Ref:
        """Infrequent rows are fetched and sent; meanwhile the frequent ones are looked up."""
        builder = self.builder
        builder.open_scope("hugectr::HybridEmbedding", Phase.FORWARD)
        self.find_rows(len(builder.across.ranks))
        fetched = self._rows_of(self.weights)
        builder.wait_for_event(builder.record_event(self.stream), _SIDE)
        result = self.look_up(self.lookups - self.infrequent, 1.0 - self.rows.infrequent_share, _SIDE)
        received = self._exchange(fetched)
        place = builder.add_view(result, (self.infrequent, DIM))
        builder.add_op("aten::copy_", [("self", place), ("src", received)], [place], stream=self.stream)
        builder.wait_for_event(builder.record_event(_SIDE), self.stream)
        self.ready = builder.record_event(self.stream)
        return result

    def _sum_frequent(self, grad: Ref) -> None:
        """Gradients of this rank's frequent rows, added up in fp32, then in half precision for the all-reduce."""
        builder, shape = self.builder, (self.rows.frequent, DIM)
        builder.open_scope("hugectr::HybridEmbeddingBackward", Phase.BACKWARD)
        builder.wait_for_event(builder.record_event(0), self.stream)
        if not self.rows.frequent:
            return
        sums = builder.add_resident_tensor(shape, StorageKind.GRADIENT)
        builder.add_op("aten::zero_", [("self", sums)], [sums], stream=self.stream)
        self.add(sums, grad, self.lookups - self.infrequent)
        half = builder.add_resident_tensor(shape, StorageKind.GRADIENT, self.dtype)
        builder.add_op("aten::copy_", [("self", half), ("src", sums)], [half], stream=self.stream)

    def _send_gradients(self, grad: Ref) -> None:
        """Gradients of infrequent rows to their owners; SGD."""
        self.builder.open_scope("hugectr::HybridEmbeddingBackward", Phase.BACKWARD)
        received = self._exchange(self._rows_of(grad))
        self.add(self.weights, received, self.infrequent)

    def _reduce(self, summed: int) -> None:
        """Gradients of the dense part and of frequent rows over all ranks."""
        builder = self.builder
        builder.open_scope("hugectr::AllReduce", Phase.BACKWARD)
        builder.wait_for_event(summed)
        flat = builder.add_resident_tensor((self.count + self.rows.frequent * DIM,), StorageKind.GRADIENT, self.dtype)
        group, kind = Communicator(_SUMS_GROUP, builder.world.ranks), "one_shot_all_reduce"
        builder.wait_for_event(
            builder.add_collective(f"hugectr::{kind}", kind, group, [("tensor", flat)], flat, nbytes=flat.spec.nbytes)
        )

    def _update_frequent(self) -> None:
        """SGD of every frequent row, on every rank."""
        builder, shape = self.builder, (self.rows.frequent, DIM)
        if not self.rows.frequent:
            return
        builder.open_scope("hugectr::HybridEmbeddingUpdate", Phase.OPTIMIZER)
        builder.wait_for_event(builder.record_event(0), self.stream)
        weights = [builder.add_resident_tensor(shape, StorageKind.PARAMETER)]
        grads = [builder.add_resident_tensor(shape, StorageKind.GRADIENT, self.dtype)]
        builder.add_op("aten::_fused_sgd", [("self", weights), ("grads", grads)], stream=self.stream)

    def _rows_of(self, source: Ref) -> Ref:
        """The infrequent rows of a table, or of gradients, in half precision."""
        builder = self.builder
        flat = builder.add_view(source, (source.spec.numel // DIM, DIM))
        result = builder.add_tensor((self.infrequent, DIM), self.dtype)
        arguments = [("self", flat), ("index", self.indices(self.infrequent))]
        builder.add_op("aten::index_select", arguments, [result], [("dim", 0)], stream=self.stream)
        return result

    def _exchange(self, rows: Ref) -> Ref:
        """Rows to whoever wants them: as many as come."""
        builder, kind = self.builder, "node_first_all_to_all"
        received = builder.add_tensor(rows.shape, self.dtype)
        group = Communicator(_ROWS_GROUP, builder.world.ranks)
        arguments = [("output", received), ("input", rows)]
        event = builder.add_collective(
            f"hugectr::{kind}", kind, group, arguments, received, nbytes=rows.spec.nbytes, stream=self.stream
        )
        builder.wait_for_event(event, self.stream)
        return received
