"""What a trace recorded about an op's arguments, as tensors. Devices are not recorded, strides by new versions only."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import msgspec

from traincast.ir.ops import TensorSpec

# every name that Kineto and execution traces have for an element type
DTYPES = {
    "float": "float32", "double": "float64", "c10::Half": "float16", "c10::BFloat16": "bfloat16",
    "long int": "int64", "long": "int64", "int": "int32", "short": "int16", "short int": "int16",
    "signed char": "int8", "unsigned char": "uint8", "bool": "bool",
    "Float": "float32", "Double": "float64", "Half": "float16", "BFloat16": "bfloat16", "Long": "int64",
}  # fmt: skip
_NOT_A_TENSOR = frozenset({"Scalar", "Int", "Bool", "Double", "Device", "Stream", "Number", "None", "String", "Long"})
_ELEMENT = re.compile(r"Tensor\(([^()]*)\)")
_NUMBERS = re.compile(r"\[?((?:-?\d{1,9}(?:, ?)?)+)\]?")
_MAX_DIMENSION = 1 << 48  # no memory holds a tensor with a longer side; products of sizes stay small


@dataclass(frozen=True, slots=True)
class RecordedArguments:
    """The tensors of each argument in order (none for a number), of the outputs (None where not recorded), and whether
    some argument is a list whose shapes were not recorded.

    `strided` says that strides were recorded (else tensors are given in row-major order), `values` are the arguments
    that are no tensors, as text ("" for those that are; none where not recorded).
    """

    inputs: tuple[tuple[TensorSpec, ...], ...]
    outputs: tuple[TensorSpec, ...] | None
    incomplete: bool
    strided: bool = False
    values: tuple[str, ...] = ()

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        """All input tensors in order."""
        return tuple(spec for argument in self.inputs for spec in argument)

    def get_integers(self, index: int) -> tuple[int, ...] | None:
        """Argument number `index` as integers ("[2, 2]", "1"); None where it was not recorded as such."""
        text = self.values[index] if index < len(self.values) else ""
        digits = _NUMBERS.fullmatch(text)
        return tuple(int(n) for n in digits[1].split(",") if n.strip()) if digits else None


def make_contiguous_tensor(shape: tuple[int, ...], dtype: str, device: str = "cuda") -> TensorSpec:
    """A tensor in row-major order."""
    stride: list[int] = []
    step = 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    return TensorSpec(shape, tuple(reversed(stride)), dtype, device)


@lru_cache(maxsize=1 << 14)
def parse_arguments(details: bytes) -> RecordedArguments | None:
    """The recorded arguments of an op; None where no shapes were recorded or they make no sense."""
    try:
        document = msgspec.json.decode(details or b"null")
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return None
    if not isinstance(document, dict) or not isinstance(document.get("dims"), list):
        return None
    dims, types = document["dims"], document.get("types")
    if not isinstance(types, list) or len(types) != len(dims):
        return None
    strides, values = document.get("strides"), document.get("values")
    laid_out = strides if isinstance(strides, list) and len(strides) == len(dims) else [None] * len(dims)
    arguments = [_read_argument(d, str(t), s) for d, t, s in zip(dims, types, laid_out, strict=True)]
    out_dims, out_types = document.get("output_dims"), document.get("output_types")
    outputs: tuple[TensorSpec, ...] | None = None
    if isinstance(out_dims, list) and isinstance(out_types, list) and len(out_dims) == len(out_types):
        results = [_read_argument(d, str(t)) for d, t in zip(out_dims, out_types, strict=True)]
        outputs = tuple(spec for argument in results for spec in argument or ())
    return RecordedArguments(
        inputs=tuple(argument or () for argument in arguments),
        outputs=outputs or None,
        incomplete=any(argument is None for argument in arguments),
        strided=laid_out is strides,
        values=tuple(value if isinstance(value, str) else "" for value in values) if isinstance(values, list) else (),
    )


def _read_argument(dims: Any, kind: str, strides: Any = None) -> tuple[TensorSpec, ...] | None:
    """The tensors of one argument; None for a list of tensors without shapes."""
    elements = _ELEMENT.findall(kind)
    if kind.startswith("GenericList[") and elements:
        kinds = [_ELEMENT.findall(member) for member in kind[len("GenericList[") :].split(",")]
        if not isinstance(dims, list) or len(dims) != len(kinds):
            return None
        known = isinstance(strides, list) and len(strides) == len(dims)
        laid_out = strides if known else [None] * len(dims)
        specs = [_read_tensor(d, member[0], s) for d, member, s in zip(dims, kinds, laid_out, strict=True) if member]
        return tuple(spec for spec in specs if spec is not None)
    if kind == "TensorList":
        return None
    if kind in _NOT_A_TENSOR and not dims:
        return ()
    spec = _read_tensor(dims, elements[0] if elements else kind, strides)
    return () if spec is None else (spec,)


def _read_tensor(dims: Any, element: str, strides: Any = None) -> TensorSpec | None:
    if element not in DTYPES or not _are_sizes(dims):
        return None
    if _are_sizes(strides) and len(strides) == len(dims):
        return TensorSpec(tuple(dims), tuple(strides), DTYPES[element])
    return make_contiguous_tensor(tuple(dims), DTYPES[element])


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(size) is int and 0 <= size < _MAX_DIMENSION for size in values)
