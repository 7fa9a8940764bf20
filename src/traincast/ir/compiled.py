"""Which ops of a program a compiler takes together, and which scopes are replayed as CUDA graphs."""

from __future__ import annotations

import numpy as np

from traincast.ir.editor import ProgramEditor
from traincast.ir.ops import Phase
from traincast.ir.program import Program
from traincast.ir.rows import ScopeRow
from traincast.utils.arrays import BoolArray

REGION = "Torch-Compiled Region: 0/0"
"""The scope of a compiled function, named as PyTorch's profiler names it."""
_PREFIX = "Torch-Compiled Region"
_MODEL = (Phase.FORWARD, Phase.LOSS)


def find_compiled_ops(program: Program) -> BoolArray:
    """Which ops run inside a compiled region, or compute gradients of one that does."""
    named = np.array([name.startswith(_PREFIX) for name in program.names], dtype=bool)
    inside: BoolArray = named[program.columns.scope_name][program.op_scope]
    forward = program.columns.op_forward
    return inside | ((forward >= 0) & inside[forward])


def mark_compiled_model(program: Program) -> Program:
    """The program as it is captured when its script compiles the model: what the model runs is one region, of which
    copies from the host and what makes the host wait are no part. A step without modules is all model."""
    editor = ProgramEditor(program)
    roots = {
        _find_root_class(program, op.module)
        for scope in editor.scopes
        if scope.phase == Phase.FORWARD
        for op in scope.ops
    }
    roots = roots - {""} or roots
    inside = [_is_in_model(program, scope, roots) for scope in editor.scopes]
    end = max((number for number, here in enumerate(inside) if here), default=-1)
    kept: list[ScopeRow] = []
    region: ScopeRow | None = None
    became: dict[ScopeRow, ScopeRow] = {}  # what is in a region, or gone before its next op: the region
    for number, scope in enumerate(editor.scopes):
        if inside[number]:
            if region is None:
                region = ScopeRow(REGION, Phase.FORWARD, scope.thread, after=scope.after)
                kept.append(region)
            region.ops += scope.ops
            became[scope] = region
        elif region is not None and scope.phase in _MODEL and not scope.ops and number < end:
            became[scope] = region
        else:
            kept.append(scope)
            region = None
    editor.merge_scopes(became, kept)
    return editor.build()


def _is_in_model(program: Program, scope: ScopeRow, roots: set[str]) -> bool:
    return (
        scope.phase in _MODEL
        and bool(scope.ops)
        and all(_find_root_class(program, op.module) in roots for op in scope.ops)
    )


def _find_root_class(program: Program, module: int) -> str:
    """The class of the outermost module."""
    return program.names[module].partition(".")[0]


LAUNCH = "cuda_graph_launch::"
"""What the name of a graph's first scope begins with: the host launches the whole graph there."""
NODE = "cuda_graph::"
"""What the names of its other scopes begin with: they cost the host nothing."""


def mark_graphs(program: Program, graphed: BoolArray) -> Program:
    """The program with the scopes that `graphed` says replayed: every run of neighbours is one graph."""
    first = graphed & ~np.concatenate(([False], graphed[:-1]))
    editor = ProgramEditor(program)
    editor.rename_scopes(first, LAUNCH)
    editor.rename_scopes(graphed & ~first, NODE)
    return editor.build()


def find_scopes_in_phases(program: Program, *phases: Phase) -> BoolArray:
    """Which scopes are of one of these phases."""
    return np.isin(program.columns.scope_phase, phases)


def find_graph_scopes(names: tuple[str, ...]) -> tuple[BoolArray, BoolArray]:
    """Which of these scope names are part of a graph, and which of those launch one."""
    launches = np.array([name.startswith(LAUNCH) for name in names], dtype=np.bool_)
    nodes = np.array([name.startswith(NODE) for name in names], dtype=np.bool_)
    return launches | nodes, launches
