"""A step of HugeCTR's DLRM on several nodes, alike on all GPUs, with its own exchanges instead of NCCL's.

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
_ROWS_GROUP = (1 << 20) + 2  # numbers of the exchanges' own flags: rows do not wait for sums
_SUMS_GROUP = (1 << 20) + 3


class NodesStep(RowsStep):
    """One rank's step in the order it runs."""

    def program(self) -> Program:
        """Everything."""
        tape = self.tape
        self.begin(EMBEDDING, _SIDE)
        embedded = self._embed()
        bottom = self.bottom_forward()
        tape.wait(self.ready)
        self.top_forward(bottom, embedded)
        grad = self.interaction_backward()
        if self.early:
            self._one_after_the_other(grad)
        else:
            self._sum_frequent(grad)
            summed = tape.record(self.stream)
            self._send_gradients(grad)
            self.bottom_backward(self.bottom_part(grad))
            self._reduce(summed)
        self._update_frequent()
        self.update("sgd", after=self.stream)
        self.end(EMBEDDING, _SIDE)
        return tape.build()

    def _one_after_the_other(self, grad: Ref) -> None:
        """Gradients as MLPerf 1.0's code took them: dense ones, sums, exchanged rows."""
        tape = self.tape
        self.bottom_backward(self.bottom_part(grad))
        self._sum_frequent(grad)
        self._reduce(tape.record(self.stream))
        tape.wait(tape.record(0), self.stream)
        self._send_gradients(grad)

    def _embed(self) -> Ref:
        """Infrequent rows are fetched and sent; meanwhile the frequent ones are looked up."""
        tape = self.tape
        tape.scope("hugectr::HybridEmbedding", Phase.FORWARD)
        self.find_rows(len(tape.across.ranks))
        fetched = self._rows_of(self.weights)
        tape.wait(tape.record(self.stream), _SIDE)
        result = self.look_up(self.lookups - self.infrequent, 1.0 - self.rows.infrequent_share, _SIDE)
        received = self._exchange(fetched)
        place = tape.view(result, (self.infrequent, DIM))
        tape.op("aten::copy_", [("self", place), ("src", received)], [place], stream=self.stream)
        tape.wait(tape.record(_SIDE), self.stream)
        self.ready = tape.record(self.stream)
        return result

    def _sum_frequent(self, grad: Ref) -> None:
        """Gradients of this rank's frequent rows, added up in fp32, then in half precision for the all-reduce."""
        tape, shape = self.tape, (self.rows.frequent, DIM)
        tape.scope("hugectr::HybridEmbeddingBackward", Phase.BACKWARD)
        tape.wait(tape.record(0), self.stream)
        if not self.rows.frequent:
            return
        sums = tape.resident(shape, StorageKind.GRADIENT)
        tape.op("aten::zero_", [("self", sums)], [sums], stream=self.stream)
        self.add(sums, grad, self.lookups - self.infrequent)
        half = tape.resident(shape, StorageKind.GRADIENT, self.dtype)
        tape.op("aten::copy_", [("self", half), ("src", sums)], [half], stream=self.stream)

    def _send_gradients(self, grad: Ref) -> None:
        """Gradients of infrequent rows to their owners; SGD."""
        self.tape.scope("hugectr::HybridEmbeddingBackward", Phase.BACKWARD)
        received = self._exchange(self._rows_of(grad))
        self.add(self.weights, received, self.infrequent)

    def _reduce(self, summed: int) -> None:
        """Gradients of the dense part and of frequent rows over all ranks."""
        tape = self.tape
        tape.scope("hugectr::AllReduce", Phase.BACKWARD)
        tape.wait(summed)
        flat = tape.resident((self.count + self.rows.frequent * DIM,), StorageKind.GRADIENT, self.dtype)
        group, kind = Communicator(_SUMS_GROUP, tape.world.ranks), "one_shot_all_reduce"
        tape.wait(tape.collective(f"hugectr::{kind}", kind, group, [("tensor", flat)], flat, nbytes=flat.spec.nbytes))

    def _update_frequent(self) -> None:
        """SGD of every frequent row, on every rank."""
        tape, shape = self.tape, (self.rows.frequent, DIM)
        if not self.rows.frequent:
            return
        tape.scope("hugectr::HybridEmbeddingUpdate", Phase.OPTIMIZER)
        tape.wait(tape.record(0), self.stream)
        weights = [tape.resident(shape, StorageKind.PARAMETER)]
        grads = [tape.resident(shape, StorageKind.GRADIENT, self.dtype)]
        tape.op("aten::_fused_sgd", [("self", weights), ("grads", grads)], stream=self.stream)

    def _rows_of(self, source: Ref) -> Ref:
        """The infrequent rows of a table, or of gradients, in half precision."""
        tape = self.tape
        flat = tape.view(source, (source.spec.numel // DIM, DIM))
        result = tape.new((self.infrequent, DIM), self.dtype)
        arguments = [("self", flat), ("index", self.indices(self.infrequent))]
        tape.op("aten::index_select", arguments, [result], [("dim", 0)], stream=self.stream)
        return result

    def _exchange(self, rows: Ref) -> Ref:
        """Rows to whoever wants them: as many as come."""
        tape, kind = self.tape, "node_first_all_to_all"
        received = tape.new(rows.shape, self.dtype)
        group = Communicator(_ROWS_GROUP, tape.world.ranks)
        arguments = [("output", received), ("input", rows)]
        event = tape.collective(
            f"hugectr::{kind}", kind, group, arguments, received, nbytes=rows.spec.nbytes, stream=self.stream
        )
        tape.wait(event, self.stream)
        return received
