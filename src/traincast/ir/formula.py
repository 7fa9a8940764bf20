"""Costs of ops that their authors give: seconds, or flops and bytes as formulas of an op's shapes (`2 * in0.numel *
in1[-1]`). Formulas are read, never evaluated as Python."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from traincast.ir.ops import Signature, TensorSpec
from traincast.utils.errors import TraincastError, make_unknown_error, shorten_value

_LONGEST, _MOST_PARTS, _LARGEST, _HIGHEST_POWER = 500, 200, 1e18, 8.0
_TWO: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}  # fmt: skip
_FUNCTIONS: dict[str, Callable[..., float]] = {
    "min": min, "max": max, "ceil": math.ceil, "floor": math.floor, "log2": math.log2, "sqrt": math.sqrt,
}  # fmt: skip
_ATTRIBUTES: dict[str, Callable[[TensorSpec], int]] = {
    "numel": lambda spec: spec.numel,
    "bytes": lambda spec: spec.nbytes,
    "ndim": lambda s: len(s.shape),
}
_FORM = (
    "use numbers, + - * / // **, parentheses, min and max of several, ceil, floor, log2, sqrt, tensors in0, in1, ..., "
    "out0, ... (in0.numel, in0.bytes, in0[1] is a size), and the op's own arguments"
)


@dataclass(frozen=True)
class Formula:
    """A formula of an op's tensors (`in0`, `out0`: `.numel`, `.bytes`, `.ndim`, `[dimension]`) and its arguments."""

    text: str

    def __post_init__(self) -> None:
        parts = list(ast.walk(self._tree))
        if len(parts) > _MOST_PARTS:
            raise TraincastError(
                f"formula {shorten_value(self.text)} has {len(parts)} parts; at most {_MOST_PARTS} are read"
            )
        for part in parts:
            if not isinstance(part, _ALLOWED) or (isinstance(part, ast.Call) and not _is_known_call(part)):
                raise TraincastError(f"formula {shorten_value(self.text)} has something else than a formula; {_FORM}")

    @cached_property
    def _tree(self) -> ast.expr:
        if len(self.text) > _LONGEST:
            raise TraincastError(f"a formula has {len(self.text)} characters; at most {_LONGEST} are read")
        try:
            return ast.parse(self.text, mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            raise TraincastError(f"formula {shorten_value(self.text)} cannot be read; {_FORM}") from None

    def of(self, signature: Signature) -> float:
        """Its value for an op: a finite number from 0."""
        try:
            value = float(_evaluate_part(self._tree, signature))
        except (ArithmeticError, ValueError) as error:
            raise TraincastError(
                f"formula {shorten_value(self.text)} has no value for {signature.name}: {error}"
            ) from None
        if not 0 <= value <= _LARGEST:
            raise TraincastError(
                f"formula {shorten_value(self.text)} is {value:g} for {signature.name}; it must be between 0 and "
                f"{_LARGEST:g}"
            )
        return value


_ALLOWED = (
    ast.BinOp,
    ast.UnaryOp,
    ast.USub,
    ast.UAdd,
    ast.Constant,
    ast.Name,
    ast.Attribute,
    ast.Subscript,
    ast.Call,
    ast.Load,
    ast.Pow,
    *_TWO,
)


def _is_known_call(part: ast.Call) -> bool:
    if not isinstance(part.func, ast.Name) or part.func.id not in _FUNCTIONS or part.keywords:
        return False
    return len(part.args) > 1 if part.func.id in ("min", "max") else len(part.args) == 1


def _evaluate_part(part: ast.expr, signature: Signature) -> float:
    match part:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return float(number)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            power = _evaluate_part(right, signature)
            if abs(power) > _HIGHEST_POWER:
                raise ValueError(f"a power of {power:g} is too high")
            return float(math.pow(_evaluate_part(left, signature), power))
        case ast.BinOp(left=left, op=op, right=right):
            return _TWO[type(op)](_evaluate_part(left, signature), _evaluate_part(right, signature))
        case ast.UnaryOp(op=op, operand=operand):
            value = _evaluate_part(operand, signature)
            return -value if isinstance(op, ast.USub) else value
        case ast.Call(func=ast.Name(id=name), args=arguments):
            return float(_FUNCTIONS[name](*(_evaluate_part(argument, signature) for argument in arguments)))
        case ast.Attribute(value=ast.Name(id=name), attr=attribute) if attribute in _ATTRIBUTES:
            return float(_ATTRIBUTES[attribute](_find_tensor(name, signature)))
        case ast.Subscript(value=ast.Name(id=name), slice=place):
            return _read_size(_find_tensor(name, signature), name, _evaluate_part(place, signature))
        case ast.Name(id=name):
            return _read_argument(name, signature)
    raise ValueError(f"'{ast.unparse(part)}' means nothing; {_FORM}")


def _find_tensor(name: str, signature: Signature) -> TensorSpec:
    for prefix, specs in (("in", signature.inputs), ("out", signature.outputs)):
        number = name.removeprefix(prefix)
        if name.startswith(prefix) and number.isdigit():
            if int(number) >= len(specs):
                raise ValueError(f"it has {len(specs)} tensors '{prefix}...', and {name} is none of them")
            return specs[int(number)]
    raise ValueError(f"'{name}' is no tensor; tensors are in0, in1, ... and out0, ...")


def _read_size(spec: TensorSpec, name: str, place: float) -> float:
    dimensions = len(spec.shape)
    if place != int(place) or not -dimensions <= place < dimensions:
        raise ValueError(f"{name} has {dimensions} dimensions, and {place:g} is none of them")
    return float(spec.shape[int(place)])


def _read_argument(name: str, signature: Signature) -> float:
    value = dict(signature.scalars).get(name)
    if isinstance(value, int | float):
        return float(value)
    known = [argument for argument, held in signature.scalars if isinstance(held, int | float)]
    raise ValueError(f"'{name}' is no number of its arguments ({', '.join(known) or 'it has none'})")


Cost = Formula | Callable[[Signature], float] | None
PARTS = ("seconds", "flops", "bytes")
_MOST = 1000  # ops with a cost of their own in one file; chosen as a limit against damaged ones


@dataclass(frozen=True)
class OpCost:
    """What one call of an op costs on a device: at least `seconds`, `flops` at the device's rate, `bytes` at its
    bandwidth, whichever takes longest. Each is a number, a formula (see `Formula`), or in Python a function of the
    op's `Signature`; None says nothing."""

    op: str
    seconds: Cost = None
    flops: Cost = None
    bytes: Cost = None

    def __post_init__(self) -> None:
        if "::" not in self.op:
            raise TraincastError(f"{shorten_value(self.op)} is no name of an op; give NAMESPACE::NAME, as in a result")
        for part in PARTS:
            value = getattr(self, part)
            if isinstance(value, str | int | float) and not isinstance(value, bool):
                object.__setattr__(self, part, Formula(str(value)))
            elif not (value is None or isinstance(value, Formula) or callable(value)):
                raise TraincastError(f"{part} of {self.op} must be a number or a formula, not {shorten_value(value)}")
        if all(getattr(self, part) is None for part in PARTS):
            raise TraincastError(f"the cost of {self.op} says nothing; give seconds, or flops and bytes")

    def of(self, signature: Signature) -> tuple[float, float, float]:
        """(seconds, flops, bytes) of a call; 0 where nothing is said."""
        return tuple(_evaluate_cost(getattr(self, part), signature) for part in PARTS)  # type: ignore[return-value]

    def as_text(self) -> dict[str, str]:
        """What is given, as formulas; functions of Python have none."""
        given = {part: getattr(self, part) for part in PARTS if getattr(self, part) is not None}
        return {part: cost.text if isinstance(cost, Formula) else "a Python function" for part, cost in given.items()}


def _evaluate_cost(cost: Cost, signature: Signature) -> float:
    if cost is None:
        return 0.0
    value = cost.of(signature) if isinstance(cost, Formula) else float(cost(signature))
    if not 0 <= value < float("inf"):
        raise TraincastError(f"a given cost of {signature.name} is {value}; give a number from 0")
    return value


def read_op_costs(table: Mapping[str, Any], source: str) -> tuple[OpCost, ...]:
    """Costs of a table with one entry an op: `{"lib::op": {"flops": "2 * in0.numel", "bytes": ...}}`."""
    if len(table) > _MOST:
        raise TraincastError(f"{source} gives costs of {len(table)} ops; at most {_MOST} are read")
    costs = []
    for op, parts in table.items():
        if not isinstance(parts, dict):
            raise TraincastError(f"{source}: '{op}' must be a table of {', '.join(PARTS)}, not {shorten_value(parts)}")
        for part in parts:
            if part not in PARTS:
                raise make_unknown_error("part of a cost", str(part), PARTS, f"It stands at '{op}' in {source}.")
        costs.append(OpCost(str(op), **parts))
    return tuple(costs)


def merge_op_costs(first: Iterable[OpCost], second: Iterable[OpCost]) -> tuple[OpCost, ...]:
    """Both, the second ones in place of the first ones of the same op."""
    return tuple({cost.op: cost for cost in (*first, *second)}.values())
