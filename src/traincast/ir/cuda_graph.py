"""Parts of a step that are replayed as CUDA graphs. Their scopes are marked by their names, which files keep."""

from __future__ import annotations

import numpy as np

from traincast.ir.editor import ProgramEditor
from traincast.ir.ops import Phase
from traincast.ir.program import Program
from traincast.utils.arrays import BoolArray

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
