"""The program of one rank of every pipeline stage: micro-batches and their tensors, collectives, the update."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from traincast.ir.compiled import mark_graphs
from traincast.ir.program import Columns, Program
from traincast.ir.workload import Workload
from traincast.models.transformers.description import Transformer
from traincast.simulator.parallelism.groups import Groups
from traincast.simulator.parallelism.layout import Layout
from traincast.simulator.parallelism.parts import Part, make_parts, mark_repeated_ops
from traincast.simulator.parallelism.snippets import (
    BACKWARD,
    FORWARD,
    Snippets,
    Turn,
    order_1f1b,
    order_interleaved,
    order_zero_bubble,
)
from traincast.simulator.parallelism.splicing import ProgramWriter, Tables, Unit, make_programs, mark_ops_between
from traincast.simulator.parallelism.step import Stage
from traincast.utils.arrays import BoolArray

_BUCKET_ELEMENTS = 40e6  # of gradients that are reduced together: Megatron's default
_BUCKET_PER_RANK = 1e6  # at least, of each data-parallel rank: a ring over many ranks would only wait for latencies
_EVENTS_IN_FLIGHT = 3


class StageProgram:
    """Writes the program of one rank of a stage."""

    def __init__(
        self, layout: Layout, snippets: Snippets, tables: Tables, chunks: Sequence[Sequence[Part]], stage: int
    ) -> None:
        self.layout, self.chunks, self.stage = layout, chunks, stage
        self.writer, self.snippets = ProgramWriter(tables), snippets
        self._written: dict[int, Unit] = {}
        self._units: dict[tuple[int, int, int], Unit] = {}
        self._gathered: set[tuple[int, int]] = set()
        self._waiting: list[tuple[int, float, float]] = []  # gradients of (event) that wait for a full bucket
        asked = layout.bucket_mb * (1 << 20) / layout.reduce_bytes
        self._bucket = asked or max(_BUCKET_ELEMENTS, _BUCKET_PER_RANK * layout.dp * layout.cp)
        self._parameter_events: dict[tuple[int, int], int] = {}
        self._reduces = False

    def write(self, turns: Sequence[Turn]) -> Columns:
        """The columns of the program under this order of micro-batches."""
        layout = self.layout
        if layout.sharding in ("zero1", "zero2") and layout.overlap_parameters:
            self._gather_parameters()
        last = {turn.chunk: turn.micro_batch for turn in turns if turn.kind == BACKWARD}
        for turn in turns:
            if turn.kind == FORWARD:
                self._forward(turn, first=turn.micro_batch == 0)
            elif turn.kind == BACKWARD:
                self._backward(turn, last=turn.micro_batch == last[turn.chunk])
            else:
                for number, part in reversed(list(enumerate(self.chunks[turn.chunk]))):
                    if not part.frozen:
                        self._write_late(turn, number, part)
        self._finish()
        return self.writer.columns()

    def _forward(self, turn: Turn, *, first: bool) -> None:
        parts = self.chunks[turn.chunk]
        self._emit(self.snippets.receive(FORWARD, turn.chunk))
        for number, part in enumerate(parts):
            if self.layout.sharding == "zero3":
                self._prefetch(turn.chunk, number, number + 1 if number + 1 < len(parts) else -1, FORWARD)
            elif first and (turn.chunk, number) in self._parameter_events:
                self._emit(self.snippets.wait(self._parameter_events[turn.chunk, number], FORWARD))
            unit = self._unit(turn, number, part)
            self._write(unit, mark_ops_between(part.piece.program, 0, part.piece.backward), part)
        if self.layout.sharding == "zero3" and self.layout.reshard:
            self._gathered.clear()
        self._emit(self.snippets.send(FORWARD, turn.chunk))

    def _backward(self, turn: Turn, *, last: bool) -> None:
        parts = self.chunks[turn.chunk]
        self._emit(self.snippets.receive(BACKWARD, turn.chunk))
        for number in range(len(parts) - 1, -1, -1):
            part = parts[number]
            if part.frozen:
                break
            if self.layout.sharding == "zero3":
                below = number - 1 if number and not parts[number - 1].frozen else -1
                self._prefetch(turn.chunk, number, below, BACKWARD)
            unit = self._unit(turn, number, part)
            if part.again:
                self._write(unit, mark_repeated_ops(part.piece, self.layout), part)
            end = part.piece.late if self.layout.schedule == "zero-bubble" else part.piece.program.num_ops
            self._write(unit, mark_ops_between(part.piece.program, part.piece.backward, end), part)
            if self.layout.schedule != "zero-bubble":
                self._reduce(part, turn.chunk, number, last=last)
        if not self.layout.gathers_once:
            self._gathered.clear()
        self._emit(self.snippets.send(BACKWARD, turn.chunk))

    def _write_late(self, turn: Turn, number: int, part: Part) -> None:
        unit = self._unit(turn, number, part)
        self._write(unit, mark_ops_between(part.piece.program, part.piece.late, part.piece.program.num_ops), part)

    def _unit(self, turn: Turn, number: int, part: Part) -> Unit:
        key = (turn.chunk, number, turn.micro_batch)
        if key not in self._units:
            self._units[key] = self.writer.unit(part.piece.program, f"{turn.chunk} {number}")
        return self._units[key]

    def _write(self, unit: Unit, ops: BoolArray, part: Part) -> None:
        self.writer.write(unit, ops, part.module)

    def _emit(self, program: Program | None) -> None:
        """A whole short program; its tensors are shared by all its copies."""
        if program is not None:
            if id(program) not in self._written:
                self._written[id(program)] = self.writer.unit(program, f"snippet {id(program)}")
            self.writer.write(self._written[id(program)], np.ones(program.num_ops, dtype=np.bool_), "")

    def _prefetch(self, chunk: int, number: int, following: int, phase: str) -> None:
        """Fully sharded parameters: those of this layer are there, those of the next one on their way."""
        for wanted in (number, following):
            if wanted >= 0 and (chunk, wanted) not in self._gathered:
                part = self.chunks[chunk][wanted]
                self._emit(self.snippets.gather(part.dense, part.sparse, self._event(chunk, wanted), phase))
                self._gathered.add((chunk, wanted))
        self._emit(self.snippets.wait(self._event(chunk, number), phase))

    def _event(self, chunk: int, number: int) -> int:
        """The event of a layer's parameters. Where they are gathered anew in every pass, two layers' are on their way
        at most: events are used again, so that equal layers have equal programs."""
        place = sum(len(parts) for parts in self.chunks[:chunk]) + number
        return place % _EVENTS_IN_FLIGHT if self.layout.sharding == "zero3" and self.layout.reshard else place

    def _reduce(self, part: Part, chunk: int, number: int, *, last: bool) -> None:
        """Gradients of a layer between copies of the model: at once where parameters are sharded too, else with those
        of its bucket after the last micro-batch."""
        if self.layout.sharding == "zero3":
            if last or not self.layout.gathers_once:
                self._emit_reduction(part.trained_dense, part.trained_sparse)
        elif last:
            self._waiting.append((self._event(chunk, number), part.trained_dense, part.trained_sparse))
            if self.layout.overlap_gradients and self._waiting_elements() >= self._bucket:
                self._reduce_bucket()

    def _waiting_elements(self) -> float:
        return sum(dense + sparse for _, dense, sparse in self._waiting)

    def _reduce_bucket(self) -> None:
        dense, sparse = (sum(bucket[i] for bucket in self._waiting) for i in (1, 2))
        self._emit_reduction(dense, sparse)
        self._waiting.clear()

    def _emit_reduction(self, dense: float, sparse: float) -> None:
        program = self.snippets.reduce(dense, sparse)
        self._reduces |= program is not None
        self._emit(program)

    def _gather_parameters(self) -> None:
        """Parameters that a distributed optimizer updated elsewhere: gathered bucket by bucket while the first
        micro-batch runs."""
        event, dense, sparse = self.snippets.first_bucket, 0.0, 0.0
        keys: list[tuple[int, int]] = []
        every = [(chunk, number, part) for chunk, parts in enumerate(self.chunks) for number, part in enumerate(parts)]
        for index, (chunk, number, part) in enumerate(every):
            dense, sparse = dense + part.trained_dense, sparse + part.trained_sparse
            keys.append((chunk, number))
            if dense + sparse >= self._bucket or index + 1 == len(every):
                self._emit(self.snippets.gather_updated(dense, sparse, event))
                self._parameter_events[keys[0]] = event
                event, dense, sparse, keys = event + 1, 0.0, 0.0, []

    def _finish(self) -> None:
        """What is left of gradients, then the update, then parameters that nothing hides."""
        layout = self.layout
        every = [part for parts in self.chunks for part in parts]
        dense, sparse = (
            sum(values) for values in zip(*((p.trained_dense, p.trained_sparse) for p in every), strict=True)
        )
        if layout.schedule == "zero-bubble":
            self._waiting = [(0, dense, sparse)]
        if self._waiting:
            self._reduce_bucket()
        if self._reduces:
            self._emit(self.snippets.wait_for_reduced())
        self._emit(self.snippets.update(dense, sparse))
        if layout.sharding in ("zero1", "zero2") and not layout.overlap_parameters:
            self._emit(self.snippets.gather_updated(dense, sparse, self.snippets.first_bucket, waits=True))


def build_parallel_workload(
    model: Transformer, layout: Layout, stages: Sequence[Stage], *, gpus_per_node: int, micro_batches: int
) -> Workload:
    """One step of a Transformer under a layout with this many micro-batches per pipeline: one program per stage, which
    every rank of the stage runs. `stages` are the weights of each and, for zero-bubble schedules, its times."""
    groups = Groups(layout)
    parts = make_parts(model, layout, groups.in_layers(model, gpus_per_node))
    orders = order_turns(layout, stages, micro_batches)
    tables, columns, written = Tables(), [], dict[object, Program | None]()
    for stage in range(layout.pp):
        chunks = [parts[chunk * layout.pp + stage] for chunk in range(layout.vp)]
        snippets = Snippets(layout, groups, model.hidden, stage, written)
        columns.append(StageProgram(layout, snippets, tables, chunks, stage).write(orders[stage]))
    programs = make_programs(tables, columns, batch_size=layout.micro_batch, seq_len=layout.seq_len)
    if layout.kernels == "graph":
        programs = tuple(mark_graphs(each, np.ones(each.num_scopes, dtype=np.bool_)) for each in programs)
    per_stage = layout.gpus // layout.pp
    return Workload(
        name=model.name,
        programs=programs,
        ranks=tuple(np.repeat(np.arange(layout.pp), per_stage).tolist()),
        synchronised=True,  # the host reads the loss and the norm of gradients of every step
        meta={"optimizer": layout.optimizer, **({"compiled": "yes"} if layout.kernels == "compiled" else {})},
    )


def order_turns(layout: Layout, stages: Sequence[Stage], micro_batches: int) -> list[list[Turn]]:
    """In which order every stage takes up its micro-batches."""
    if layout.schedule == "zero-bubble":
        weights = [stage.weight_part for stage in stages]
        forward = [sum(unit.forward.device for unit in stage.units) for stage in stages]
        backward = [sum(unit.backward.device for unit in stage.units) for stage in stages]
        inputs = [max(0.0, b - w) for b, w in zip(backward, weights, strict=True)]
        return order_zero_bubble(forward, inputs, weights, micro_batches)
    if layout.vp > 1:
        return [order_interleaved(stage, layout.pp, layout.vp, micro_batches) for stage in range(layout.pp)]
    return [order_1f1b(stage, layout.pp, micro_batches) for stage in range(layout.pp)]
