"""What a trace recorded about an op's arguments, as tensors. Strides and devices are not recorded."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import msgspec

from traincast.workload.ops import TensorSpec

# every name that Kineto and execution traces have for an element type
DTYPES = {
    "float": "float32", "double": "float64", "c10::Half": "float16", "c10::BFloat16": "bfloat16",
    "long int": "int64", "long": "int64", "int": "int32", "short": "int16", "short int": "int16",
    "signed char": "int8", "unsigned char": "uint8", "bool": "bool",
    "Float": "float32", "Double": "float64", "Half": "float16", "BFloat16": "bfloat16", "Long": "int64",
}  # fmt: skip
_NOT_A_TENSOR = frozenset({"Scalar", "Int", "Bool", "Double", "Device", "Stream", "Number", "None", "String", "Long"})
_ELEMENT = re.compile(r"Tensor\(([^()]*)\)")
_MAX_DIMENSION = 1 << 48


@dataclass(frozen=True, slots=True)
class Recorded:
    """The tensors of each argument in order (none for a number), of the outputs (None where not recorded), and whether
    some argument is a list whose shapes were not recorded."""

    inputs: tuple[tuple[TensorSpec, ...], ...]
    outputs: tuple[TensorSpec, ...] | None
    incomplete: bool

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        """All input tensors in order."""
        return tuple(spec for argument in self.inputs for spec in argument)


def contiguous(shape: tuple[int, ...], dtype: str, device: str = "cuda") -> TensorSpec:
    """A tensor in row-major order."""
    stride: list[int] = []
    step = 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    return TensorSpec(shape, tuple(reversed(stride)), dtype, device)


@lru_cache(maxsize=1 << 14)
def parse_arguments(details: bytes) -> Recorded | None:
    """The recorded arguments of an op; None where no shapes were recorded or they make no sense."""
    try:
        document = msgspec.json.decode(details or b"null")
    except (msgspec.DecodeError, RecursionError):
        return None
    if not isinstance(document, dict) or not isinstance(document.get("dims"), list):
        return None
    dims, types = document["dims"], document.get("types")
    if not isinstance(types, list) or len(types) != len(dims):
        return None
    arguments = [_argument(d, str(t)) for d, t in zip(dims, types, strict=True)]
    out_dims, out_types = document.get("output_dims"), document.get("output_types")
    outputs: tuple[TensorSpec, ...] | None = None
    if isinstance(out_dims, list) and isinstance(out_types, list) and len(out_dims) == len(out_types):
        found = [_argument(d, str(t)) for d, t in zip(out_dims, out_types, strict=True)]
        outputs = tuple(spec for argument in found for spec in argument or ())
    return Recorded(
        inputs=tuple(argument or () for argument in arguments),
        outputs=outputs or None,
        incomplete=any(argument is None for argument in arguments),
    )


def _argument(dims: Any, kind: str) -> tuple[TensorSpec, ...] | None:
    """The tensors of one argument; None for a list of tensors without shapes."""
    elements = _ELEMENT.findall(kind)
    if kind.startswith("GenericList[") and elements:
        kinds = [_ELEMENT.findall(member) for member in kind[len("GenericList[") :].split(",")]
        if not isinstance(dims, list) or len(dims) != len(kinds):
            return None
        specs = [_tensor(d, member[0]) for d, member in zip(dims, kinds, strict=True) if member]
        return tuple(spec for spec in specs if spec is not None)
    if kind == "TensorList":
        return None
    if kind in _NOT_A_TENSOR and not dims:
        return ()
    spec = _tensor(dims, elements[0] if elements else kind)
    return () if spec is None else (spec,)


def _tensor(dims: Any, element: str) -> TensorSpec | None:
    if element not in DTYPES or not isinstance(dims, list):
        return None
    if not all(type(size) is int and 0 <= size < _MAX_DIMENSION for size in dims):
        return None
    return contiguous(tuple(dims), DTYPES[element])
