"""What a workload is made of, one object at a time: tensors, op signatures, ops and host scopes."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TypeAlias

Scalar: TypeAlias = "None | bool | int | float | str | tuple[Scalar, ...]"

DTYPE_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "float4_e2m1fn_x2": 1,  # a byte per element: tensors of it are short-lived copies, GEMMs count 4 bits and scales
    "int64": 8, "uint64": 8, "uint32": 4, "uint16": 2, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
    "complex64": 8, "complex128": 16,
}  # fmt: skip

DEVICES = ("cuda", "cpu", "cpu:pinned")
ACCUMULATE_GRAD = "torch::autograd::AccumulateGrad"
"""The scope in which autograd keeps the gradient of a parameter."""


_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


def find_layer(path: str) -> str:
    """The layer that a module belongs to: its path up to the first number, else its first two names.

    >>> layer_of("Bert.encoder.layers.3.mlp.fc1"), layer_of("Bert.embeddings.word.table")
    ('Bert.encoder.layers.3', 'Bert.embeddings')
    """
    number = _NUMBER.search(path)
    return path[: number.end()] if number else ".".join(path.split(".")[:2])


class Phase(IntEnum):
    """Which part of the training step an op belongs to."""

    INPUT = 0
    FORWARD = 1
    LOSS = 2
    BACKWARD = 3
    OPTIMIZER = 4
    OTHER = 5


class StorageKind(IntEnum):
    """What a storage holds, for the memory breakdown."""

    PARAMETER = 0
    GRADIENT = 1
    OPTIMIZER_STATE = 2
    INPUT = 3
    ACTIVATION = 4
    BUFFER = 5


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor's form without its identity. `shape` and `stride` count elements; `numel` is how many there are."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    device: str = "cuda"
    numel: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "numel", math.prod(self.shape))

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return DTYPE_BYTES[self.dtype]

    @property
    def nbytes(self) -> int:
        """Bytes of all elements (not of the storage behind them)."""
        return self.numel * self.itemsize

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements are in row-major order without gaps."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True


@dataclass(frozen=True, slots=True)
class Signature:
    """An op without the identity of its tensors: equal signatures run the same kernels.

    `name` is the dispatcher's name with its namespace, e.g. `aten::addmm`; `overload` e.g. `out`.
    `scalars` are the non-tensor arguments by name, in order. A `Tensor[]` argument is flattened into
    `inputs`; `groups` gives, per tensor argument in schema order, (argument name, number of tensors).
    """

    name: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    scalars: tuple[tuple[str, Scalar], ...] = ()
    groups: tuple[tuple[str, int], ...] = ()
    overload: str = ""

    def scalar(self, name: str, default: Scalar = None) -> Scalar:
        """The scalar argument of this name, or `default` when the op has none."""
        for key, value in self.scalars:
            if key == name:
                return value
        return default

    def tensors(self, argument: str) -> tuple[TensorSpec, ...]:
        """The tensors passed as this argument (empty when absent or None)."""
        return next((self.inputs[span] for name, span in self.spans() if name == argument), ())

    def spans(self) -> Iterator[tuple[str, slice]]:
        """Every tensor argument with its places among `inputs`."""
        start = 0
        for name, count in self.groups:
            yield name, slice(start, start + count)
            start += count


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of one program: `id` is unique per tensor, `storage` is shared by its views."""

    id: int
    storage: int
    spec: TensorSpec


@dataclass(frozen=True, slots=True)
class Op:
    """One op of a program, in host order.

    `scope` indexes the top-level host op it runs under (`aten::linear`, `AddmmBackward0`,
    `Optimizer.step#SGD.step`), `forward` is the index of the forward op whose gradient this is (or -1),
    `thread` and `stream` say where it is issued and where its kernels run.
    """

    index: int
    signature: Signature
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    phase: Phase
    module: str
    scope: int
    forward: int
    thread: int
    stream: int

    @property
    def name(self) -> str:
        """The dispatcher's name, e.g. `aten::addmm`."""
        return self.signature.name


@dataclass(frozen=True, slots=True)
class Scope:
    """A top-level host op: what the five host overheads are attached to. It may hold no op at all.

    `after` is the index of a scope on another thread that must have returned first, or -1.
    """

    index: int
    name: str
    phase: Phase
    thread: int
    after: int
    first_op: int
    num_ops: int
