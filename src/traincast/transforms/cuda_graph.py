"""A step replayed as CUDA graphs, and what cannot be part of one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from traincast.costs.kernels.call import KernelCall
from traincast.costs.kernels.lower import lower
from traincast.costs.kernels.registry import ControlKind, Item, LoweringContext, make_lowering_context
from traincast.ir.compiled import LAUNCH, find_scopes_in_phases, mark_graphs
from traincast.ir.ops import Phase
from traincast.ir.program import Program
from traincast.ir.workload import Workload
from traincast.utils.arrays import BoolArray

_HOLDS = (ControlKind.DEVICE_SYNCHRONIZE, ControlKind.STREAM_SYNCHRONIZE, ControlKind.EVENT_SYNCHRONIZE)
_SHOWN = 4  # ops that break graphs, by name


def apply_cuda_graphs(workload: Workload) -> tuple[Workload, str]:
    """The step with everything behind its inputs replayed as CUDA graphs, and what is to be said about that.

    Inputs are copied before, into tensors that stay. An op for which the host waits, or which copies to or from
    pageable memory, cannot be captured: it runs between two graphs.
    """
    context = make_lowering_context(workload)
    known: dict[int, Program] = {}
    programs, breaks, graphs = [], set(), 0
    for program in workload.programs:
        if id(program.columns) not in known:
            breaking = _find_breaking_ops(program, context)
            scopes = ~find_scopes_in_phases(program, Phase.INPUT)
            scopes[program.op_scope[breaking]] = False
            known[id(program.columns)] = mark_graphs(program, scopes)
            breaks |= {program.symbolic[s].name for s in program.columns.op_signature[breaking].tolist()}
        graph = known[id(program.columns)]
        programs.append(replace(program, names=graph.names, columns=graph.columns))
        launches = [name.startswith(LAUNCH) for name in graph.names]
        graphs = max(graphs, int(np.array(launches)[graph.columns.scope_name].sum()))
    notes = f"the step is replayed as {graphs} CUDA graph{'s'[: graphs != 1]}, its inputs are copied before"
    if breaks:
        shown = ", ".join(sorted(breaks)[:_SHOWN]) + (", ..." if len(breaks) > _SHOWN else "")
        notes += f"; the host waits in {shown}, which no graph can hold: make the step do without for a single graph"
    return replace(workload, programs=tuple(programs)), notes


def _find_breaking_ops(program: Program, context: LoweringContext) -> BoolArray:
    """Ops that cannot be captured, those of the inputs left out."""
    breaks = np.array([any(map(_breaks_graph, lower(s, context))) for s in program.signatures], dtype=np.bool_)
    inputs = find_scopes_in_phases(program, Phase.INPUT)[program.op_scope]
    return np.asarray(breaks[program.columns.op_signature] & ~inputs)


def _breaks_graph(item: Item) -> bool:
    if isinstance(item, KernelCall):
        return item.family.name == "memcpy" and item.kind.endswith("pageable")
    return item.kind in _HOLDS
