"""Any recommender of one GPU with FBGEMM tables, its tables sharded over many: as TorchRec's `DistributedModelParallel`
runs it. Tables that pool their rows are `EmbeddingBagCollection`s, others `EmbeddingCollection`s."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from traincast.ir.program import Program
from traincast.ir.workload import Workload
from traincast.models.embeddings.table import ITEM_BYTES, OPTIMIZER_STATE, STATE_ITEM_BYTES, Pooling, Table
from traincast.models.placement.greedy import make_greedy_plan
from traincast.models.placement.kinds import ShardingKind
from traincast.models.placement.memory import POOLED_BYTES, MemoryLimits
from traincast.models.placement.plan import Placement, Plan
from traincast.models.sharded_dlrm.captured import EmbeddingModule, find_embedding_modules
from traincast.models.sharded_dlrm.captured_dense import CapturedDense
from traincast.models.sharded_dlrm.layout import Layout, assign_shards_to_ranks
from traincast.models.sharded_dlrm.replayed import build_rank_program
from traincast.models.sharded_dlrm.step import check_ranks, write_ranks
from traincast.utils.errors import TraincastError

_EXCHANGED = 4  # rows of a rank's own lookups and rows it serves, both with their gradients


def is_shardable(workload: Workload) -> bool:
    """Whether a step trains FBGEMM tables on one GPU."""
    return (
        workload.mode == "training" and len(workload.ranks) == 1 and bool(find_embedding_modules(workload.programs[0]))
    )


def build_sharded_recommender(
    workload: Workload, gpus: int, *, memory_bytes: float, gpus_per_node: int, pipelined: bool = False
) -> tuple[Workload, str]:
    """A training step of one GPU on `gpus` GPUs of `memory_bytes` each, and what was assumed. The batch size stays that
    of one GPU.

    Tables go whole to one GPU each, the busiest first; where rows are not pooled, a table with more than a GPU's part
    of all lookups is split by rows over all GPUs, and so is a table that fits nowhere. All rows count as equally
    likely. The rest is under DDP. `pipelined` distributes the next batch alongside this step
    (`TrainPipelineSparseDist`).
    """
    check_ranks(gpus)
    program = workload.programs[0]
    modules = find_embedding_modules(program)
    if not modules:
        raise TraincastError(f"workload '{workload.name}' has no fused embedding tables to shard; leave out `program`")
    plan = _make_plan(workload, modules, gpus, memory_bytes)
    layouts = _lay_out_modules(modules, plan, gpus_per_node)

    def write(rank: int, like: Program | None) -> Program:
        return build_rank_program(program, modules, layouts, rank, gpus_per_node, pipelined=pipelined, like=like)

    programs, ranks = write_ranks(
        gpus,
        lambda rank: tuple(layout.make_program_key(rank) for layout in layouts),
        lambda rank: tuple(layout.make_structure_key(rank) for layout in layouts),
        write,
    )
    programs = tuple(replace(one, seq_len=program.seq_len) for one in programs)
    return replace(workload, programs=programs, ranks=ranks), _describe_assumptions(workload.name, plan, modules)


def _lay_out_modules(modules: Sequence[EmbeddingModule], plan: Plan, gpus_per_node: int) -> tuple[Layout, ...]:
    """What every rank has of every module: its part of a plan, for the bags that one rank looks up."""
    layouts = []
    for module in modules:
        names = tuple(table.name for table in module.tables)
        part = Plan(names, tuple(plan.get_placement(name) for name in names), plan.world_size)
        layouts.append(assign_shards_to_ranks(module.tables, part, batch_size=module.bags, gpus_per_node=gpus_per_node))
    return tuple(layouts)


def _make_plan(workload: Workload, modules: Sequence[EmbeddingModule], gpus: int, memory_bytes: float) -> Plan:
    batch = workload.programs[0].batch_size
    weights = {
        table.name: module.count_lookups_per_sample(table, batch) * table.dim
        for module in modules
        for table in module.tables
    }
    share = sum(weights.values()) / gpus
    split = [
        table
        for module in modules
        for table in module.tables
        if gpus > 1 and not module.pooled and weights[table.name] > share
    ]
    whole = [
        replace(table, pooling=Pooling.from_constant(module.count_lookups_per_sample(table, batch)))
        for module in modules
        for table in module.tables
        if table not in split
    ]
    rows = sum(module.bags * module.columns for module in modules if not module.pooled)
    held = (
        CapturedDense(workload, tuple(modules)).compute_memory_bytes(0, batch)
        + sum(_compute_table_bytes(table) for table in split) / gpus
        + rows * POOLED_BYTES * _EXCHANGED
    )
    limits = MemoryLimits(device=memory_bytes, dense=held)
    placed = (
        make_greedy_plan(whole, lambda table: weights[table.name], limits, gpus, batch_size=batch) if whole else None
    )
    placements = {table.name: Placement.make_row_wise(gpus) for table in split}
    placements |= {table.name: placed.get_placement(table.name) for table in whole if placed is not None}
    names = tuple(table.name for module in modules for table in module.tables)
    return Plan(names, tuple(placements[name] for name in names), gpus)


def _compute_table_bytes(table: Table) -> float:
    """Bytes of a table with its optimizer's state."""
    state = OPTIMIZER_STATE[table.optimizer].count_state_per_row(table.dim) * STATE_ITEM_BYTES
    return float(table.rows * (table.dim * ITEM_BYTES[table.dtype] + state))


def _describe_assumptions(name: str, plan: Plan, modules: Sequence[EmbeddingModule]) -> str:
    split = sum(placement.kind is not ShardingKind.TABLE_WISE for placement in plan.placements)
    rows = f", {split} of {len(plan.tables)} split by rows" if split else ""
    lookups = {table.pooling.mean for module in modules for table in module.tables}
    even = "" if lookups == {1.0} else "; lookups are taken to be even over the tables of a module"
    return f"{name} is taken as sharded: FBGEMM tables balanced by lookups{rows}, the rest under DDP{even}"
