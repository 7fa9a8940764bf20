"""Programs to and from plain JSON values; nothing read here is trusted."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias, TypeVar

from traincast.ir.ops import Scalar, Signature, TensorSpec
from traincast.ir.symbolic import SizeRef
from traincast.utils.errors import TraincastError, shorten_value

Json: TypeAlias = "None | bool | int | float | str | list[Json] | dict[str, Json]"
T = TypeVar("T", str, int, bool, list["Json"], dict[str, "Json"])

_KINDS = {str: "text", int: "an integer", bool: "true or false", list: "a list", dict: "an object"}
_MAX_DEPTH = 8  # a limit against damaged files: arguments of PyTorch's ops are lists of numbers at most


def read_member(table: dict[str, Json], key: str, kind: type[T]) -> T:
    """The value under `key`, which must be of `kind`."""
    if key not in table:
        raise TraincastError(f"'{key}' is missing in workload.json")
    return check_type(table[key], kind, f"'{key}'")


def check_type(value: Json, kind: type[T], what: str) -> T:
    """The value itself when it is of exactly this JSON type."""
    if type(value) is not kind:
        raise TraincastError(f"{what} in workload.json must be {_KINDS[kind]}, not {shorten_value(value)}")
    return value


def check_list_of(value: Json, kind: type[T], what: str) -> list[T]:
    """The value itself when it is a list of exactly this JSON type."""
    items = check_type(value, list, what)
    good = [item for item in items if type(item) is kind]
    if len(good) < len(items):
        wrong = next(item for item in items if type(item) is not kind)
        raise TraincastError(f"an entry of {what} in workload.json must be {_KINDS[kind]}, not {shorten_value(wrong)}")
    return good


def encode_signatures(signatures: tuple[Signature, ...]) -> dict[str, Json]:
    """The distinct tensor specs as `tensors`, and the signatures that refer to them by index."""
    specs: dict[TensorSpec, int] = {}

    def index(spec: TensorSpec) -> Json:
        return specs.setdefault(spec, len(specs))

    rows: list[Json] = [
        [
            s.name,
            s.overload,
            [index(spec) for spec in s.inputs],
            [index(spec) for spec in s.outputs],
            [[name, _encode_scalar(value)] for name, value in s.scalars],
            [[name, count] for name, count in s.groups],
        ]
        for s in signatures
    ]
    tensors: list[Json] = [[t.dtype, t.device, list(t.shape), list(t.stride)] for t in specs]
    return {"tensors": tensors, "signatures": rows}


def decode_signatures(table: dict[str, Json]) -> tuple[Signature, ...]:
    """The signatures that `encode_signatures` wrote."""
    specs = [_decode_spec(row) for row in read_member(table, "tensors", list)]

    def spec(value: Json) -> TensorSpec:
        number = check_type(value, int, "a tensor number")
        if not 0 <= number < len(specs):
            raise TraincastError(f"a signature refers to tensor form {number} of {len(specs)}")
        return specs[number]

    return tuple([_decode_signature(row, spec) for row in read_member(table, "signatures", list)])


def _decode_spec(row: Json) -> TensorSpec:
    dtype, device, shape, stride = _check_fields(row, 4, "a tensor form")
    return TensorSpec(
        tuple(check_list_of(shape, int, "a shape")),
        tuple(check_list_of(stride, int, "a stride")),
        check_type(dtype, str, "a dtype"),
        check_type(device, str, "a device"),
    )


def _decode_signature(row: Json, spec: Callable[[Json], TensorSpec]) -> Signature:
    name, overload, inputs, outputs, scalars, groups = _check_fields(row, 6, "a signature")
    return Signature(
        name=check_type(name, str, "an op name"),
        inputs=tuple([spec(item) for item in check_type(inputs, list, "inputs")]),
        outputs=tuple([spec(item) for item in check_type(outputs, list, "outputs")]),
        scalars=tuple([_decode_argument(item) for item in check_type(scalars, list, "scalars")]),
        groups=tuple([_decode_group(item) for item in check_type(groups, list, "groups")]),
        overload=check_type(overload, str, "an overload"),
    )


def _decode_argument(row: Json) -> tuple[str, Scalar]:
    name, value = _check_fields(row, 2, "a scalar argument")
    return check_type(name, str, "an argument name"), _decode_scalar(value, _MAX_DEPTH)


def _decode_group(row: Json) -> tuple[str, int]:
    name, count = _check_fields(row, 2, "a tensor group")
    return check_type(name, str, "an argument name"), check_type(count, int, "a group's count")


def _check_fields(row: Json, count: int, what: str) -> list[Json]:
    items = check_type(row, list, what)
    if len(items) != count:
        raise TraincastError(f"{what} in workload.json must have {count} entries, not {len(items)}")
    return items


def _encode_scalar(value: Scalar) -> Json:
    """JSON has no tuple, no infinity and no reference to a size: the last two become one-key objects."""
    if isinstance(value, tuple):
        return [_encode_scalar(item) for item in value]
    if isinstance(value, SizeRef):
        return {"size": int(value)}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": repr(value)}
    return value


def _decode_scalar(value: Json, depth: int) -> Scalar:
    if isinstance(value, list):
        if not depth:
            raise TraincastError(f"a scalar argument in workload.json is nested deeper than {_MAX_DEPTH}")
        return tuple([_decode_scalar(item, depth - 1) for item in value])
    if isinstance(value, dict):
        if list(value) == ["size"]:
            return SizeRef(read_member(value, "size", int))
        if value in ({"float": "inf"}, {"float": "-inf"}, {"float": "nan"}):
            return float(read_member(value, "float", str))
        raise TraincastError(f"a scalar argument in workload.json is {shorten_value(value)}, which means nothing")
    return value
