"""What every lowering module needs: operands by name, the bytes really moved, and the commonest calls."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from traincast.errors import unknown
from traincast.kernels.call import KernelCall
from traincast.kernels.families import COPY, ELEMENTWISE, MEMCPY, REDUCTION
from traincast.kernels.registry import Control, ControlKind, Item
from traincast.workload.ops import Scalar, Signature, TensorSpec

STREAM_SYNCHRONIZE = Control(ControlKind.STREAM_SYNCHRONIZE)
_LEAVES_L2 = 4 << 20  # bytes of one operand that are pushed out before they come round again
_CHEAP = frozenset({"add", "mul", "div", "relu", "copy", "compare"})  # cheaper than offsets are

_COMPUTE = {
    "float64": "fp64", "float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "complex64": "fp32",
    "float8_e4m3fn": "fp8", "float8_e5m2": "fp8",
    "int64": "int64", "int32": "int32", "int16": "int16", "int8": "int8", "uint8": "int8", "bool": "bool",
}  # fmt: skip


def compute_of(spec: TensorSpec) -> str:
    """The compute type of a tensor's element type."""
    if spec.dtype not in _COMPUTE:
        raise unknown("element type", spec.dtype, _COMPUTE, "Cast the tensor to a known type.")
    return _COMPUTE[spec.dtype]


def on_device(spec: TensorSpec) -> bool:
    """Whether the tensor lives in device memory."""
    return not spec.device.startswith("cpu")


def operand(signature: Signature, name: str, position: int) -> TensorSpec | None:
    """The tensor passed as argument `name`; by position among the inputs when argument names are unknown."""
    if signature.groups:
        found = signature.tensors(name)
        return found[0] if found else None
    return signature.inputs[position] if position < len(signature.inputs) else None


def required(signature: Signature, name: str, position: int) -> TensorSpec:
    """As `operand`, for an argument that the op cannot do without."""
    spec = operand(signature, name, position)
    assert spec is not None, f"{signature.name} has no tensor {name!r}"
    return spec


def read_operands(signature: Signature, *unread: str) -> list[TensorSpec]:
    """The device tensors an op reads: all inputs but `out` and the arguments named `unread`.

    A host tensor among the inputs of a device op is a scalar passed by value.
    """
    if not signature.groups:
        specs: Sequence[TensorSpec] = signature.inputs
    else:
        skip = {"out", *unread}
        specs = [s for name, _ in signature.groups if name not in skip for s in signature.tensors(name)]
    return [spec for spec in specs if on_device(spec)]


def real_bytes(spec: TensorSpec) -> int:
    """Bytes behind a tensor: what broadcasting repeats (stride 0) counts once."""
    elements = 1
    for size, stride in zip(spec.shape, spec.stride, strict=True):
        elements *= 1 if stride == 0 else size
    return elements * spec.itemsize


def total_bytes(specs: Iterable[TensorSpec]) -> int:
    """Real bytes of several tensors together."""
    return sum(real_bytes(spec) for spec in specs)


def is_dense(spec: TensorSpec) -> bool:
    """Whether the elements fill memory without gap or overlap, in whatever order of dimensions."""
    expected = 1
    for stride, size in sorted(
        (stride, size) for size, stride in zip(spec.shape, spec.stride, strict=True) if size != 1
    ):
        if stride != expected:
            return False
        expected *= size
    return True


def same_layout(a: TensorSpec, b: TensorSpec) -> bool:
    """Whether two tensors lie in memory alike (strides of dimensions of size 1 do not matter)."""
    if a.shape != b.shape:
        return False
    pairs = zip(a.shape, a.stride, b.stride, strict=True)
    return all(size == 1 or left == right for size, left, right in pairs)


def product(sizes: Iterable[int]) -> int:
    """Product of sizes."""
    result = 1
    for size in sizes:
        result *= size
    return result


def ints(value: Scalar, length: int, default: int) -> tuple[int, ...]:
    """A size argument that may be missing, one number for all dimensions, or one number a dimension."""
    if value is None or value == ():
        return (default,) * length
    if isinstance(value, tuple):
        numbers = tuple(int(item) for item in value if isinstance(item, int))
        return numbers * length if len(numbers) == 1 else numbers
    return (int(value),) * length


def elementwise(
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
        compute or compute_of(writes[0] if writes else reads[0]),
        elements=max((spec.numel for spec in writes), default=largest.numel),
        bytes_read=total_bytes(reads) if bytes_read is None else bytes_read,
        bytes_written=total_bytes(writes),
        tensors=len(reads) + len(writes),
    )


def iterated(
    kind: str, reads: Sequence[TensorSpec], writes: Sequence[TensorSpec], *, compute: str | None = None
) -> KernelCall:
    """As `elementwise`, run by ATen's TensorIterator: operands that do not lie in memory alike are walked element by
    element, which costs more than cheap arithmetic. Single numbers do not count."""
    result = writes[0]
    tensors = [spec for spec in (*reads, *writes) if spec.numel > 1]
    alike = is_dense(result) and all(same_layout(spec, result) for spec in tensors)
    read = sum(_read_bytes(spec, result.shape) for spec in reads)
    walked = kind if alike or kind not in _CHEAP else "strided"
    return elementwise(walked, reads, writes, compute=compute, bytes_read=read)


def _read_bytes(spec: TensorSpec, shape: Sequence[int]) -> int:
    """Bytes of an operand broadcast to `shape` that come from memory: a block that has left the L2 by the time it is
    wanted again is read again."""
    missing = len(shape) - len(spec.shape)
    block = total = spec.itemsize
    for i in reversed(range(len(shape))):
        own, stride = (1, 0) if i < missing else (spec.shape[i - missing], spec.stride[i - missing])
        if own > 1 and stride:
            block, total = block * own, total * own
        elif block >= _LEAVES_L2:
            total *= shape[i]
    return total


def small_kernel(kind: str = "fill", *, elements: int = 1, compute: str = "int32", item_bytes: int = 4) -> KernelCall:
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


def fill(spec: TensorSpec) -> KernelCall:
    """A kernel that writes a constant."""
    return elementwise("fill", (), (spec,))


def layout_copy(source: TensorSpec, nbytes_written: int | None = None) -> KernelCall:
    """A kernel that copies a tensor into another order of elements."""
    written = source.nbytes if nbytes_written is None else nbytes_written
    return COPY.call(
        "layout",
        compute_of(source),
        elements=source.numel,
        bytes_read=real_bytes(source),
        bytes_written=written,
        tensors=2,
    )


def memcpy(kind: str, nbytes: int) -> KernelCall:
    """A copy by the copy engine or a memset, of `nbytes` bytes."""
    return MEMCPY.call(kind, "int8", bytes=nbytes)


def device_copy(source: TensorSpec, target: TensorSpec) -> tuple[Item, ...]:
    """What `copy_` between two tensors of one device runs: a memcpy, a cast, or a re-ordering kernel."""
    if target.numel == 0:
        return ()
    if same_layout(source, target) and is_dense(target):
        if source.dtype == target.dtype:
            return (memcpy("d2d", target.nbytes),)
        return (elementwise("copy", (source,), (target,)),)
    if real_bytes(source) < source.nbytes and is_dense(target):
        return (iterated("copy", (source,), (target,)),)
    return (layout_copy(source, target.nbytes),)


def reduction(kind: str, source: TensorSpec, outputs: Sequence[TensorSpec], *, extra_read: int = 0) -> KernelCall:
    """One reduction kernel over `source` (`extra_read` more bytes of other tensors)."""
    return REDUCTION.call(
        kind,
        compute_of(source),
        elements=source.numel,
        outputs=max((spec.numel for spec in outputs), default=1),
        bytes_read=real_bytes(source) + extra_read,
        bytes_written=total_bytes(outputs),
    )


def reduction_kind(source: TensorSpec, dims: Sequence[int]) -> str:
    """How a reduction over `dims` walks memory: everything, along contiguous elements, or across them."""
    rank = len(source.shape)
    reduced = {dim % rank for dim in dims} if rank else set()
    live = [d for d in range(rank) if source.shape[d] != 1]
    if not dims or all(d in reduced for d in live):
        return "full"
    fastest = min((d for d in live if source.stride[d] != 0), key=lambda d: source.stride[d], default=live[-1])
    return "inner" if fastest in reduced else "outer"
