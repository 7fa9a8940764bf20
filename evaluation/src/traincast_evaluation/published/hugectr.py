"""HugeCTR's MLPerf steps on many GPUs: DLRM with its hybrid embedding, and DCNv2 with its embedding collection.

A step is one CUDA graph. Embeddings have a stream of their own: their lookups and collectives run alongside the bottom
MLP, their way back alongside the bottom MLP's and the all-reduce. Keys of the next batch are exchanged and sorted
alongside the step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from traincast.ir.builder import share_templates
from traincast.ir.compiled import mark_graphs
from traincast.ir.workload import Workload
from traincast_evaluation.published.hugectr_dcn import write_dcn
from traincast_evaluation.published.hugectr_dense import BOTTOM, CROSS_LAYERS, CROSS_RANK, DIM, DOT_WIDTH, TOP, VECTORS
from traincast_evaluation.published.hugectr_dlrm import write_dlrm
from traincast_evaluation.published.run import Run, count_mlp_parameters


def write(sizes: Mapping[str, Any], run: Run) -> Workload:
    """One training step; `cross` of `sizes` stands for DCNv2, else `hybrid` says whether its embedding is hybrid,
    `overlap` whether that runs alongside the dense part, and `early` that it is MLPerf 1.0's."""
    chosen = {name: sizes[name] for name in ("hybrid", "overlap", "early")} if not sizes["cross"] else {}
    programs, ranks = write_dlrm(run, **chosen) if chosen else write_dcn(run)
    graph = mark_graphs(programs[0], np.ones(programs[0].num_scopes, dtype=np.bool_))
    graphs = [replace(graph, sizes=program.sizes) for program in programs]  # they differ in sizes only
    return Workload(name="hugectr", programs=tuple(share_templates(graphs)), ranks=ranks, mode="training")


def parameters(sizes: Mapping[str, Any]) -> int:
    """Parameters of the whole model."""
    from traincast.models.dlrm.config import CRITEO_ROWS, DLRM_V2

    width, rows = VECTORS * DIM, DLRM_V2.rows_per_table if sizes["cross"] else CRITEO_ROWS
    crossing = CROSS_LAYERS * (2 * width * CROSS_RANK + width) if sizes["cross"] else 0
    dense = (
        count_mlp_parameters(BOTTOM) + count_mlp_parameters((width if sizes["cross"] else DOT_WIDTH, *TOP)) + crossing
    )
    return sum(rows) * DIM + dense
