"""The tensors of a layer block: how large they are, which op makes them and after which they go."""

from __future__ import annotations

from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import numpy as np

from traincast.ir.ops import StorageKind
from traincast.ir.program import Program
from traincast.models.transformers.program.step import LayerBlock
from traincast.utils.arrays import BoolArray, IntArray


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
