"""Device memory of one rank of a pipeline stage: states, what micro-batches keep, buffers of collectives, in the order
of the schedule."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np

from traincast.ir.memory import CATEGORIES, TEMPORARY, EventWriter, MemoryEvents
from traincast.models.transformers.description import Transformer
from traincast.simulator.memory.savings import MOMENT_BYTES
from traincast.simulator.parallelism.groups import Groups
from traincast.simulator.parallelism.layout import PYTORCH, Layout
from traincast.simulator.parallelism.parts import (
    BlockTensors,
    Part,
    find_block_tensors,
    make_parts,
    mark_recomputed_ops,
)
from traincast.simulator.parallelism.program import order_turns
from traincast.simulator.parallelism.snippets import BACKWARD, FORWARD, Turn
from traincast.simulator.parallelism.step import Stage
from traincast.utils.arrays import BoolArray, IntArray

_NF4_BYTES = 0.5 + (1.0 + 4.0 / 256) / 64
"""Of a weight in NF4 with double quantisation: 8-bit scales of 64 weights, fp32 ones of 256 scales (QLoRA)."""


@dataclass(frozen=True, slots=True)
class StateBytes:
    """Bytes of a part on one rank. `bucketed` are gradients that other ranks have too and reduce with this one,
    `gathered` its parameters where they are sharded and made whole for a pass, `raw` its gradients before they are
    reduced, `sent` as they are reduced."""

    parameters: float
    gradients: float
    optimizer: float
    bucketed: float = 0.0
    gathered: float = 0.0
    raw: float = 0.0
    sent: float = 0.0


def count_state_bytes(
    layout: Layout, dense: float, sparse: float, trained_dense: float, trained_sparse: float, *, looked_up: bool = False
) -> StateBytes:
    """The states of a part with this many elements on a rank before sharding: `dense` ones that all tokens meet,
    `sparse` ones of experts, and those of them that are trained. `looked_up`: they are a table, which is never
    quantised."""
    inner = max(1, layout.gpus // layout.pp // (layout.ep * layout.etp))
    sharding, exact = layout.sharding, layout.wide

    def share(first: float, second: float, *, shared: bool) -> float:
        return first / layout.sharing + second / inner if shared else first + second

    weights = share(dense, sparse, shared=sharding == "zero3")
    trained = share(trained_dense, trained_sparse, shared=sharding == "zero3")
    gradients = share(trained_dense, trained_sparse, shared=sharding in ("zero2", "zero3") and not layout.gathers_once)
    updated = share(trained_dense, trained_sparse, shared=sharding != "none")
    parameter, gradient = _list_element_bytes(layout, exact=exact)
    kept = parameter * weights
    if layout.adapter_rank:
        kept = (parameter if looked_up else _count_frozen_bytes(layout)) * weights + parameter * trained
    moments = MOMENT_BYTES[layout.optimizer_state]
    if not exact and sharding != "zero3" and layout.optimizer_state == "fp32":
        moments += 4.0  # copies of 16-bit weights
    whole, given = dense + sparse, trained_dense + trained_sparse
    return StateBytes(
        parameters=kept,
        gradients=gradient * gradients,
        optimizer=0.0 if layout.optimizer == "none" else moments * updated,
        bucketed=gradient * (trained_dense * (layout.dp * layout.cp > 1) + trained_sparse * (inner > 1)),
        gathered=(1.0 if layout.quantised_gather else layout.gather_bytes) * whole if sharding == "zero3" else 0.0,
        raw=layout.gather_bytes * given if sharding == "zero3" else 0.0,
        sent=layout.reduce_bytes * given if sharding == "zero3" else 0.0,
    )


def _list_element_bytes(layout: Layout, *, exact: bool) -> tuple[float, float]:
    """Bytes of a parameter and of its gradient. FSDP keeps fp32 weights and gathers them in 16 bits; Megatron adds
    gradients up in the type that it reduces them in."""
    if exact or (layout.sharding == "zero3" and layout.optimizer_state == "fp32"):
        return 4.0, 4.0
    return 2.0, 2.0 if layout.kernels in PYTORCH else float(layout.reduce_bytes)


def _count_frozen_bytes(layout: Layout) -> float:
    """Bytes of a weight below adapters."""
    if layout.frozen_type == "nf4":
        return _NF4_BYTES
    return {"fp4": 0.5625, "fp8": 1.0, "fp32": 4.0, "tf32": 4.0}.get(layout.precision, 2.0)


_PARAMETER, _GRADIENT, _OPTIMIZER, _ACTIVATION, _COMMUNICATION = (
    CATEGORIES.index(name) for name in ("parameter", "gradient", "optimizer_state", "activation", "communication")
)
_GATHERING, _REDUCING = 1, 2  # streams on which FSDP's collectives allocate


@dataclass(slots=True)
class _Pending:
    """A block that is still there: bytes, since which tick, and on which stream."""

    nbytes: float
    born: int
    stream: int = 0


@dataclass(slots=True)
class _Passage:
    """A part on its way with one micro-batch: ticks at which its passes begin, and when its result goes."""

    forward: int
    again: int = -1
    backward: int = -1
    late: int = -1
    result_gone: int = -1
    first: bool = False


class StageMemory:
    """Writes the blocks of one rank of a stage. `message` are the bytes of activations between stages; `tied`: the head
    shares the embedding's table."""

    def __init__(
        self, layout: Layout, chunks: Sequence[Sequence[Part]], message: float, *, receives: bool, sends: bool,
        tied: bool = False,
    ) -> None:  # fmt: skip
        self.layout, self.chunks, self.message, self.tied = layout, chunks, message, tied
        self.receives, self.sends = receives, sends
        self.writer, self.host = EventWriter(), EventWriter()
        self.states = [[_count_states(layout, part) for part in parts] for parts in chunks]
        self._passages: dict[tuple[int, int, int], _Passage] = {}
        self._arrived: dict[tuple[int, int], int] = {}
        self._whole: dict[tuple[int, int], _Pending] = {}  # gathered parameters by part
        self._buffers: dict[tuple[int, int], _Pending] = {}  # that they arrive in
        self._last_buffer: _Pending | None = None
        self._sent: _Pending | None = None  # gradients that are being reduced
        self._below: _Pending | None = None  # gradient on its way from part to part
        self._reduced: set[tuple[int, int]] = set()

    def write(self, turns: Sequence[Turn]) -> MemoryEvents:
        """The blocks of a step under this order of micro-batches."""
        self._write_resident()
        first = {turn.chunk: turn.micro_batch for turn in reversed(turns) if turn.kind == BACKWARD}
        for turn in turns:
            if turn.kind == FORWARD:
                self._run_forward(turn)
            elif turn.kind == BACKWARD:
                self._run_backward(turn, first=turn.micro_batch == first[turn.chunk])
            else:
                self._run_late(turn)
        self._update()
        self.host.tick = self.writer.tick
        return replace(self.writer.build_events(), host=self.host.build_events())

    @property
    def _is_fsdp(self) -> bool:
        return self.layout.sharding == "zero3"

    @property
    def _holds_gradients(self) -> bool:
        """Whether gradients have buffers that stay from step to step, as Megatron's do."""
        return not self._is_fsdp and self.layout.kernels not in PYTORCH

    def _loss_of(self, part: Part) -> str:
        plain = "compiled" if self.layout.kernels == "compiled" else ""
        return (self.layout.loss or plain) if part.label == "head" else ""

    @property
    def _splits(self) -> bool:
        return self.layout.schedule == "zero-bubble"

    def _write_resident(self) -> None:
        for parts, states in zip(self.chunks, self.states, strict=True):
            for part, state in zip(parts, states, strict=True):
                weights = find_block_tensors(part.piece, self._loss_of(part)).weights
                shares = weights / max(1, int(weights.sum()))
                where = self.host if "parameters" in self.layout.offload else self.writer
                where.add_blocks(state.parameters * shares, -1, None, _PARAMETER, part.label)
                if self._holds_gradients:
                    self.writer.add_blocks(state.gradients * shares, -1, None, _GRADIENT, part.label)
                elif self.layout.sharding == "none" and state.bucketed:  # of DDP
                    self.writer.add_blocks(state.bucketed * shares, -1, None, _COMMUNICATION, part.label)

    def _run_forward(self, turn: Turn) -> None:
        parts, writer = self.chunks[turn.chunk], self.writer
        self._arrived[turn.chunk, turn.micro_batch] = writer.tick
        writer.tick += 1
        for number, part in enumerate(parts):
            if self._is_fsdp:
                self._gather((turn.chunk, number))
            self._passages[turn.chunk, number, turn.micro_batch] = _Passage(writer.tick)
            writer.tick += 2 * part.piece.backward
            if self._is_fsdp and self.layout.reshard and not self._stays_whole(turn.chunk, number):
                self._free_whole((turn.chunk, number))

    def _stays_whole(self, chunk: int, number: int) -> bool:
        """Whether a part keeps its gathered parameters: the last ones are wanted again at once."""
        return chunk + 1 == len(self.chunks) and number + 2 >= len(self.chunks[chunk])

    def _run_backward(self, turn: Turn, *, first: bool) -> None:
        parts, writer = self.chunks[turn.chunk], self.writer
        last_part = turn.chunk + 1 == len(self.chunks) and not self.sends
        self._below = None if last_part else _Pending(self.message, writer.tick)
        writer.tick += 1
        for number in range(len(parts) - 1, -1, -1):
            part, key = parts[number], (turn.chunk, number)
            passage = self._passages[turn.chunk, number, turn.micro_batch]
            passage.first = first
            if part.frozen:
                self._write_passage(turn, number, part, passage)
                continue
            if self._is_fsdp:
                self._gather(key)
                if number:
                    self._fetch((turn.chunk, number - 1))
            if part.again:
                passage.again = writer.tick
                writer.tick += 2 * part.piece.backward
            passage.backward = writer.tick
            end = part.piece.late if self._splits else part.piece.program.num_ops
            writer.tick += 2 * (end - part.piece.backward)
            self._pass_gradient(part, passage)
            if not self._splits:
                self._finish_passage(turn, number, part, passage)
            if self._is_fsdp and not self.layout.gathers_once:
                self._free_whole(key)
                self._reduce(key, part)
        if self._below is not None:
            self._free(self._below, TEMPORARY, "between stages")
            self._below = None

    def _run_late(self, turn: Turn) -> None:
        """Gradients of weights that a schedule puts off."""
        parts = self.chunks[turn.chunk]
        for number in range(len(parts) - 1, -1, -1):
            part = parts[number]
            if part.frozen:
                continue
            passage = self._passages[turn.chunk, number, turn.micro_batch]
            passage.late = self.writer.tick
            self.writer.tick += 2 * (part.piece.program.num_ops - part.piece.late)
            self._finish_passage(turn, number, part, passage)

    def _finish_passage(self, turn: Turn, number: int, part: Part, passage: _Passage) -> None:
        """All passes of a part with a micro-batch are done: what it kept is written, and what it read goes."""
        self._write_passage(turn, number, part, passage)
        if number:
            self._passages[turn.chunk, number - 1, turn.micro_batch].result_gone = self.writer.tick
        elif turn.chunk or self.receives:
            arrived = self._arrived[turn.chunk, turn.micro_batch]
            self.writer.add_blocks(self.message, arrived, self.writer.tick, _ACTIVATION, "between stages")
        self.writer.tick += 1

    def _pass_gradient(self, part: Part, passage: _Passage) -> None:
        """The gradient that arrived goes when it was last read; the one for the part before comes."""
        tensors = find_block_tensors(part.piece, self._loss_of(part))
        if self._below is not None:
            read = min(tensors.arriving, part.piece.late - 1 if self._splits else tensors.arriving)
            gone = passage.backward + 2 * (read - part.piece.backward) + 1
            self.writer.add_blocks(self._below.nbytes, self._below.born, gone, TEMPORARY, part.label)
        self._below = None
        if tensors.below >= 0:
            born = passage.backward + 2 * (int(tensors.born[tensors.below]) - part.piece.backward)
            self._below = _Pending(float(tensors.nbytes[tensors.below]), born)

    def _write_passage(self, turn: Turn, number: int, part: Part, passage: _Passage) -> None:
        tensors, piece = find_block_tensors(part.piece, self._loss_of(part)), part.piece
        early = tensors.born < piece.backward
        again = np.zeros(len(early), dtype=np.bool_)
        if part.again:
            again = early & mark_recomputed_ops(piece, self.layout.checkpoint)[np.where(early, tensors.born, 0)]
        result = np.arange(len(early)) == tensors.result
        kept = early & ~result & ~again
        offloaded = "activations" in self.layout.offload
        forward = passage.forward + 2 * tensors.born
        used_forward = passage.forward + 2 * tensors.last_forward + 1
        gone = used_forward if part.frozen else self._place_ends(tensors, passage, passage.forward, part)
        if again.any() and self.layout.kernels in PYTORCH:  # a policy keeps what it saves, be it read or not
            gone = np.where(kept, np.maximum(gone, passage.backward), gone)
        if offloaded and not part.frozen:
            self._write_offloaded(part, tensors, passage, kept, gone)
        else:
            category = np.where(gone[kept] < passage.backward, TEMPORARY, _ACTIVATION)
            self.writer.add_blocks(tensors.nbytes[kept], forward[kept], gone[kept], category, part.label)
        self._write_result(turn, number, part, tensors, passage)
        once = again & ~result
        self.writer.add_blocks(tensors.nbytes[once], forward[once], used_forward[once], TEMPORARY, part.label)
        if part.frozen:
            return
        if part.again:
            repeated = self._place_ends(tensors, passage, passage.again, part)
            start = passage.again + 2 * tensors.born
            self.writer.add_blocks(tensors.nbytes[once], start[once], repeated[once], _ACTIVATION, part.label)
        late = ~early & (np.arange(len(early)) != tensors.below)
        begun = self._place_ops(tensors.born, passage, part)
        work = late & ~tensors.gradient
        self.writer.add_blocks(tensors.nbytes[work], begun[work], gone[work], TEMPORARY, part.label)
        self._write_gradients(part, tensors, passage, late & tensors.gradient, begun)

    def _write_offloaded(
        self, part: Part, tensors: BlockTensors, passage: _Passage, kept: BoolArray, gone: IntArray
    ) -> None:
        """Activations that wait in host memory: on the device while they are made, and again from the start of the
        part's backward pass."""
        forward = passage.forward + 2 * tensors.born
        used = passage.forward + 2 * tensors.last_forward + 1
        waits = kept & (gone >= passage.backward)
        start = passage.again if passage.again >= 0 else passage.backward
        self.writer.add_blocks(
            tensors.nbytes[kept], forward[kept], np.minimum(used, gone)[kept], _ACTIVATION, part.label
        )
        self.writer.add_blocks(tensors.nbytes[waits], start, gone[waits], _ACTIVATION, part.label)
        self.host.add_blocks(tensors.nbytes[waits], used[waits], start, _ACTIVATION, part.label)

    def _write_result(self, turn: Turn, number: int, part: Part, tensors: BlockTensors, passage: _Passage) -> None:
        """What the next part reads: it goes with that one's backward pass. What another stage reads goes at once in
        Megatron; PyTorch keeps it."""
        if tensors.result < 0:
            return
        parts, writer = self.chunks[turn.chunk], self.writer
        nbytes = int(tensors.nbytes[tensors.result])
        born = passage.forward + 2 * int(tensors.born[tensors.result])
        end = passage.forward + 2 * part.piece.backward
        if number + 1 < len(parts):
            following = parts[number + 1]
            next_forward = self._passages[turn.chunk, number + 1, turn.micro_batch].forward
            gone = passage.result_gone if not following.frozen else next_forward + 2 * following.piece.backward
            if "activations" in self.layout.offload and not following.frozen:
                writer.add_blocks(nbytes, born, next_forward + 2 * following.piece.backward, _ACTIVATION, part.label)
                passage_next = self._passages[turn.chunk, number + 1, turn.micro_batch]
                used = next_forward + 2 * following.piece.backward
                born = passage_next.again if passage_next.again >= 0 else passage_next.backward
                self.host.add_blocks(nbytes, used, born, _ACTIVATION, part.label)
        elif self.layout.kernels in PYTORCH:
            gone = writer.tick
        else:
            gone = end
        writer.add_blocks(nbytes, born, max(gone, born + 1), _ACTIVATION, part.label)

    def _write_gradients(
        self, part: Part, tensors: BlockTensors, passage: _Passage, which: BoolArray, begun: IntArray
    ) -> None:
        """Gradients of weights as backward makes them: added to a buffer at once (Megatron allocates one even where the
        product adds to the buffer itself), whole until the part is reduced, or kept until the update."""
        nbytes = tensors.nbytes[which]
        if self._is_fsdp and not self.layout.gathers_once:
            self.writer.add_blocks(nbytes, begun[which], self.writer.tick, _GRADIENT, part.label)
            return
        if self.layout.gathers_once:  # added up as they are reduced, and whole until the update
            nbytes = nbytes * self.layout.reduce_bytes // self.layout.gather_bytes
        waits = self.tied and part.label == "head"  # for the gradient of the embedding, which shares its table
        kept = passage.first and (waits or not self.layout.update_in_backward) and not self._holds_gradients
        gone = None if kept else begun[which] + 1
        self.writer.add_blocks(nbytes, begun[which], gone, _GRADIENT, part.label)

    def _place_ops(self, ops: IntArray, passage: _Passage, part: Part) -> IntArray:
        """Ticks of ops of the backward pass."""
        piece = part.piece
        ticks = passage.backward + 2 * (ops - piece.backward)
        if self._splits:
            ticks = np.where(ops >= piece.late, passage.late + 2 * (ops - piece.late), ticks)
        return np.asarray(ticks)

    def _place_ends(self, tensors: BlockTensors, passage: _Passage, start: int, part: Part) -> IntArray:
        """Ticks at which tensors go; a forward pass begins at tick `start`."""
        piece = part.piece
        last = np.minimum(tensors.gone, piece.program.num_ops - 1)
        inside = start + 2 * tensors.gone + 1
        return np.where(tensors.gone < piece.backward, inside, self._place_ops(last, passage, part) + 1)

    def _fetch(self, key: tuple[int, int]) -> None:
        """Begins to gather the parameters of a part."""
        chunk, number = key
        nbytes = self.states[chunk][number].gathered
        if key not in self._buffers and key not in self._whole and nbytes:
            self._buffers[key] = _Pending(nbytes, self.writer.tick, _GATHERING)
            self.writer.tick += 1

    def _gather(self, key: tuple[int, int]) -> None:
        """The parameters of a part are whole: copied out of the buffer they arrived in, which FSDP2 keeps until the
        next one is copied."""
        if key in self._whole:
            return
        self._fetch(key)
        if key not in self._buffers:
            return
        chunk, number = key
        if self._last_buffer is not None:
            self._free(self._last_buffer, _COMMUNICATION, self.chunks[chunk][number].label)
        self._last_buffer = self._buffers.pop(key)
        self._whole[key] = _Pending(self._last_buffer.nbytes, self.writer.tick)
        self.writer.tick += 1

    def _free_whole(self, key: tuple[int, int]) -> None:
        if key in self._whole:
            self._free(self._whole.pop(key), _COMMUNICATION, self.chunks[key[0]][key[1]].label)

    def _reduce(self, key: tuple[int, int], part: Part) -> None:
        """Gradients of a part, copied into the buffer of a reduce-scatter; this rank's share stays."""
        state, writer = self.states[key[0]][key[1]], self.writer
        if self._sent is not None:
            self._free(self._sent, _COMMUNICATION, part.label)
        self._sent = _Pending(state.sent, writer.tick)
        writer.tick += 1
        if key not in self._reduced and "parameters" not in self.layout.offload:
            self._reduced.add(key)
            gone = writer.tick + 1 if self.layout.update_in_backward else None
            writer.add_blocks(state.gradients, writer.tick, gone, _GRADIENT, part.label, stream=_REDUCING)
        writer.tick += 1

    def _free(self, pending: _Pending, category: int, label: str) -> None:
        self.writer.add_blocks(pending.nbytes, pending.born, self.writer.tick, category, label, stream=pending.stream)
        self.writer.tick += 1

    def _update(self) -> None:
        """Buffers of collectives go; the optimizer's state appears in the first step."""
        for pending in (self._last_buffer, self._sent, *self._whole.values(), *self._buffers.values()):
            if pending is not None:
                self._free(pending, _COMMUNICATION, "collectives")
        for parts, states in zip(self.chunks, self.states, strict=True):
            for part, state in zip(parts, states, strict=True):
                where = self.host if {"optimizer", "parameters"} & set(self.layout.offload) else self.writer
                weights = find_block_tensors(part.piece, self._loss_of(part)).weights
                shares = np.repeat(weights / max(1, int(weights.sum())) / 2, 2)
                now = self.writer.tick
                where.add_blocks(state.optimizer * shares, -1, None, _OPTIMIZER, part.label, appears=now)
        self.writer.tick += 2


def _count_states(layout: Layout, part: Part) -> StateBytes:
    trained = part.trained_dense, part.trained_sparse
    return count_state_bytes(layout, part.dense, part.sparse, *trained, looked_up=part.label == "embedding")


def list_stage_events(
    model: Transformer, layout: Layout, stages: Sequence[Stage], *, gpus_per_node: int, micro_batches: int,
    only: Collection[int] | None = None,
) -> list[MemoryEvents]:  # fmt: skip
    """The blocks of one rank of every stage, or of `only` these, in a step with this many micro-batches."""
    parts = make_parts(model, layout, Groups(layout).in_layers(model, gpus_per_node))
    rows = layout.micro_batch * layout.seq_len // layout.cp // (layout.tp if layout.sequence else 1)
    message = float(rows * model.hidden * (4 if layout.wide else 2))
    events = []
    for stage, turns in enumerate(order_turns(layout, stages, micro_batches)):
        if only is not None and stage not in only:
            continue
        chunks = [parts[chunk * layout.pp + stage] for chunk in range(layout.vp)]
        tied = model.tied and layout.pp == 1
        writer = StageMemory(layout, chunks, message, receives=stage > 0, sends=stage + 1 < layout.pp, tied=tied)
        events.append(writer.write(turns))
    return events
