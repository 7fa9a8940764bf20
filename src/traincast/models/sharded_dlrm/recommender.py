"""Any recommender of one GPU with FBGEMM tables, its tables sharded over many: as TorchRec's `DistributedModelParallel`
runs it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from traincast.ir.ops import Phase
from traincast.ir.program import Program
from traincast.ir.workload import PLACEMENTS, TABLES, Workload
from traincast.models.embeddings.table import ITEM_BYTES, OPTIMIZER_STATE, STATE_ITEM_BYTES, Pooling, Table
from traincast.models.layers.builder import RankBuilder
from traincast.models.placement.memory import POOLED_BYTES, MemoryLimits
from traincast.models.placement.options import make_greedy_plan
from traincast.models.placement.plan import ComputeKernel, Placement, Plan, ShardingKind
from traincast.models.recommenders.storage import DEVICE, Storage, read_storage
from traincast.models.sharded_dlrm.captured import (
    CapturedDense,
    EmbeddingModule,
    ReducingCopier,
    find_embedding_modules,
    find_operand,
)
from traincast.models.sharded_dlrm.collection import ShardedTables
from traincast.models.sharded_dlrm.communication import TORCHREC, Features, make_resident_features
from traincast.models.sharded_dlrm.layout import Layout, assign_shards_to_ranks
from traincast.models.sharded_dlrm.sequences import ShardedSequences
from traincast.models.sharded_dlrm.step import PREFETCH, check_ranks, write_ranks
from traincast.utils.errors import TraincastError
from traincast.utils.files.reading import parse_json

_INDEX_DTYPE = "int64"
_MODULE = "DistributedModelParallel"


def build_rank_program(
    program: Program, modules: Sequence[EmbeddingModule], layouts: Sequence[Layout], storages: Sequence[Storage],
    rank: int, gpus_per_node: int, *, pipelined: bool, like: Program | None,
) -> Program:  # fmt: skip
    """The program of one rank; `like` is one of a rank that runs the same ops."""
    return _RankWriter(program, modules, layouts, storages, rank, gpus_per_node, pipelined, like).write_program()


class _RankWriter:
    """The scopes of the source in their order, with others in the place of lookups and updates."""

    def __init__(
        self, source: Program, modules: Sequence[EmbeddingModule], layouts: Sequence[Layout],
        storages: Sequence[Storage], rank: int, gpus_per_node: int, pipelined: bool, like: Program | None,
    ) -> None:  # fmt: skip
        self.source, self.modules, self.pipelined = source, modules, pipelined
        self.builder = RankBuilder(source.batch_size, rank, layouts[0].world_size, gpus_per_node, like)
        self.copier = ReducingCopier(source, modules, self.builder)
        self.sharded = [self._make_tables(*one) for one in zip(modules, layouts, storages, strict=True)]
        self.inputs: dict[int, Features] = {}  # by the storage of row numbers: modules may be fed the same
        self.local = [self._make_local_lookups(module) for module in modules]
        self.widths: dict[int, list[int]] = {}
        self.cats: dict[int, int] = {}

    def write_program(self) -> Program:
        """Everything."""
        prefetched = self._make_prefetched_lookups() if self.pipelined else None
        places = {module.forward.start: number for number, module in enumerate(self.modules)}
        updates = {module.backward.start: number for number, module in enumerate(self.modules)}
        scope = 0
        while scope < self.source.num_scopes:
            if scope == self.copier.begin and self.pipelined:
                self._write_prefetch()
            if scope == self.copier.end:
                self.copier.finish_reduction()
            if self.copier.restored and scope == self.copier.restored[0]:
                for tables in self.sharded:
                    tables.restore_stashed()
            if scope in places:
                number = places[scope]
                self._look_up(number, None if prefetched is None else prefetched[number])
                scope = self.modules[number].forward.stop
            elif scope in updates:
                self._write_update(updates[scope])
                scope = self.modules[updates[scope]].backward.stop
            else:
                self.copier.copy_scope(scope)
                scope += 1
        if self.copier.end == self.source.num_scopes:
            self.copier.finish_reduction()
        return self.builder.build_program()

    def _make_tables(self, module: EmbeddingModule, layout: Layout, storage: Storage) -> ShardedTables:
        if module.pooled:
            return ShardedTables(self.builder, layout, index_dtype=_INDEX_DTYPE, names=TORCHREC, storage=storage)
        return ShardedSequences(
            self.builder, layout, index_dtype=_INDEX_DTYPE, names=TORCHREC, samples=self.source.batch_size,
            storage=storage,
        )  # fmt: skip

    def _make_local_lookups(self, module: EmbeddingModule) -> Features:
        """The lookups of this rank's own samples, on the device before the step as they are on one GPU."""
        indices = int(self.source.columns.tensor_storage[find_operand(self.source, module.lookup, "indices")])
        if indices not in self.inputs:
            lookups = round(module.bags * sum(table.pooling.mean for table in module.tables))
            self.inputs[indices] = make_resident_features(
                self.builder, len(module.tables), lookups, self.source.batch_size
            )
        return self.inputs[indices]

    def _make_prefetched_lookups(self) -> list[list[list[Features]]]:
        """The lookups of all modules, distributed alongside the step before."""
        self.builder.open_scope("TrainPipelineSparseDist.progress", Phase.INPUT)
        self.builder.wait_for_event(self.builder.record_event(PREFETCH))
        return [tables.make_resident_lookups() for tables in self.sharded]

    def _write_prefetch(self) -> None:
        """The next batch is distributed, behind what is left of this step."""
        with self.builder.use_stream(PREFETCH):
            for tables, local in zip(self.sharded, self.local, strict=True):
                tables.redistribute_all(local)

    def _look_up(self, number: int, features: list[list[Features]] | None) -> None:
        """Row numbers out, rows back, side by side as the lookup of one GPU gives them."""
        builder, module, tables = self.builder, self.modules[number], self.sharded[number]
        tables.look_up(tables.redistribute_all(self.local[number]) if features is None else features)
        parts = tables.finish_communication()
        dim = 0 if module.stacked else 1
        self.widths[number] = [part.shape[dim] for part in parts]
        rows = parts[0]
        if len(parts) > 1:
            builder.open_scope("aten::cat", Phase.FORWARD)
            rows = builder.add_tensor(module.rows_shape)
            given = [("tensors", parts)]
            self.cats[number] = builder.add_op("aten::cat", given, [rows], [("dim", dim)], module=_MODULE)
            builder.free_tensors(*parts)
        c = self.source.columns
        self.copier.replace_tensor(int(c.output_tensor[c.output_ptr[module.lookup]]), rows)
        self.copier.drop_scopes(module.forward)

    def _write_update(self, number: int) -> None:
        """Gradients to the ranks of the rows, and the update there."""
        builder, module, tables = self.builder, self.modules[number], self.sharded[number]
        spec = self.source.signatures[self.source.columns.op_signature[module.update]].tensors("grad_output")[0]
        grad = self.copier.get_ref(find_operand(self.source, module.update, "grad_output"), spec)
        grads = [grad]
        if len(self.widths[number]) > 1:
            builder.open_scope("CatBackward0", Phase.BACKWARD)
            grads = builder.add_slices(
                grad, 0 if module.stacked else 1, self.widths[number], module=_MODULE, forward=self.cats[number]
            )
        tables.start_backward(grads)
        tables.finish_backward()
        self.copier.drop_scopes(module.backward)


_EXCHANGED = 4  # rows of a rank's own lookups and rows it serves, both with their gradients


def is_shardable(workload: Workload) -> bool:
    """Whether a step trains FBGEMM tables, or dynamic hash tables, on one GPU."""
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
    likely where the step does not say otherwise. The rest is under DDP. `pipelined` distributes the next batch
    alongside this step (`TrainPipelineSparseDist`).
    """
    check_ranks(gpus)
    program = workload.programs[0]
    modules = find_embedding_modules(program)
    if not modules:
        raise TraincastError(f"workload '{workload.name}' has no fused embedding tables to shard; leave out `program`")
    plan = _make_plan(workload, modules, gpus, memory_bytes)
    layouts = _lay_out_modules(modules, plan, gpus_per_node)
    kept = _read_storages(workload, modules)
    storages = [
        kept.get(module.tables[0].name, DEVICE) for module in modules
    ]  # a module has tables that are kept alike

    def write(rank: int, like: Program | None) -> Program:
        return build_rank_program(
            program, modules, layouts, storages, rank, gpus_per_node, pipelined=pipelined, like=like
        )

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
    stated, storages = _read_placements(workload, modules, gpus), _read_storages(workload, modules)
    split = [
        table
        for module in modules
        for table in module.tables
        if table.name in stated or (gpus > 1 and not module.pooled and weights[table.name] > share)
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
        + sum(_compute_table_bytes(table) * _find_device_share(storages.get(table.name)) for table in split) / gpus
        + rows * POOLED_BYTES * _EXCHANGED
    )
    limits = MemoryLimits(device=memory_bytes, dense=held)
    placed = (
        make_greedy_plan(whole, lambda table: weights[table.name], limits, gpus, batch_size=batch) if whole else None
    )
    placements = {table.name: Placement.make_row_wise(gpus) for table in split} | stated
    placements |= {table.name: placed.get_placement(table.name) for table in whole if placed is not None}
    names = tuple(table.name for module in modules for table in module.tables)
    return Plan(names, tuple(placements[name] for name in names), gpus)


def _list_placements(workload: Workload) -> list[dict[str, Any]]:
    return parse_json(workload.meta.get(TABLES, "{}"), "its tables").get(PLACEMENTS) or []


def _read_placements(workload: Workload, modules: Sequence[EmbeddingModule], gpus: int) -> dict[str, Placement]:
    """What a description says of its tables, by their names in the step. Whole tables that it names go round the GPUs,
    and a table that it keeps elsewhere without naming its sharding is whole."""
    stated = _list_placements(workload)
    if not stated and any(module.in_host for module in modules):
        raise TraincastError(
            f"tables of '{workload.name}' are in unified memory, and a step of one GPU does not say how several share "
            "them: capture the step with `gpus`, or describe the recommender with `storage`"
        )
    tables = [table for module in modules for table in module.tables]
    placements, whole = {}, 0
    for table, one in zip(tables, stated, strict=False):  # all of them or none
        storage = read_storage(one["storage"], f"table '{table.name}'")
        if one["kind"] is None and storage == DEVICE:
            continue
        kind = ShardingKind(one["kind"] or ShardingKind.TABLE_WISE)
        ranks, kernel = tuple(range(gpus)), storage.kernel
        if kind is ShardingKind.TABLE_WISE:
            ranks, whole = (whole % gpus,), whole + 1
        if kind.copied:
            kernel = ComputeKernel.DENSE
        placements[table.name] = Placement(kind, ranks, kernel, storage.cache if storage.cached else 0.0)
    return placements


def _read_storages(workload: Workload, modules: Sequence[EmbeddingModule]) -> dict[str, Storage]:
    """Where the rows of its tables are, by their names in the step, if a description says that."""
    tables = [table for module in modules for table in module.tables]
    return {
        table.name: read_storage(one["storage"], f"table '{table.name}'")
        for table, one in zip(tables, _list_placements(workload), strict=False)  # all of them or none
    }


def _find_device_share(storage: Storage | None) -> float:
    """The share of its rows that a table has on the device."""
    return 1.0 if storage is None else 0.0 if storage.kind == "uvm" else storage.cache


def _compute_table_bytes(table: Table) -> float:
    """Bytes of a table with its optimizer's state."""
    state = OPTIMIZER_STATE[table.optimizer].count_state_per_row(table.dim) * STATE_ITEM_BYTES
    return float(table.rows * (table.dim * ITEM_BYTES[table.dtype] + state))


def _describe_assumptions(name: str, plan: Plan, modules: Sequence[EmbeddingModule]) -> str:
    split = sum(placement.kind is not ShardingKind.TABLE_WISE for placement in plan.placements)
    rows = f", {split} of {len(plan.tables)} split by rows" if split else ""
    lookups = {table.pooling.mean for module in modules for table in module.tables if not module.known}
    even = "" if lookups <= {1.0} else "; lookups are taken to be even over the tables of a module"
    shared = "; lookups that share a table have equal parts of it" if any(one.shared for one in modules) else ""
    return f"{name} is taken as sharded: FBGEMM tables balanced by lookups{rows}, the rest under DDP{even}{shared}"
