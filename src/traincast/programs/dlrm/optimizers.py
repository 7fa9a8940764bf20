"""The optimizers of a DLRM on a tape, one parameter at a time as PyTorch 1.8 runs them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from traincast.programs.tape import Ref, Scalars, Tape
from traincast.workload.ops import Phase, StorageKind

LEARNING_RATE = 0.01
TITLES = {"sgd": "SGD", "adagrad": "Adagrad", "adam": "AdamW"}
_STATES = {"sgd": 0, "adagrad": 1, "adam": 2}


@dataclass(frozen=True, slots=True)
class Stepped:
    """A parameter with its gradient and its optimizer state (a step count on the host, and moments)."""

    parameter: Ref
    grad: Ref
    count: Ref | None
    moments: tuple[Ref, ...]


def with_state(tape: Tape, optimizer: str, pairs: Sequence[tuple[Ref, Ref]]) -> list[Stepped]:
    """Optimizer state for (parameter, gradient) pairs, there before the step."""
    kind = StorageKind.OPTIMIZER_STATE
    return [
        Stepped(
            parameter,
            grad,
            tape.resident((), kind, device="cpu") if _STATES[optimizer] else None,
            tuple(tape.resident(parameter.shape, kind) for _ in range(_STATES[optimizer])),
        )
        for parameter, grad in pairs
    ]


def zero_grad(tape: Tape, optimizer: str, parameters: Sequence[Stepped]) -> None:
    """Writes zeros into every gradient."""
    title = TITLES[optimizer]
    tape.scope(f"Optimizer.zero_grad#{title}.zero_grad", Phase.OTHER)
    for each in parameters:
        tape.op("aten::zero_", [("self", each.grad)], [each.grad])


def step(tape: Tape, optimizer: str, parameters: Sequence[Stepped]) -> None:
    """One update of every parameter."""
    title = TITLES[optimizer]
    tape.scope(f"Optimizer.step#{title}.step", Phase.OPTIMIZER)
    update = {"sgd": _sgd, "adagrad": _adagrad, "adam": _adam}[optimizer]
    last: Ref | None = None
    for each in parameters:
        last = update(tape, each, last)
    _release(tape, last)


def _release(tape: Tape, previous: Ref | None) -> None:
    """The denominator of the parameter before lives until the name it is bound to is bound anew."""
    if previous is not None:
        tape.free(previous)


def _in_place(tape: Tape, name: str, arguments: Sequence[tuple[str, Ref]], scalars: Scalars, overload: str) -> None:
    tape.op(name, arguments, [arguments[0][1]], scalars, overload=overload)


def _sgd(tape: Tape, each: Stepped, _: Ref | None) -> None:
    arguments = [("self", each.parameter), ("other", each.grad)]
    _in_place(tape, "aten::add_", arguments, [("alpha", -LEARNING_RATE)], "Tensor")


def _adagrad(tape: Tape, each: Stepped, previous: Ref | None) -> Ref:
    assert each.count is not None
    (moment,) = each.moments
    _in_place(tape, "aten::add_", [("self", each.count)], [("other", 1), ("alpha", 1)], "Tensor")
    tape.op("aten::_local_scalar_dense", [("self", each.count)])
    squares = [("self", moment), ("tensor1", each.grad), ("tensor2", each.grad)]
    _in_place(tape, "aten::addcmul_", squares, [("value", 1)], "")
    root = tape.new(moment.shape)
    tape.op("aten::sqrt", [("self", moment)], [root])
    _in_place(tape, "aten::add_", [("self", root)], [("other", 1e-10), ("alpha", 1)], "Tensor")
    _release(tape, previous)
    quotient = [("self", each.parameter), ("tensor1", each.grad), ("tensor2", root)]
    _in_place(tape, "aten::addcdiv_", quotient, [("value", -LEARNING_RATE)], "")
    return root


def _adam(tape: Tape, each: Stepped, previous: Ref | None) -> Ref:
    """AdamW at its second step (a capture warms up with one)."""
    assert each.count is not None
    beta1, beta2, count = 0.9, 0.999, 2
    first, second = each.moments
    _in_place(tape, "aten::add_", [("self", each.count)], [("other", 1), ("alpha", 1)], "Tensor")
    _in_place(tape, "aten::mul_", [("self", each.parameter)], [("other", 1 - LEARNING_RATE * 0.01)], "Tensor")
    _in_place(tape, "aten::lerp_", [("self", first), ("end", each.grad)], [("weight", 1 - beta1)], "Scalar")
    _in_place(tape, "aten::mul_", [("self", second)], [("other", beta2)], "Tensor")
    squares = [("self", second), ("tensor1", each.grad), ("tensor2", each.grad)]
    _in_place(tape, "aten::addcmul_", squares, [("value", 1 - beta2)], "")
    tape.op("aten::_local_scalar_dense", [("self", each.count)])
    root = tape.new(second.shape)
    tape.op("aten::sqrt", [("self", second)], [root])
    scaled = tape.new(second.shape)
    tape.op("aten::div", [("self", root)], [scaled], [("other", (1 - beta2**count) ** 0.5)], overload="Tensor")
    tape.free(root)
    _in_place(tape, "aten::add_", [("self", scaled)], [("other", 1e-08), ("alpha", 1)], "Tensor")
    _release(tape, previous)
    quotient = [("self", each.parameter), ("tensor1", first), ("tensor2", scaled)]
    _in_place(tape, "aten::addcdiv_", quotient, [("value", -LEARNING_RATE / (1 - beta1**count))], "")
    return scaled
