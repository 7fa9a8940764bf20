"""Scopes that are replayed as CUDA graphs."""

from __future__ import annotations

import numpy as np

from traincast.ir.compiled import LAUNCH, NODE, find_graph_scopes, find_scopes_in_phases, mark_graphs
from traincast.ir.ops import Phase
from traincast_evaluation.published.catalog import published_programs


def a_program():
    return published_programs()["nvidia-dlrm-2021"].step(global_batch=64).programs[0]


def names(program):
    return [program.names[number] for number in program.columns.scope_name]


def test_every_run_of_neighbours_is_one_graph():
    program = a_program()
    graphed = np.ones(program.num_scopes, dtype=bool)
    graphed[2] = False

    marked = names(mark_graphs(program, graphed))

    assert [name.startswith(LAUNCH) for name in marked[:4]] == [True, False, False, True]
    assert [name.startswith(NODE) for name in marked[:4]] == [False, True, False, False]
    assert [name.removeprefix(LAUNCH).removeprefix(NODE) for name in marked] == names(program)


def test_without_a_scope_there_is_no_graph():
    program = a_program()
    assert names(mark_graphs(program, np.zeros(program.num_scopes, dtype=bool))) == names(program)


def test_phases_choose_scopes():
    program = a_program()
    chosen = find_scopes_in_phases(program, Phase.OPTIMIZER)
    assert [name for name, inside in zip(names(program), chosen, strict=True) if inside] == [
        "Optimizer.step#FusedSGD.step", "Optimizer.step#SGD.step",
    ]  # fmt: skip


def test_names_tell_graphs_and_their_launches():
    inside, launches = find_graph_scopes((LAUNCH + "aten::mm", NODE + "aten::add", "aten::mul"))
    assert inside.tolist() == [True, True, False]
    assert launches.tolist() == [True, False, False]
