"""What lowering is written in: calls and synchronisations, the operands of an op by name, and the table of ops."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeAlias

from traincast.costs.kernels.contract import KernelCall
from traincast.hardware.device import AMPERE, Device
from traincast.ir.formula import OpCost
from traincast.ir.ops import DTYPE_BYTES, Scalar, Signature, TensorSpec
from traincast.ir.workload import SEARCHED, Workload
from traincast.utils.errors import TraincastError, make_unknown_error


class ControlKind(IntEnum):
    """What the host or a stream does besides launching a kernel."""

    DEVICE_SYNCHRONIZE = 1
    STREAM_SYNCHRONIZE = 2
    EVENT_RECORD = 3
    STREAM_WAIT_EVENT = 4
    EVENT_SYNCHRONIZE = 5


@dataclass(frozen=True, slots=True)
class Control:
    """A synchronisation. `stream` is -1 for the stream of the op itself."""

    kind: ControlKind
    event: int = -1
    stream: int = -1


@dataclass(frozen=True, slots=True)
class LoweringContext:
    """What decides between kernels besides the op: the PyTorch version, whether GEMMs and convolutions in fp32 may
    use TF32, whether cuDNN has `searched` for its fastest convolutions, how many GPUs a node holds (global rank r sits
    on node r // gpus_per_node; 0 means that one node holds them all), the compute `capability` of an NVIDIA device (0:
    another vendor's), and costs that the ops' authors give."""

    framework_version: tuple[int, int] = (2, 13)
    tf32: bool = False
    tf32_convolutions: bool = False
    searched: bool = False
    gpus_per_node: int = 0
    capability: float = AMPERE
    costs: tuple[OpCost, ...] = ()

    def cost_of(self, op: str) -> OpCost | None:
        """The cost that is given of an op."""
        return next((cost for cost in self.costs if cost.op == op), None)


def make_lowering_context(workload: Workload, device: Device | None = None, *, tf32: bool = False) -> LoweringContext:
    """The context in which this workload's ops become kernels on this device (None: a GPU of compute capability 8.0
    without units for TF32). `tf32` allows it for all GEMMs and convolutions, else those run in it that the workload
    itself lets."""
    major, _, minor = workload.framework_version.partition(".")
    if not (major.isdigit() and minor.isdigit()):
        raise TraincastError(
            f"workload '{workload.name}' has no usable PyTorch version: {workload.framework_version!r}"
        )
    units = device is not None and "tf32" in device.peak_flops
    return LoweringContext(
        capability=AMPERE if device is None else device.compute_capability,
        framework_version=(int(major), int(minor)),
        tf32=units and (tf32 or "products" in workload.tf32),
        tf32_convolutions=units and (tf32 or "convolutions" in workload.tf32),
        searched=SEARCHED in workload.meta,
        costs=workload.costs,
    )


Item: TypeAlias = KernelCall | Control
Lowering: TypeAlias = Callable[[Signature, LoweringContext], tuple[Item, ...]]

LOWERINGS: dict[str, Lowering] = {}
"""By op name; filled when the families' modules are imported, see `kernels.lower`."""


def lowers(*names: str) -> Callable[[Lowering], Lowering]:
    """Registers a function as the lowering of the ops of these names."""

    def register(function: Lowering) -> Lowering:
        for name in names:
            if name in LOWERINGS:
                raise AssertionError(f"two lowerings for {name}")
            LOWERINGS[name] = function
        return function

    return register


_COMPUTE = {
    "float64": "fp64", "float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "complex64": "fp32",
    "complex128": "fp64",
    "float8_e4m3fn": "fp8", "float8_e5m2": "fp8", "float4_e2m1fn_x2": "fp4",
    "int64": "int64", "int32": "int32", "int16": "int16", "int8": "int8", "uint8": "int8", "bool": "bool",
    "uint64": "int64", "uint32": "int32", "uint16": "int16",
}  # fmt: skip


def get_compute_type(spec: TensorSpec) -> str:
    """The compute type of a tensor's element type."""
    if spec.dtype not in _COMPUTE:
        raise make_unknown_error("element type", spec.dtype, _COMPUTE, "Cast the tensor to a known type.")
    return _COMPUTE[spec.dtype]


def get_gemm_compute_type(spec: TensorSpec, *, tf32: bool) -> str:
    """The type a product or convolution of such tensors computes in: fp32 becomes tf32 where that is allowed."""
    compute = get_compute_type(spec)
    return "tf32" if compute == "fp32" and tf32 else compute


def is_on_device(spec: TensorSpec) -> bool:
    """Whether the tensor lives in device memory."""
    return not spec.device.startswith("cpu")


def find_operand(signature: Signature, name: str, position: int) -> TensorSpec | None:
    """The tensor passed as argument `name`; by position among the inputs when argument names are unknown."""
    if signature.groups:
        named = signature.tensors(name)
        return named[0] if named else None
    return signature.inputs[position] if position < len(signature.inputs) else None


def require_operand(signature: Signature, name: str, position: int) -> TensorSpec:
    """As `operand`, for an argument that the op cannot do without."""
    spec = find_operand(signature, name, position)
    if spec is None:
        raise TraincastError(f"it has no tensor '{name}'")
    return spec


def list_read_operands(signature: Signature, *unread: str) -> list[TensorSpec]:
    """The device tensors an op reads: all inputs but `out` and the arguments named `unread`.

    A host tensor among the inputs of a device op is a scalar passed by value.
    """
    if not signature.groups:
        specs: Sequence[TensorSpec] = signature.inputs
    else:
        skip = {"out", *unread}
        specs = [s for name, _ in signature.groups if name not in skip for s in signature.tensors(name)]
    return [spec for spec in specs if is_on_device(spec)]


def count_real_bytes(spec: TensorSpec) -> int:
    """Bytes behind a tensor: what broadcasting repeats (stride 0) counts once."""
    elements = 1
    for size, stride in zip(spec.shape, spec.stride, strict=True):
        elements *= 1 if stride == 0 else size
    return elements * DTYPE_BYTES[spec.dtype]


def sum_real_bytes(specs: Iterable[TensorSpec]) -> int:
    """Real bytes of several tensors together."""
    return sum(count_real_bytes(spec) for spec in specs)


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


def has_same_layout(a: TensorSpec, b: TensorSpec) -> bool:
    """Whether two tensors are in memory alike (strides of dimensions of size 1 do not matter)."""
    if a.shape != b.shape:
        return False
    pairs = zip(a.shape, a.stride, b.stride, strict=True)
    return all(size == 1 or left == right for size, left, right in pairs)


def read_integer_argument(signature: Signature, name: str, default: int = 0) -> int:
    """The integer passed as argument `name`, or the default."""
    value = signature.scalar(name, default)
    return value if isinstance(value, int) else default


def make_aten_names(*tables: str) -> tuple[str, ...]:
    """Names of ATen's ops from words."""
    return tuple(f"aten::{name}" for table in tables for name in table.split())


def read_integer_sizes(value: Scalar, length: int, default: int) -> tuple[int, ...]:
    """A size argument that may be missing, one number for all dimensions, or one number per dimension."""
    if value is None or value == ():
        return (default,) * length
    if isinstance(value, tuple):
        numbers = tuple(int(item) for item in value if isinstance(item, int))
        return numbers * length if len(numbers) == 1 else numbers
    return (int(value),) * length


def choose_reduction_kind(source: TensorSpec, dims: Sequence[int]) -> str:
    """How a reduction over `dims` walks memory: everything, along contiguous elements, or across them."""
    rank = len(source.shape)
    reduced = {dim % rank for dim in dims} if rank else set()
    live = [d for d in range(rank) if source.shape[d] != 1]
    if not dims or all(d in reduced for d in live):
        return "full"
    fastest = min((d for d in live if source.stride[d] != 0), key=lambda d: source.stride[d], default=live[-1])
    return "inner" if fastest in reduced else "outer"
