"""The program of one rank of every pipeline stage: micro-batches and their tensors, collectives, the update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from weakref import WeakKeyDictionary

import numpy as np

from traincast.ir.compiled import mark_graphs
from traincast.ir.ops import StorageKind
from traincast.ir.program import Columns, Program
from traincast.ir.workload import Workload
from traincast.models.transformers.description import Transformer
from traincast.models.transformers.program.communication import LayerGroups
from traincast.models.transformers.program.step import (
    LayerBlock,
    build_embedding_block,
    build_head_block,
    build_layer_block,
)
from traincast.models.transformers.program.style import Shard, Style
from traincast.models.transformers.sizes import (
    count_embedding_parameters,
    count_head_parameters,
    count_layer_parameters,
)
from traincast.simulator.parallelism.groups import Groups, make_head_style, make_shard, make_style
from traincast.simulator.parallelism.layout import Layout
from traincast.simulator.parallelism.orders import (
    BACKWARD,
    FORWARD,
    Turn,
    order_1f1b,
    order_interleaved,
    order_zero_bubble,
    split_layers_into_parts,
)
from traincast.simulator.parallelism.snippets import Snippets
from traincast.simulator.parallelism.splicing import ProgramWriter, Tables, Unit, make_programs, mark_ops_between
from traincast.simulator.parallelism.step import Stage
from traincast.utils.arrays import BoolArray, IntArray

_BUCKET_ELEMENTS = 40e6  # of gradients that are reduced together: Megatron's default
_BUCKET_PER_RANK = 1e6  # at least, of each data-parallel rank: a ring over many ranks would only wait for latencies
_EVENTS_IN_FLIGHT = 3
_GEMMS = ("aten::mm", "aten::addmm", "aten::bmm")
_KEPT = ("aten::_flash_attention_forward", "aten::_softmax", "aten::topk")
"""Ops besides GEMMs whose results every way of checkpointing but the full one keeps."""
_KEPT_SCOPES = ("PermuteBackward", "UnpermuteBackward", "SortChunksBackward")
"""Likewise what sorts tokens by expert."""


@dataclass(frozen=True, slots=True)
class Part:
    """A layer (or what stands before or after them) on one rank. Elements of weights on this rank, before sharding:
    `dense` ones that all tokens meet and `sparse` ones of experts; those of them that are trained. `again`: backward
    computes it again; `frozen`: it has no backward."""

    module: str
    piece: LayerBlock
    dense: float
    sparse: float
    trained_dense: float
    trained_sparse: float
    again: bool = False
    frozen: bool = False

    @property
    def label(self) -> str:
        """What it is called: its module, or what stands before or after the layers."""
        return self.module or self.piece.program.names[self.piece.program.columns.op_module[0]]


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
                self._write(unit, mark_recomputed_ops(part.piece, self.layout.checkpoint), part)
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


@lru_cache(maxsize=256)
def mark_recomputed_ops(block: LayerBlock, checkpoint: str) -> BoolArray:
    """Which forward ops backward computes again: all, or those that are cheap ("light"), with every second GEMM
    ("selective")."""
    marked = mark_ops_between(block.program, 0, block.backward).copy()
    if checkpoint == "full":
        return marked
    names = [block.program.symbolic[s].name for s in block.program.columns.op_signature.tolist()]
    scopes = [block.program.names[n] for n in block.program.columns.scope_name[block.program.op_scope].tolist()]
    gemms = 0
    for index, (name, scope) in enumerate(zip(names, scopes, strict=True)):
        if name in _GEMMS and index < block.backward:
            gemms += 1
            marked[index] &= checkpoint == "selective" and gemms % 2 == 0
        elif name in _KEPT or scope in _KEPT_SCOPES or name.startswith(("c10d::", "cuda::")):
            marked[index] = False
    return marked


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


def make_parts(model: Transformer, layout: Layout, groups: LayerGroups) -> list[list[Part]]:
    """What every part of the model holds, in order: layers, and at the ends embedding and head."""
    shard, style, split = make_shard(layout), make_style(layout), layout.schedule == "zero-bubble"
    before = build_embedding_block(model, shard, style, groups=groups, split=split)
    after = build_head_block(model, shard, make_head_style(layout), groups=groups, split=split)
    counts = layout.stage_layers or split_layers_into_parts(model.layers, layout.pp, layout.vp)
    parts: list[list[Part]] = []
    first = 0
    for number, count in enumerate(counts):
        inside = [_make_layer_part(model, layout, shard, style, groups, first + place, place) for place in range(count)]
        if number == 0:
            encoder = [
                _make_layer_part(model, layout, shard, style, groups, layer, layer, encoder=True)
                for layer in range(model.encoder_layers)
            ]
            weights = count_embedding_parameters(model) / layout.tp
            inside = [_make_end_part(layout, before, weights, frozen=layout.frozen_layers > 0), *encoder, *inside]
        if number == len(counts) - 1:
            tied = model.hidden * model.vocab if model.tied and layout.pp > 1 else 0
            inside.append(_make_end_part(layout, after, (count_head_parameters(model) + tied) / layout.tp))
        parts.append(inside)
        first += count
    return parts


def _make_end_part(layout: Layout, block: LayerBlock, weights: float, *, frozen: bool = False) -> Part:
    trained = 0.0 if frozen or layout.adapter_rank else weights
    return Part("", block, weights, 0.0, trained, 0.0, frozen=frozen)


def _make_layer_part(
    model: Transformer, layout: Layout, shard: Shard, style: Style, groups: LayerGroups, number: int,
    place: int, *, encoder: bool = False,
) -> Part:  # fmt: skip
    frozen = (encoder and layout.frozen_layers > 0) or number < layout.frozen_layers
    experts = not encoder and model.has_experts(number)
    window = 0 if encoder else model.window_of(number)
    split = layout.schedule == "zero-bubble"
    block = build_layer_block(
        model, shard, style, experts=experts, window=window, encoder=encoder, groups=groups, split=split
    )
    dense, sparse = count_layer_parameters(model, number)
    here = (dense / layout.tp, sparse / (layout.ep * layout.etp))
    trained = (float(block.trained), 0.0) if layout.adapter_rank else here
    again = layout.recomputes(number, place) and not frozen
    module = f"{'encoder' if encoder else 'layers'}.{number}"
    return Part(module, block, *here, *((0.0, 0.0) if frozen else trained), again=again, frozen=frozen)


@dataclass(frozen=True, eq=False, slots=True)
class BlockTensors:
    """The tensors that a layer block makes: bytes, the op that makes each, the op after which it is freed (the number
    of ops: none), the last forward op that uses it. `gradient` marks those of weights. `result` is the tensor that the
    next block reads, `below` the gradient for the block before (-1: none); `arriving` is the last op that reads the
    gradient of the result. `weights` are the bytes of its parameters."""

    nbytes: IntArray
    born: IntArray
    gone: IntArray
    last_forward: IntArray
    gradient: BoolArray
    result: int
    below: int
    arriving: int
    weights: IntArray


_FOUND: WeakKeyDictionary[Program, dict[str, BlockTensors]] = WeakKeyDictionary()
_CHUNKS = 8  # that logits are made or cast in: torchtune's default, and about Liger's for a vocabulary of 128,000


def find_block_tensors(block: LayerBlock, loss: str = "") -> BlockTensors:
    """The tensors of a block, found once; `loss` says how those of a head are made (see `Layout`)."""
    known = _FOUND.setdefault(block.program, {})
    if loss not in known:
        found = _find_tensors(block)
        known[loss] = replace(found, nbytes=_size_logits(block, found, loss)) if loss else found
    return known[loss]


def _size_logits(block: LayerBlock, found: BlockTensors, loss: str) -> IntArray:
    """Bytes of a head's tensors by how its loss is made. A "compiled" one reads 16-bit logits in both passes, though
    its kernels are timed as if they wrote fp32 copies."""
    program, nbytes = block.program, found.nbytes
    names = [program.symbolic[s].name for s in program.columns.op_signature.tolist()]
    logits = program.ops[names.index("aten::mm")].outputs[0].spec.nbytes
    whole = (nbytes >= logits) & ~found.gradient
    wide, forward = whole & (nbytes > logits), found.born < block.backward
    saved = wide & forward & (found.gone >= block.backward)
    chunk = nbytes // _CHUNKS
    if loss == "fused":
        return np.where(whole, chunk, nbytes)
    if not saved.any():
        return nbytes
    if "aten::_log_softmax" in names:  # whose results backward reads whole
        return np.where(whole & ~saved & (wide | ~forward), chunk, nbytes) if loss == "chunked" else nbytes
    sized = np.where(wide, np.where(saved, logits, 1), nbytes)
    return np.where(whole & ~wide, chunk, sized) if loss == "chunked" else sized


def _find_tensors(block: LayerBlock) -> BlockTensors:
    program = block.program
    c, ops = program.columns, program.num_ops
    last, forward = (np.full(len(c.storage_bytes), -1, dtype=np.int64) for _ in range(2))
    first = np.full(len(c.storage_bytes), ops, dtype=np.int64)
    for pointer, tensor in ((c.input_ptr, c.input_tensor), (c.output_ptr, c.output_tensor)):
        op, storage = np.repeat(np.arange(ops), np.diff(pointer)), c.tensor_storage[tensor]
        np.minimum.at(first, storage, op)
        np.maximum.at(last, storage, op)
        early = op < block.backward
        np.maximum.at(forward, storage[early], op[early])
    made = np.flatnonzero((c.storage_alloc >= 0) & (first < ops))
    nbytes, born = program.storage_nbytes[made], first[made]
    # a view of a tensor that was dropped keeps it
    gone = np.maximum(c.storage_free[made].astype(np.int64), last[made])
    kept = np.flatnonzero(gone >= ops)
    results, gradients = kept[born[kept] < block.backward], kept[born[kept] >= block.backward]
    given = np.flatnonzero((c.storage_alloc < 0) & (c.storage_kind == StorageKind.ACTIVATION))
    return BlockTensors(
        nbytes=nbytes,
        born=born,
        gone=gone,
        last_forward=np.maximum(forward[made], born),
        gradient=c.storage_kind[made] == StorageKind.GRADIENT,
        result=int(results[np.argmax(nbytes[results])]) if len(results) else -1,
        below=int(gradients[np.argmax(nbytes[gradients])]) if len(gradients) else -1,
        arriving=max(int(last[given[-1]]), block.backward) if len(given) else block.backward,
        weights=program.storage_nbytes[c.storage_kind == StorageKind.PARAMETER],
    )
