"""Costs of ops that their authors give: seconds, or flops and bytes as formulas of their shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from traincast.ir.formula import Formula
from traincast.ir.ops import Signature
from traincast.utils.errors import TraincastError, make_unknown_error, shorten_value

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
