"""A DLRM on many GPUs when no plan was given: each table whole on one of them, its dense part on all."""

from __future__ import annotations

from dataclasses import replace

from traincast.ir.workload import Workload
from traincast.models.dlrm.config import DcnConfig, DlrmConfig
from traincast.models.embeddings.access import Uniform, parse_access
from traincast.models.embeddings.table import Pooling, Table
from traincast.models.placement.greedy import WEIGHTS, make_greedy_plan
from traincast.models.placement.kinds import ShardingKind
from traincast.models.placement.memory import MemoryLimits
from traincast.models.placement.plan import Plan
from traincast.models.sharded_dlrm.config import Dense
from traincast.models.sharded_dlrm.step import build_sharded_dlrm

BALANCED = "greedy by lookups"

TABLE_NAME = "table"
"""What the tables of a DLRM are called, with their number from 0."""


def make_dlrm_tables(config: DlrmConfig) -> tuple[Table, ...]:
    """The embedding tables of a DLRM, all rows of them; without a word on access every row as likely as any other."""
    access = tuple(parse_access(text) for text in config.access) or (Uniform(),) * config.num_tables
    sizes = zip(config.rows_per_table, config.lookups_per_table, access, strict=True)
    return tuple(
        Table(
            name=f"{TABLE_NAME}{index}",
            rows=rows,
            dim=config.embedding_dim,
            pooling=Pooling.from_constant(lookups),
            access=wanted,
            optimizer=config.optimizer,
        )
        for index, (rows, lookups, wanted) in enumerate(sizes)
    )


def build_hybrid_dlrm(
    config: DlrmConfig, gpus: int, *, batch_size: int, memory_bytes: float, gpus_per_node: int, half: str = "",
    pipelined: bool = False, plan: Plan | None = None,
) -> tuple[Workload, str]:  # fmt: skip
    """One training step of a DLRM on `gpus` GPUs of `memory_bytes` each, `batch_size` samples each, and what was
    assumed.

    Tables go whole to one GPU each, the busiest first to the GPU with the least lookups that has room for it; one
    that fits nowhere is split by rows over all. Lookups are FBGEMM's, the dense part is under DDP; with `half`
    (bfloat16, float16) its forward pass runs under autocast; `pipelined` as in `build_sharded_dlrm`. A `plan` that is
    given takes the place of this one.
    """
    tables = make_dlrm_tables(config)
    dense = replace(Dense.from_dlrm(config), half=half)
    held = dense.compute_memory_bytes(sum(table.dim for table in tables), batch_size)
    limits = MemoryLimits(device=memory_bytes, dense=held)
    given = plan is not None
    if plan is None:
        plan = make_greedy_plan(tables, WEIGHTS[BALANCED], limits, gpus, batch_size=batch_size)
    workload = build_sharded_dlrm(
        dense, tables, plan, batch_size=batch_size, gpus_per_node=gpus_per_node, pipelined=pipelined, name=config.name
    )
    if given:
        return workload, f"{config.name} is hybrid parallel under the plan that was given"
    split = sum(placement.kind is not ShardingKind.TABLE_WISE for placement in plan.placements)
    rows = f", {split} of them split by rows" if split else ""
    above = "MLPs and cross network" if isinstance(config, DcnConfig) else "MLPs"
    notes = (
        f"{config.name} is taken as hybrid parallel: FBGEMM tables placed {BALANCED}{rows}, {above} under DDP "
        "(traincast shard searches better plans)"
    )
    return workload, notes
