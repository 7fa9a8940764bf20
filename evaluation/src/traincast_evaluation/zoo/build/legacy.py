"""Host scopes as PyTorch 1.8's profiler shows them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from traincast.ir.ops import Scope
from traincast.ir.program import Program

_ACCUMULATE = "torch::autograd::AccumulateGrad"
_SUMS = ("aten::add", "aten::add_")


def split_engine_ops(program: Program) -> Program:
    """Gives every op that the autograd engine itself runs after a node a scope of its own.

    Today's profiler wraps a node and what follows it (the bias gradient's sum, the sum of two gradients of one
    tensor) in one event; that of 1.8, by which the studies' host overheads are told apart, did not.
    """
    names = list(program.names)
    number = {name: i for i, name in enumerate(names)}
    starts: list[int] = []
    old: list[int] = []  # the scope a new one comes from
    name: list[int] = []
    for scope in program.scopes:
        pieces = [(scope.first_op, scope.name), *_find_engine_ops(program, scope)]
        for start, label in pieces:
            if label not in number:
                number[label] = len(names)
                names.append(label)
            starts.append(start)
            old.append(scope.index)
            name.append(number[label])
    return _move_ops_to_scopes(program, tuple(names), np.array(starts), np.array(old), np.array(name))


def _find_engine_ops(program: Program, scope: Scope) -> list[tuple[int, str]]:
    """(op, name) of the ops at the end of a backward scope that are not the node's own."""
    if scope.thread == 0 or scope.name == _ACCUMULATE:
        return []
    ops = program.ops[scope.first_op : scope.first_op + scope.num_ops]
    engine_ops: list[tuple[int, str]] = []
    rest = [op.name for op in ops]
    while rest and rest[-1] in _SUMS:
        engine_ops.append((scope.first_op + len(rest) - 1, rest.pop()))
    if scope.name == "AddmmBackward0" and rest[-2:] == ["aten::sum", "aten::view"]:
        engine_ops += [(scope.first_op + len(rest) - back, rest[-back]) for back in (1, 2)]
    return engine_ops[::-1]


def _move_ops_to_scopes(
    program: Program,
    names: tuple[str, ...],
    starts: np.ndarray[tuple[int], np.dtype[np.int64]],
    old: np.ndarray[tuple[int], np.dtype[np.int64]],
    name: np.ndarray[tuple[int], np.dtype[np.int64]],
) -> Program:
    c = program.columns
    first = np.searchsorted(old, np.arange(program.num_scopes))  # first piece of every old scope
    last = np.searchsorted(old, np.arange(program.num_scopes), side="right") - 1
    after = np.full(len(old), -1, dtype=np.int32)
    after[first] = np.where(c.scope_after >= 0, last[np.maximum(c.scope_after, 0)], -1)
    columns = replace(
        c,
        scope_name=name.astype(np.int32),
        scope_phase=c.scope_phase[old],
        scope_thread=c.scope_thread[old],
        scope_after=after,
        scope_ptr=np.append(starts, program.num_ops).astype(np.int32),
    )
    return replace(program, names=names, columns=columns)
