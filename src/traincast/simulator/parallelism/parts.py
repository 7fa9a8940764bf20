"""What every part of a model (a layer, or what stands before or after all) is on one rank, and the tensors it makes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from weakref import WeakKeyDictionary

import numpy as np

from traincast.ir.ops import StorageKind
from traincast.ir.program import Program
from traincast.models.transformers.description import (
    ATTENTION,
    DENSE,
    MIXTURE,
    Transformer,
    count_embedding_parameters,
    count_head_parameters,
    count_layer_parameters,
)
from traincast.models.transformers.program.step import (
    LayerBlock,
    build_embedding_block,
    build_head_block,
    build_layer_block,
)
from traincast.models.transformers.program.style import LayerGroups, Shard, Style
from traincast.simulator.parallelism.groups import make_head_style, make_shard, make_style
from traincast.simulator.parallelism.layout import PYTORCH, WHOLE, Layout
from traincast.simulator.parallelism.snippets import split_layers_into_parts
from traincast.simulator.parallelism.splicing import mark_ops_between
from traincast.utils.arrays import BoolArray, IntArray

_GEMMS = ("aten::mm", "aten::addmm", "aten::bmm")
_KEPT = ("aten::_flash_attention_forward", "aten::_softmax", "aten::topk")
"""Ops besides GEMMs whose results every way of checkpointing but the full one keeps."""
_KEPT_SCOPES = ("PermuteBackward", "UnpermuteBackward", "SortChunksBackward")
"""Likewise what sorts tokens by expert."""


@dataclass(frozen=True, slots=True)
class Part:
    """A layer (or what stands before or after them) on one rank. Elements of weights on this rank, before sharding:
    `dense` ones that all tokens meet and `sparse` ones of experts; those of them that are trained. `again`: backward
    computes it again; `frozen`: it has no backward. `shared` are the modules whose tokens
    tensor-parallel ranks share."""

    module: str
    piece: LayerBlock
    dense: float
    sparse: float
    trained_dense: float
    trained_sparse: float
    again: bool = False
    frozen: bool = False
    shared: int = 0

    @property
    def label(self) -> str:
        """What it is called: its module, or what stands before or after the layers."""
        return self.module or self.piece.program.names[self.piece.program.columns.op_module[0]]


@lru_cache(maxsize=256)
def mark_wanted_ops(block: LayerBlock) -> BoolArray:
    """The forward ops up to the last one that makes something which backward reads."""
    c = block.program.columns
    read_by, made_by = (
        np.repeat(np.arange(block.program.num_ops), np.diff(pointer)) for pointer in (c.input_ptr, c.output_ptr)
    )
    read = np.unique(c.tensor_storage[c.input_tensor[read_by >= block.backward]])
    made = (made_by < block.backward) & np.isin(c.tensor_storage[c.output_tensor], read)
    return mark_ops_between(block.program, 0, int(made_by[made].max(initial=-1)) + 1)


def mark_repeated_ops(block: LayerBlock, layout: Layout) -> BoolArray:
    """The ops that backward runs again: PyTorch stops where all that it wants is there (since release 2.1), before a
    layer's last GEMM and sum; Megatron runs to the end."""
    marked = mark_recomputed_ops(block, layout.checkpoint)
    stops = layout.checkpoint != "whole" and (layout.kernels in PYTORCH or layout.sharding == "zero3")
    return marked & mark_wanted_ops(block) if stops else marked


@lru_cache(maxsize=256)
def mark_recomputed_ops(block: LayerBlock, checkpoint: str) -> BoolArray:
    """Which forward ops backward computes again: all, or those that are cheap ("light"), with every second GEMM
    ("selective")."""
    marked = mark_ops_between(block.program, 0, block.backward).copy()
    if checkpoint in WHOLE:
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


def make_parts(model: Transformer, layout: Layout, groups: LayerGroups) -> list[list[Part]]:
    """What every part of the model holds, in order: layers, and at the ends embedding and head."""
    shard, style, split = make_shard(layout), make_style(layout), layout.schedule == "zero-bubble"
    before = build_embedding_block(model, shard, style, groups=groups, split=split)
    if model.encoder_layers and model.decoder_len:
        shard = replace(shard, seq_len=model.decoder_len)
    after = build_head_block(model, shard, make_head_style(layout), groups=groups, split=split)
    counts = layout.stage_layers or split_layers_into_parts(model.layers, layout.pp, layout.vp)
    parts: list[list[Part]] = []
    first = 0
    for number, count in enumerate(counts):
        inside = [_make_layer_part(model, layout, shard, style, groups, first + place, place) for place in range(count)]
        if number == 0:
            encoder = [
                _make_layer_part(model, layout, make_shard(layout), style, groups, layer, layer, encoder=True)
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
    modules = ATTENTION + DENSE if encoder else model.list_modules(number)
    window = 0 if encoder else model.window_of(number)
    split = layout.schedule == "zero-bubble"
    block = build_layer_block(
        model, shard, style, modules=modules, window=window, encoder=encoder, groups=groups, split=split
    )
    dense, sparse = count_layer_parameters(model, number)
    here = (dense / layout.tp, sparse / (layout.ep * layout.etp))
    trained = (float(block.trained), 0.0) if layout.adapter_rank else here
    again = layout.recomputes(number, place) and not frozen
    module = f"{'encoder' if encoder else 'layers'}.{number}"
    shared = 2 if encoder else len(modules.replace(MIXTURE, "" if layout.etp == 1 else MIXTURE))
    return Part(module, block, *here, *((0.0, 0.0) if frozen else trained), again=again, frozen=frozen, shared=shared)


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
