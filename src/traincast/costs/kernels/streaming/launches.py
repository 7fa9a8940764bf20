"""The commonest launches: element-wise kernels, fills, copies, transfers, reductions of these tensors."""

from __future__ import annotations

from collections.abc import Sequence

from traincast.costs.kernels.contract import KernelCall
from traincast.costs.kernels.registry import (
    Control,
    ControlKind,
    Item,
    count_real_bytes,
    get_compute_type,
    has_same_layout,
    is_dense,
    sum_real_bytes,
)
from traincast.costs.kernels.streaming import COPY, ELEMENTWISE, MEMCPY, REDUCTION
from traincast.ir.ops import DTYPE_BYTES, TensorSpec

STREAM_SYNCHRONIZE = Control(ControlKind.STREAM_SYNCHRONIZE)
_LEAVES_L2 = 4 << 20  # bytes of one operand that are pushed out before they come round again
CHEAP_KINDS = frozenset({"add", "mul", "div", "relu", "copy", "compare"})  # cheaper than offsets are


def make_elementwise_call(
    kind: str,
    reads: Sequence[TensorSpec],
    writes: Sequence[TensorSpec],
    *,
    compute: str | None = None,
    bytes_read: int | None = None,
) -> KernelCall:
    """One element-wise kernel that reads and writes these tensors once, or reads `bytes_read`."""
    largest = max((*writes, *reads), key=lambda spec: spec.numel)
    return ELEMENTWISE.call(
        kind,
        compute or get_compute_type(writes[0] if writes else reads[0]),
        elements=max((spec.numel for spec in writes), default=largest.numel),
        bytes_read=sum_real_bytes(reads) if bytes_read is None else bytes_read,
        bytes_written=sum_real_bytes(writes),
        tensors=len(reads) + len(writes),
    )


def make_iterated_call(
    kind: str, reads: Sequence[TensorSpec], writes: Sequence[TensorSpec], *, compute: str | None = None
) -> KernelCall:
    """As `elementwise`, run by ATen's TensorIterator: operands that do not be in memory alike are simulated element by
    element, which costs more than cheap arithmetic. Single numbers do not count."""
    result = writes[0]
    tensors = [spec for spec in (*reads, *writes) if spec.numel > 1]
    alike = is_dense(result) and all(has_same_layout(spec, result) for spec in tensors)
    read = sum(_count_read_bytes(spec, result.shape) for spec in reads)
    simulated = kind if alike or kind not in CHEAP_KINDS else "strided"
    return make_elementwise_call(simulated, reads, writes, compute=compute, bytes_read=read)


def _count_read_bytes(spec: TensorSpec, shape: Sequence[int]) -> int:
    """Bytes of an operand broadcast to `shape` that come from memory: a block that has left the L2 by the time it is
    wanted again is read again."""
    missing = len(shape) - len(spec.shape)
    block = total = DTYPE_BYTES[spec.dtype]
    for i in reversed(range(len(shape))):
        size, stride = (1, 0) if i < missing else (spec.shape[i - missing], spec.stride[i - missing])
        if size > 1 and stride:
            block, total = block * size, total * size
        elif block >= _LEAVES_L2:
            total *= shape[i]
    return total


def make_small_kernel(
    kind: str = "fill", *, elements: int = 1, compute: str = "int32", item_bytes: int = 4
) -> KernelCall:
    """A kernel whose time is its launch: bookkeeping over `elements` numbers."""
    nbytes = elements * item_bytes
    read = 0 if kind == "fill" else nbytes
    return ELEMENTWISE.call(
        kind,
        compute,
        elements=elements,
        bytes_read=read,
        bytes_written=nbytes,
        tensors=1 if kind == "fill" else 2,
    )


def make_fill_kernel(spec: TensorSpec) -> KernelCall:
    """A kernel that writes a constant."""
    return make_elementwise_call("fill", (), (spec,))


def make_layout_copy(source: TensorSpec, nbytes_written: int | None = None) -> KernelCall:
    """A kernel that copies a tensor into another order of elements."""
    written = source.nbytes if nbytes_written is None else nbytes_written
    return COPY.call(
        "layout",
        get_compute_type(source),
        elements=source.numel,
        bytes_read=count_real_bytes(source),
        bytes_written=written,
        tensors=2,
    )


def make_memcpy(kind: str, nbytes: int) -> KernelCall:
    """A copy by the copy engine or a memset, of `nbytes` bytes."""
    return MEMCPY.call(kind, "int8", bytes=nbytes)


def make_device_copy(source: TensorSpec, target: TensorSpec) -> tuple[Item, ...]:
    """What `copy_` between two tensors of one device runs: a memcpy, a cast, or a re-ordering kernel."""
    if target.numel == 0:
        return ()
    if has_same_layout(source, target) and is_dense(target):
        if source.dtype == target.dtype:
            return (make_memcpy("d2d", target.nbytes),)
        return (make_elementwise_call("copy", (source,), (target,)),)
    if count_real_bytes(source) < source.nbytes and is_dense(target):
        return (make_iterated_call("copy", (source,), (target,)),)
    return (make_layout_copy(source, target.nbytes),)


def make_reduction_call(
    kind: str, source: TensorSpec, outputs: Sequence[TensorSpec], *, extra_read: int = 0
) -> KernelCall:
    """One reduction kernel over `source` (`extra_read` more bytes of other tensors)."""
    return REDUCTION.call(
        kind,
        get_compute_type(source),
        elements=source.numel,
        outputs=max((spec.numel for spec in outputs), default=1),
        bytes_read=count_real_bytes(source) + extra_read,
        bytes_written=sum_real_bytes(outputs),
    )
