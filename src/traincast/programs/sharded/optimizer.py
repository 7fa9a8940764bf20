"""Optimizer steps over lists of tensors (`_foreach_*`), as PyTorch 2 runs them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from traincast.programs.dlrm.optimizers import LEARNING_RATE, TITLES
from traincast.programs.sharded.tape import RankTape
from traincast.programs.tape import Ref, Scalars
from traincast.workload.ops import Phase, StorageKind

_STATES = {"sgd": 0, "adagrad": 1, "adam": 2}
_BETAS, _COUNT = (0.9, 0.999), 2


@dataclass(frozen=True, slots=True)
class Stepped:
    """A parameter with its optimizer state: a step count on the host, and moments."""

    parameter: Ref
    count: Ref | None
    moments: tuple[Ref, ...]


def with_state(tape: RankTape, optimizer: str, parameters: Sequence[Ref]) -> list[Stepped]:
    """Optimizer state of parameters, there before the step."""
    kind = StorageKind.OPTIMIZER_STATE
    return [
        Stepped(
            parameter,
            tape.resident((), kind, device="cpu") if _STATES[optimizer] else None,
            tuple(tape.resident(parameter.shape, kind, parameter.spec.dtype) for _ in range(_STATES[optimizer])),
        )
        for parameter in parameters
    ]


def zero_grad(tape: RankTape, optimizer: str) -> None:
    """Drops all gradients: host time only."""
    title = TITLES[optimizer]
    tape.scope(f"Optimizer.zero_grad#{title}.zero_grad", Phase.OTHER)


def optimizer_step(tape: RankTape, optimizer: str, stepped: Sequence[Stepped], grads: Sequence[Ref]) -> None:
    """One update of all parameters from their gradients."""
    title = TITLES[optimizer]
    tape.scope(f"Optimizer.step#{title}.step", Phase.OPTIMIZER)
    parameters = [each.parameter for each in stepped]
    if optimizer == "sgd":
        lists = [("self", parameters), ("other", grads)]
        tape.op("aten::_foreach_add_", lists, [], [("alpha", -LEARNING_RATE)], overload="List")
        return
    counts = [each.count for each in stepped if each.count is not None]
    one = tape.resident((), StorageKind.ACTIVATION, device="cpu")
    tape.op("aten::lift_fresh", [("self", one)], [one])
    tape.op("aten::_foreach_add_", [("self", counts), ("other", one)], [], [("alpha", 1.0)], overload="Tensor")
    if optimizer == "adagrad":
        _adagrad(tape, stepped, parameters, grads, counts)
    else:
        _adam(tape, stepped, parameters, grads, counts)


def _read(tape: RankTape, counts: Sequence[Ref]) -> None:
    for count in counts:
        tape.op("aten::_local_scalar_dense", [("self", count)])


def _scalar(tape: RankTape, name: str, on: Sequence[Ref], value: float) -> None:
    tape.op(f"aten::_foreach_{name}", [("self", on)], [], [("scalar", value)], overload="Scalar")


def _root(tape: RankTape, moments: Sequence[Ref]) -> list[Ref]:
    roots = [tape.new(moment.shape, moment.spec.dtype) for moment in moments]
    tape.op("aten::_foreach_sqrt", [("self", moments)], roots)
    return roots


def _adagrad(
    tape: RankTape, stepped: Sequence[Stepped], parameters: list[Ref], grads: Sequence[Ref], counts: Sequence[Ref]
) -> None:
    _read(tape, counts)
    moments = [each.moments[0] for each in stepped]
    squares = [("self", moments), ("tensor1", grads), ("tensor2", grads)]
    tape.op("aten::_foreach_addcmul_", squares, [], [("value", 1)], overload="Scalar")
    roots = _root(tape, moments)
    _scalar(tape, "add_", roots, 1e-10)
    scaled = [tape.new(grad.shape, grad.spec.dtype) for grad in grads]
    factors: Scalars = [("scalars", (-LEARNING_RATE,) * len(grads))]
    tape.op("aten::_foreach_mul", [("self", grads)], scaled, factors, overload="ScalarList")
    quotient = [("self", parameters), ("tensor1", scaled), ("tensor2", roots)]
    tape.op("aten::_foreach_addcdiv_", quotient, [], [("value", 1)], overload="Scalar")
    tape.free(*roots, *scaled)


def _adam(
    tape: RankTape, stepped: Sequence[Stepped], parameters: list[Ref], grads: Sequence[Ref], counts: Sequence[Ref]
) -> None:
    """AdamW at its second step (a capture warms up with one)."""
    first, second = ([each.moments[i] for each in stepped] for i in (0, 1))
    _scalar(tape, "mul_", parameters, 1 - LEARNING_RATE * 0.01)
    ends = [("self", first), ("tensors1", grads)]
    tape.op("aten::_foreach_lerp_", ends, [], [("weight", 1 - _BETAS[0])], overload="Scalar")
    _scalar(tape, "mul_", second, _BETAS[1])
    squares = [("self", second), ("tensor1", grads), ("tensor2", grads)]
    tape.op("aten::_foreach_addcmul_", squares, [], [("value", 1 - _BETAS[1])], overload="Scalar")
    _read(tape, counts)
    _read(tape, counts)
    roots = _root(tape, second)
    corrected: Scalars = [("scalars", ((1 - _BETAS[1] ** _COUNT) ** 0.5,) * len(roots))]
    tape.op("aten::_foreach_div_", [("self", roots)], [], corrected, overload="ScalarList")
    _scalar(tape, "add_", roots, 1e-08)
    quotient = [("self", parameters), ("tensor1", first), ("tensor2", roots)]
    steps: Scalars = [("scalars", (-LEARNING_RATE / (1 - _BETAS[0] ** _COUNT),) * len(roots))]
    tape.op("aten::_foreach_addcdiv_", quotient, [], steps, overload="ScalarList")
    tape.free(*roots)
