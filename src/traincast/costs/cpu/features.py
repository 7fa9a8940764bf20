"""What the time of an op on a CPU depends on: its kind, the work it does, where its bytes are, and its shape.

Storages are followed in the order of the ops, in a steady state (the step before it has the same order). What is freed
goes to a list of free blocks, and what is allocated takes the block freed last that is large enough, as malloc does:
memory that is still warm. No page is new: steps run with an allocator that keeps what it has.

The same function describes a microbenchmark and an op of a step, so that a model fitted on the one is asked about the
other in its own terms.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import exp, expm1, log2, prod
from typing import NamedTuple

import numpy as np

from traincast.ir.ops import Signature, TensorSpec
from traincast.ir.program import Program
from traincast.models.embeddings.access import Uniform, make_row_classes, parse_access
from traincast.utils.arrays import FloatArray

FAR = 1 << 40  # bytes: further than any cache reaches
CODE_BYTES = 64 << 10
"""About what an op runs through of its own, from its first check to its kernel."""
_RELATIVE_FIT = 4.0  # a free block this many times too large is left for others
_FREE_BLOCKS = 64  # older ones are cold by any measure


@dataclass(frozen=True, slots=True)
class Operand:
    """What an op touches of a tensor: this many bytes, last touched this many bytes of other data ago."""

    nbytes: int
    distance: int


@dataclass(slots=True)
class _Memory:
    """Storages by when they were touched last (the latest at the end), and free blocks."""

    farthest: int
    touched: OrderedDict[int, int] = field(default_factory=OrderedDict)
    free: list[tuple[int, int]] = field(default_factory=list)  # (block of a storage that is gone, bytes)
    names: dict[str, int] = field(default_factory=dict)  # of ops, whose code is at key -1 - number

    def touch(self, key: int, nbytes: int) -> int:
        """How far back this storage is; it is the latest now."""
        distance = self._distance(key)
        self.touched[key] = max(self.touched.pop(key, 0), nbytes)
        return distance

    def _distance(self, key: int) -> int:
        if key not in self.touched:
            return FAR
        between = 0
        for other in reversed(self.touched):
            if other == key:
                return between
            between += self.touched[other]
            if between > self.farthest:
                return FAR
        return FAR

    def allocate(self, key: int, nbytes: int) -> None:
        """Takes over the block freed last that fits."""
        for position in range(len(self.free) - 1, -1, -1):
            old, size = self.free[position]
            if nbytes <= size <= _RELATIVE_FIT * nbytes + 4096:
                del self.free[position]
                self._rename(old, key, nbytes)
                return

    def _rename(self, old: int, new: int, nbytes: int) -> None:
        """The new storage is where the old one lay: as warm, at its place in the order."""
        if old in self.touched:
            items = [(new, nbytes) if key == old else (key, size) for key, size in self.touched.items()]
            self.touched = OrderedDict(items)

    def release(self, key: int, nbytes: int) -> None:
        """Frees a storage."""
        self.free.append((key, nbytes))
        del self.free[:-_FREE_BLOCKS]


class Found(NamedTuple):
    """What an op finds: its inputs and outputs, and how many bytes ago an op of its name ran."""

    operands: tuple[Operand, ...]
    code: int


Touched = Callable[[int, Signature], Sequence[float]]
"""How many bytes an op (by number) touches of each of its inputs and outputs: of a table only the rows looked up."""


def list_whole_tensors(_: int, signature: Signature) -> list[float]:
    """All of every tensor."""
    return [float(spec.nbytes) for spec in (*signature.inputs, *signature.outputs)]


def list_operands(program: Program, farthest: float, touched: Touched = list_whole_tensors) -> list[Found]:
    """The operands of every op, inputs before outputs, and its code, in a step that follows one of its kind.

    `farthest` is the distance in bytes beyond which all is equally far.
    """
    memory = _Memory(int(farthest))
    _replay_accesses(program, memory, touched, offset=0)
    return _replay_accesses(program, memory, touched, offset=len(program.columns.storage_bytes))


def _replay_accesses(program: Program, memory: _Memory, touched: Touched, offset: int) -> list[Found]:
    """One step; storages that are made in it are other ones than those of the step before (`offset`)."""
    c, nbytes = program.columns, program.storage_nbytes
    keys = np.arange(len(nbytes)) + np.where(c.storage_alloc < 0, 0, offset)
    gone: dict[int, list[int]] = {}
    for storage, op in enumerate(c.storage_free.tolist()):
        gone.setdefault(op, []).append(storage)
    rows = []
    names = memory.names
    for op, number in enumerate(c.op_signature.tolist()):
        row = []
        signature = program.signatures[number]
        code = memory.touch(-1 - names.setdefault(signature.name, len(names)), CODE_BYTES)
        sizes = touched(op, signature)
        for size, storage in zip(sizes, _list_storages(program, op), strict=True):
            key = int(keys[storage])
            if c.storage_alloc[storage] == op and key not in memory.touched:
                memory.allocate(key, int(nbytes[storage]))
            # an expanded tensor has fewer bytes than elements; a sparse gradient that was emptied grows in place, and
            # its storages are known as they were made: empty
            used = int(min(size, nbytes[storage] or size))
            row.append(Operand(used, memory.touch(key, used)))
        rows.append(Found(tuple(row), code))
        for storage in gone.get(op, ()):
            memory.release(int(keys[storage]), int(nbytes[storage]))
    return rows


def _list_storages(program: Program, op: int) -> list[int]:
    """The storages of an op's inputs and outputs."""
    c = program.columns
    read = c.input_tensor[c.input_ptr[op] : c.input_ptr[op + 1]]
    made = c.output_tensor[c.output_ptr[op] : c.output_ptr[op + 1]]
    return [int(c.tensor_storage[tensor]) for tensor in (*read.tolist(), *made.tolist())]


def split_by_level(operands: Iterable[Operand], l2: float, l3: float) -> FloatArray:
    """Bytes that come from the L2 cache, from the L3 and from memory: float64[3].

    An operand is where its distance and its own size together say.
    """
    levels = np.zeros(3)
    for operand in operands:
        reach = operand.distance + operand.nbytes
        inner, outer = _count_held_bytes(reach, l2), _count_held_bytes(reach, l3)
        levels += operand.nbytes * np.array([inner, max(outer - inner, 0.0), 1 - max(outer, inner)])
    return levels


def _count_held_bytes(reach: float, capacity: float) -> float:
    """The share of data last touched this many bytes ago that a cache still holds: what comes in takes the place of
    anything in it, so less and less remains. (Had the oldest to go first, all would stay up to the capacity and none
    beyond; samples show no such step.)"""
    return exp(-reach / capacity)


FAMILIES = ("gemm", "conv", "embedding forward", "embedding backward", "elementwise", "reduction", "other", "host")
OTHER = "other"
"""The kind of ops that no microbenchmark is like: estimated from their bytes."""

WORK = 6
"""Terms of work follow this many others: a call, bytes by level (3), code from the L3 and from memory."""
TABLE_KINDS = ("_embedding_bag", "embedding", "sparse_update")
"""Kinds whose first operand is an embedding table."""
_GEMMS = {"mm": 0, "addmm": 1, "bmm": 0, "baddbmm": 1}  # position of the left operand
_GEMM_KINDS = ("gemm", "gemv", "bmm")
_REDUCTIONS = frozenset(
    (
        "sum", "mean", "_softmax", "_log_softmax", "_softmax_backward_data", "_log_softmax_backward_data",
        "linalg_vector_norm", "native_layer_norm", "native_layer_norm_backward", "native_batch_norm",
        "native_batch_norm_backward", "nll_loss_forward", "nll_loss_backward", "max_pool2d_with_indices",
        "max_pool2d_with_indices_backward", "avg_pool2d", "avg_pool2d_backward", "_adaptive_avg_pool2d",
        "_adaptive_avg_pool2d_backward", "binary_cross_entropy", "binary_cross_entropy_backward", "mse_loss",
        "mse_loss_backward",
    )
)  # fmt: skip
_TRANSLATED_BYTES = 2 << 20  # of pages whose addresses a core keeps at hand; beyond, a row costs a page walk
# of a table: a page, and the pages whose addresses are in one cache line of the page table (8 of 4 KB)
_PAGE_BYTES, _WALKED_BYTES = 4096.0, 32768.0
# seconds of a call, a byte and a flop on a core of any kind: enough to put ops in order
_ROUGH_CALL, _ROUGH_BYTE, _ROUGH_FLOP = 2e-6, 1e-10, 2e-11
# how far apart states are, in factors of two of a size: all bytes near or all far, code near or far, alone or inside
_STATE, _CODE_STATE, _INSIDE = 4.0, 2.0, 2.0
_LANES, _LEAST_LANES = 16, 4  # numbers that a vectorised kernel works on at once, in its widest and narrowest vectors
_RAGGED = 2.0  # how far a size that is no multiple of them is from one that is, in factors of two of a size
_ALIASES = {
    "clone": "copy", "_to_copy": "copy", "contiguous": "copy", "slice_backward": "copy", "cat": "cat", "stack": "cat",
    "zeros": "fill", "zeros_like": "fill", "new_zeros": "fill", "zero": "fill", "fill": "fill", "ones": "fill",
    "ones_like": "fill", "full": "fill", "full_like": "fill", "sub": "add", "rsub": "add", "index_put": "index_put",
    "_index_put_impl": "index_put", "_unsafe_index_put": "index_put", "masked_fill": "where", "select_backward": "copy",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Features:
    """One op: `terms` are work and bytes that its time is a sum of, `place` is where it is among shapes (log2)."""

    kind: str
    family: str
    terms: FloatArray
    place: FloatArray


@dataclass(frozen=True, slots=True)
class Caches:
    """Sizes in bytes that data stays within reach of one core."""

    l2: float
    l3: float


def get_kind(signature: Signature) -> str:
    """The kind of an op: those of one kind share a model."""
    name = signature.name.partition("::")[2]
    if _is_sparse(signature, "other"):
        return "sparse_add" if _is_sparse(signature, "self") else "sparse_update"
    if name in _GEMMS:
        return _get_gemm_kind(name, signature)
    if name == "convolution_backward":
        return "conv_backward"
    if name in ("convolution", "mkldnn_convolution", "_convolution"):
        return "conv"
    bare = name.rstrip("_")
    return _ALIASES.get(bare, bare)


def _get_gemm_kind(name: str, signature: Signature) -> str:
    """Batched, with a vector (or of two), or plain: libraries have other kernels for each."""
    if "b" in name.replace("addmm", ""):
        return "bmm"
    left, right = signature.inputs[_GEMMS[name] : _GEMMS[name] + 2]
    return "gemv" if 1 in (*left.shape, right.shape[-1]) else "gemm"


def get_family(kind: str) -> str:
    """The family under which the error of a kind is reported."""
    if kind in _GEMM_KINDS:
        return "gemm"
    if kind.startswith("conv"):
        return "conv"
    if kind in ("_embedding_bag", "embedding"):
        return "embedding forward"
    if kind in ("_embedding_bag_backward", "embedding_dense_backward", "sparse_add", "sparse_update"):
        return "embedding backward"
    return "reduction" if kind in _REDUCTIONS else "elementwise"


def _is_sparse(signature: Signature, argument: str) -> bool:
    return signature.scalar(f"{argument}_layout") == "sparse_coo"


def describe_op(
    signature: Signature,
    operands: Iterable[Operand],
    caches: Caches,
    access: str = "",
    *,
    code: float = 0.0,
    inside: bool = False,
) -> Features:
    """The features of an op whose operands are where they are said to, and its code as many bytes away; `inside` a
    step, between other ops, or called by itself."""
    kind = get_kind(signature)
    given = tuple(operands)
    levels = split_by_level(given, caches.l2, caches.l3)
    if get_family(kind).startswith("embedding"):
        table = given[:1] if kind in TABLE_KINDS else ()
        work, place = _count_lookup_work(signature, access, split_by_level(table, caches.l2, caches.l3))
    else:
        work, place = _count_work(kind, signature)
    fetched = split_by_level([Operand(CODE_BYTES, int(code))], caches.l2, caches.l3)[1:] / CODE_BYTES
    state = [*(_STATE * levels[1:] / max(float(levels.sum()), 1.0)), *(_CODE_STATE * fetched), _INSIDE * inside]
    return Features(kind, get_family(kind), np.concatenate([[1.0], levels, fetched, work]), np.array([*place, *state]))


def _count_work(kind: str, signature: Signature) -> tuple[list[float], list[float]]:
    """Terms of work besides bytes, and the place among shapes."""
    if kind in _GEMM_KINDS:
        return _count_gemm_work(signature)
    if kind.startswith("conv"):
        return _count_conv_work(kind, signature)
    return _count_elementwise_work(signature)


def _count_gemm_work(signature: Signature) -> tuple[list[float], list[float]]:
    name = signature.name.partition("::")[2]
    first = _GEMMS[name]
    left, right = signature.inputs[first], signature.inputs[first + 1]
    batch = prod(left.shape[:-2])
    m, k, n = left.shape[-2], left.shape[-1], right.shape[-1]
    transposed = [float(_is_transposed(left)), float(_is_transposed(right))]
    place = [log2(max(size, 1)) for size in (m, n, k)] + [3.0 * flag for flag in transposed]
    flops = 2.0 * batch * m * n * k
    # kernels work in tiles: the last one costs as much as a full one
    tiled = [2.0 * batch * _count_tiles(m, 8) * n * k, 2.0 * batch * m * _count_tiles(n, _LANES) * k]
    packed = [float(batch * m * k), float(batch * n * k), float(batch * m * n)]
    last = log2(max(_count_tiles(n, _LANES) / max(n, 1), 1.0))
    ragged = [_RAGGED * (length % _LANES > 0) for length in (m, n, k)] + [_RAGGED * (n % _LEAST_LANES > 0)]
    # columns that are one behind the other are dot products where they are few, and packed where they are many
    narrow = 2.0 * transposed[1] * max(log2(_LANES / max(n, 1)), 0.0)
    return [flops, float(batch), *tiled, *packed], [*place, 4.0 * last, log2(max(batch, 1)), *ragged, narrow]


def _count_tiles(size: int, tile: int) -> int:
    return -(-size // tile) * tile


def _is_transposed(spec: TensorSpec) -> bool:
    return len(spec.shape) >= 2 and spec.stride[-1] != 1 and spec.shape[-1] != 1


def _count_conv_work(kind: str, signature: Signature) -> tuple[list[float], list[float]]:
    backward = kind == "conv_backward"
    data, weight = (signature.inputs[1], signature.inputs[2]) if backward else signature.inputs[:2]
    out = signature.inputs[0] if backward else signature.outputs[0]
    pixels = prod(out.shape) / max(out.shape[1], 1)
    # channels come in blocks of the vector's lanes; images of a few channels have kernels of their own
    inner = weight.shape[1] if weight.shape[1] < 8 else _count_tiles(weight.shape[1], _LANES)
    outer = _count_tiles(out.shape[1], _LANES)
    area = prod(weight.shape[2:])
    flops = 2.0 * pixels * outer * inner * area
    mask = signature.scalar("output_mask")
    wanted = [float(bool(one)) for one in mask[:2]] if isinstance(mask, tuple) else [0.0, 1.0]
    blocked = [data.numel * inner / max(weight.shape[1], 1), pixels * outer, float(outer * inner * area)]
    stride = signature.scalar("stride")
    step = max(map(_count_whole, stride)) if isinstance(stride, tuple) and stride else 1
    groups = signature.scalar("groups")
    sizes = (pixels, out.shape[1], weight.shape[1], area, data.shape[-1], data.shape[0])
    place = [log2(max(size, 1)) for size in sizes]
    work = [wanted[0] * flops, wanted[1] * flops, *blocked, float(data.shape[0])]
    return work, [*place, 2.0 * step, 3.0 * wanted[0], log2(_count_whole(groups))]


def _count_whole(value: object) -> int:
    return value if isinstance(value, int) and value > 0 else 1


def count_lookups(signature: Signature) -> tuple[int, int, int]:
    """(lookups, rows of the table, row bytes) of an embedding op."""
    kind = get_kind(signature)
    if kind in ("sparse_add", "sparse_update"):
        indices, values = signature.inputs[-2:]
        rows = signature.inputs[0].shape[0] if kind == "sparse_update" else 0
        return indices.shape[-1], rows, values.itemsize * prod(values.shape[1:])
    weights = _count_whole(signature.scalar("num_weights"))
    if kind in ("_embedding_bag", "embedding"):
        table, indices = signature.inputs[0], signature.inputs[1]
        return indices.numel, table.shape[0], table.itemsize * table.shape[1]
    gradient, indices = signature.inputs[0], signature.inputs[1]
    return indices.numel, weights, gradient.itemsize * gradient.shape[-1]


def count_unique_rows(rows: int, lookups: int, access: str) -> float:
    """Different rows among this many lookups."""
    if rows <= 0:
        return float(lookups)
    distribution = parse_access(access) if access else Uniform()
    return min(make_row_classes(distribution, rows).count_unique_rows(lookups), float(rows))


def _count_lookup_work(signature: Signature, access: str, levels: FloatArray) -> tuple[list[float], list[float]]:
    """`levels` are the bytes of the table by where they are: a row from further away is a wait of its own."""
    lookups, rows, row_bytes = count_lookups(signature)
    unique = count_unique_rows(rows, lookups, access)
    bags = signature.outputs[0].shape[0] if signature.outputs and signature.outputs[0].shape else 1
    again = (lookups - unique) * row_bytes
    table = float(max(rows, 1) * row_bytes)
    _, near, far = unique * levels / max(float(levels.sum()), 1.0)
    # rows are anywhere: each is a wait of its own, and its lines come slower than those of a stream. So does the
    # address of its page; but rows in one page, and pages in one line of the page table, are looked for once, so that
    # each of many lookups takes less time
    unknown = max(1.0 - _TRANSLATED_BYTES / table, 0.0)
    pages, simulations = (
        unknown * _count_touched_blocks(table, block, unique) for block in (_PAGE_BYTES, _WALKED_BYTES)
    )
    translations = [unknown * unique, pages, simulations, simulations * far / max(unique, 1.0)]
    waits = [unique, near, far, *translations, float(levels[1]), float(levels[2])]
    work = [float(lookups), again, lookups * float(row_bytes), *waits]
    sizes = (lookups, row_bytes, unique * row_bytes, lookups / max(bags, 1), table)
    place = [log2(max(size, 1.0)) for size in sizes]
    return work, place


def _count_touched_blocks(table: float, block: float, rows: float) -> float:
    """How many blocks of this many bytes of a table hold one or more of this many rows that are anywhere in it."""
    blocks = max(table / block, 1.0)
    return blocks * -expm1(-rows / blocks)


def count_op_flops(features: Features) -> float:
    """Multiplications and additions of a GEMM or a convolution; 0 for other ops."""
    return float(features.terms[_list_flop_terms(features)].sum())


def _list_flop_terms(features: Features) -> slice:
    return slice(WORK, WORK + {"gemm": 1, "conv": 2}.get(features.family, 0))


def estimate_rough_prices(features: Features) -> FloatArray:
    """About what each term of an op costs on a core of any kind, in seconds."""
    prices = np.zeros(len(features.terms))
    prices[0], prices[1:4] = _ROUGH_CALL, _ROUGH_BYTE
    prices[_list_flop_terms(features)] = _ROUGH_FLOP
    return prices


def estimate_rough_seconds(signature: Signature) -> float:
    """About how long an op takes on a core of any kind (10 GB/s, 50 Gflop/s)."""
    features = describe_op(signature, (), Caches(1.0, 1.0))
    return float(features.terms @ estimate_rough_prices(features)) + _ROUGH_BYTE * sum(count_touched_bytes(signature))


def count_touched_bytes(signature: Signature, access: str = "") -> list[float]:
    """Bytes that an op touches of each input and output: of a table only the rows that are looked up."""
    sizes = [float(spec.nbytes) for spec in (*signature.inputs, *signature.outputs)]
    kind = get_kind(signature)
    if kind in TABLE_KINDS:
        lookups, rows, row_bytes = count_lookups(signature)
        sizes[0] = min(sizes[0], count_unique_rows(rows, lookups, access) * row_bytes)
        if kind == "sparse_update":
            sizes[len(signature.inputs)] = 0.0  # written in place: the same rows
    return sizes


def _count_elementwise_work(signature: Signature) -> tuple[list[float], list[float]]:
    specs = (*signature.inputs, *signature.outputs)
    made = signature.outputs[0].numel if signature.outputs else 1
    window = signature.scalar("kernel_size")
    pooled = made * prod(map(_count_whole, window)) if isinstance(window, tuple) else 0
    numel = max(pooled, *(spec.numel for spec in specs), 1)
    strided = sum(spec.numel for spec in specs if _is_transposed(spec))
    blocks = any(not spec.is_contiguous for spec in specs)
    width = signature.inputs[0].shape[-1] if signature.inputs and signature.inputs[0].shape else 1
    sizes = [log2(max(size, 1)) for size in (numel, width, made)]
    return [float(numel), float(strided)], [*sizes, 3.0 * (strided > 0), 3.0 * blocks]
