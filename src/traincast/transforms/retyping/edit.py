"""The edits themselves: a captured step under autocast, or with a model whose weights have 16 bits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from traincast.ir.ops import Phase
from traincast.ir.program import Program
from traincast.ir.rows import OpRow, ScopeRow
from traincast.ir.workload import Workload, check_follows_tensors
from traincast.transforms.retyping.backward import Backward
from traincast.transforms.retyping.forward import Forward
from traincast.transforms.retyping.policies import WIDE
from traincast.transforms.retyping.typing import Typing
from traincast.utils.errors import TraincastError

_NARROW = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")


def with_autocast(step: Workload, low: str) -> tuple[Workload, str]:
    """The step with its forward pass and loss under `torch.autocast` to a 16-bit type (float16, bfloat16)."""
    _check(step, low)
    programs = tuple(_retyped(program, low, autocast=True) for program in step.programs)
    scaled = " (without the scaling of a loss)" if low == "float16" and step.mode == "training" else ""
    notes = f"forward pass and loss run under autocast to {low}{scaled}; weights and optimizer stay {WIDE}"
    return replace(step, programs=programs), notes


def with_weights(step: Workload, low: str) -> tuple[Workload, str]:
    """The step of the model after `model.to(low)`: weights, gradients, state of the optimizer and inputs in 16 bits."""
    _check(step, low)
    programs = tuple(_retyped(program, low, autocast=False) for program in step.programs)
    return replace(step, programs=programs), f"weights, activations, gradients, optimizer and inputs are {low}"


def _check(step: Workload, low: str) -> None:
    check_follows_tensors(step)
    kinds = {spec.dtype for p in step.programs for s in p.symbolic for spec in s.outputs}
    if kinds & set(_NARROW):
        raise TraincastError(f"'{step.name}' computes in 16 bits already; capture it in {WIDE} to have it in {low}")
    if "compiled" in step.meta:
        raise TraincastError(f"'{step.name}' is compiled already; edit the step before it is compiled")
    if len(step.ranks) > 1:
        raise TraincastError(f"'{step.name}' runs on {len(step.ranks)} GPUs; edit its step on one GPU")


def _retyped(program: Program, low: str, *, autocast: bool) -> Program:
    typing = Typing(program)
    if not autocast:
        typing.narrow_all(low)
    forward = Forward(typing, low, autocast=autocast)
    ran: list[OpRow] = []
    scopes: list[ScopeRow] = []
    for backward, part in _passes(typing.editor.scopes):
        if backward:
            forward.end()
            done = Backward(typing, forward, part, ran).run()
            for scope in typing.editor.scopes:
                if scope.after is part[-1] and scope.thread != part[-1].thread:
                    scope.after = done[-1]
            scopes += done
            continue
        for scope in part:
            if scope.phase != Phase.OPTIMIZER or not autocast:
                forward.run(scope)
                ran += scope.ops
        scopes += part
    forward.end()
    typing.editor.scopes = scopes
    return typing.build()


def _passes(scopes: list[ScopeRow]) -> Iterator[tuple[bool, list[ScopeRow]]]:
    """Scopes in runs, with whether a run is a backward pass."""
    part: list[ScopeRow] = []
    for scope in scopes:
        if part and (scope.phase == Phase.BACKWARD) != (part[-1].phase == Phase.BACKWARD):
            yield part[-1].phase == Phase.BACKWARD, part
            part = []
        part.append(scope)
    if part:
        yield part[-1].phase == Phase.BACKWARD, part
