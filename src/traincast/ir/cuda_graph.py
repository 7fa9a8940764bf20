"""Parts of a step that are replayed as CUDA graphs. Their scopes are marked by their names, which files keep."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from traincast.ir.ops import Phase
from traincast.ir.program import Program
from traincast.utils.arrays import BoolArray

LAUNCH = "cuda_graph_launch::"
"""What the name of a graph's first scope begins with: the host launches the whole graph there."""
NODE = "cuda_graph::"
"""What the names of its other scopes begin with: they cost the host nothing."""


def with_graphs(program: Program, graphed: BoolArray) -> Program:
    """The program with the scopes that `graphed` says replayed: every run of neighbours is one graph."""
    c = program.columns
    first = graphed & ~np.concatenate(([False], graphed[:-1]))
    names: dict[str, int] = {name: number for number, name in enumerate(program.names)}
    scope_name = c.scope_name.copy()
    for prefix, chosen in ((LAUNCH, first), (NODE, graphed & ~first)):
        for number in np.unique(c.scope_name[chosen]).tolist():
            marked = names.setdefault(prefix + program.names[number], len(names))
            scope_name[chosen & (c.scope_name == number)] = marked
    return replace(program, names=tuple(names), columns=replace(c, scope_name=scope_name))


def in_phases(program: Program, *phases: Phase) -> BoolArray:
    """Which scopes are of one of these phases."""
    return np.isin(program.columns.scope_phase, phases)


def graph_scopes(names: tuple[str, ...]) -> tuple[BoolArray, BoolArray]:
    """Which of these scope names are part of a graph, and which of those launch one."""
    launches = np.array([name.startswith(LAUNCH) for name in names], dtype=np.bool_)
    nodes = np.array([name.startswith(NODE) for name in names], dtype=np.bool_)
    return launches | nodes, launches
