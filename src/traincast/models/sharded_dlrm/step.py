"""One step of a recommender whose tables are sharded over many ranks, written without torch; by default each table
whole on one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeAlias

from traincast.ir.builder import share_templates
from traincast.ir.ops import Phase, StorageKind
from traincast.ir.program import Program
from traincast.ir.workload import Workload
from traincast.models.dlrm.config import DcnConfig, DlrmConfig
from traincast.models.embeddings.access import Uniform, parse_access
from traincast.models.embeddings.table import Pooling, Table, check_tables
from traincast.models.layers.builder import RankBuilder, Ref
from traincast.models.placement.memory import MemoryLimits
from traincast.models.placement.options import WEIGHTS, make_greedy_plan
from traincast.models.placement.plan import Plan, ShardingKind
from traincast.models.sharded_dlrm.captured import CapturedDense, ReplayedDense
from traincast.models.sharded_dlrm.collection import DENSE_OPTIMIZERS, ShardedTables
from traincast.models.sharded_dlrm.communication import (
    REFERENCE,
    TORCHREC,
    Features,
    copy_features,
    make_resident_features,
)
from traincast.models.sharded_dlrm.dense import DcnDense, Dense, EagerDcn, EagerDense
from traincast.models.sharded_dlrm.layout import Layout, Mark, MarkedProgram, ScopeRole, assign_shards_to_ranks
from traincast.utils.errors import TraincastError

AnyDense: TypeAlias = "Dense | CapturedDense"
"""A dense part that is described, or that was captured."""
Key: TypeAlias = Callable[[int], tuple[object, ...]]
"""What ranks are told apart by."""
MAX_RANKS = 4096
"""Every rank collectives with every other: time and memory of a prediction grow with the square of the ranks."""
PREFETCH = 16
"""The stream of the next batch, beyond those of the communicators."""
RIGID = "how often rows repeat depends on the batch size; build it anew for another one"
"""Why a sharded step cannot be resized."""


def build_sharded_dlrm(
    dense: AnyDense | DlrmConfig | None,
    tables: Sequence[Table],
    plan: Plan,
    *,
    batch_size: int,
    gpus_per_node: int = 8,
    redistribute_inputs: bool = True,
    pipelined: bool = False,
    name: str = "sharded-dlrm",
) -> Workload:
    """One training step under a plan, for `batch_size` samples per rank; `pipelined` as TorchRec's
    `TrainPipelineSparseDist` runs it, which copies and distributes the next batch alongside this step.

    Without a dense part it is the lookups, their exchange, and the way back from gradients that are there. Without
    `redistribute_inputs` every rank is fed the row numbers of its own parts, as facebookresearch/dlrm does.
    """
    check_ranks(plan.world_size)
    tables = check_tables(tables)
    dense = Dense.from_dlrm(dense) if isinstance(dense, DlrmConfig) else dense
    layout = assign_shards_to_ranks(tables, plan, batch_size=batch_size, gpus_per_node=gpus_per_node)
    _check_tables(dense, tables)

    def write(rank: int, like: Program | None) -> Program:
        return build_sharded_rank_program(
            layout, rank, dense, tables, redistribute_inputs=redistribute_inputs, pipelined=pipelined,
            like=like,
        ).program  # fmt: skip

    programs, ranks = write_ranks(layout.world_size, layout.make_program_key, layout.make_structure_key, write)
    if isinstance(dense, CapturedDense):
        return replace(dense.workload, name=name, programs=programs, ranks=ranks)
    return Workload(
        name=name,
        programs=programs,
        ranks=ranks,
        mode="training",
        meta={"tables": str(len(tables)), "optimizer": dense.optimizer if dense else ""},
    )


def write_ranks(
    world_size: int, make_program_key: Key, make_structure_key: Key, write: Callable[[int, Program | None], Program]
) -> tuple[tuple[Program, ...], tuple[int, ...]]:
    """The distinct programs of all ranks, and which of them each runs. `write` writes a rank's, given one of a rank
    that runs the same ops: equal structure keys say so, equal program keys that nothing differs."""
    first: dict[tuple[object, ...], int] = {}
    ranks = tuple(first.setdefault(make_program_key(rank), len(first)) for rank in range(world_size))
    written: list[Program] = []
    templates: dict[tuple[object, ...], Program] = {}
    for number in range(len(first)):
        rank = ranks.index(number)
        form = make_structure_key(rank)
        written.append(write(rank, templates.get(form)))
        templates.setdefault(form, written[-1])
    return tuple(replace(program, rigid=RIGID) for program in share_templates(written)), ranks


def _check_tables(dense: AnyDense | None, tables: Sequence[Table]) -> None:
    """Rejects tables that cannot be trained, or that the dense part cannot take."""
    for table in tables:
        if table.optimizer not in DENSE_OPTIMIZERS:
            raise TraincastError(
                f"table '{table.name}' has optimizer '{table.optimizer}'; a training step needs one of "
                f"{', '.join(DENSE_OPTIMIZERS)}"
            )
    if isinstance(dense, Dense) and dense.equal_widths:
        wrong = [table for table in tables if table.dim != dense.bottom_mlp[-1]]
        if wrong:
            raise TraincastError(
                f"table '{wrong[0].name}' has dim {wrong[0].dim}; the "
                f"{'dot interaction' if dense.interaction == 'dot' else 'cross network'} needs the bottom MLP's "
                f"{dense.bottom_mlp[-1]}"
            )


def check_ranks(ranks: int) -> None:
    """Rejects numbers of GPUs that tables cannot be sharded over here."""
    if not 1 <= ranks <= MAX_RANKS:
        raise TraincastError(
            f"tables sharded over {ranks} GPUs are out of range; give an integer from 1 to {MAX_RANKS}"
        )


def build_sharded_rank_program(
    layout: Layout,
    rank: int,
    dense: AnyDense | None,
    tables: Sequence[Table],
    *,
    redistribute_inputs: bool = True,
    pipelined: bool = False,
    like: Program | None = None,
) -> MarkedProgram:
    """The program of one rank, every size at a place of its own; `like` is one of a rank that runs the same ops."""
    builder = RankBuilder(layout.batch_size, rank, layout.world_size, layout.gpus_per_node, like)
    writer = _StepWriter(builder, layout, dense, tables, redistribute_inputs)
    writer.pipelined = pipelined
    return writer.write_program()


def _make_dense_writer(builder: RankBuilder, dense: AnyDense, columns: int, batch: int) -> EagerDense | ReplayedDense:
    if isinstance(dense, CapturedDense):
        return ReplayedDense(builder, dense, batch)
    eager = EagerDcn if isinstance(dense, DcnDense) else EagerDense
    return eager(builder, dense, columns, batch)


class _StepWriter:
    """One rank's step, in the order it runs; `pipelined` distributes the next batch alongside it."""

    pipelined: bool = False

    def __init__(
        self, builder: RankBuilder, layout: Layout, dense: AnyDense | None, tables: Sequence[Table],
        redistributed: bool,
    ) -> None:  # fmt: skip
        self.builder, self.layout, self.redistributed, self.tables = builder, layout, redistributed, tables
        self.index_dtype = dense.index_dtype if isinstance(dense, Dense) else "int64"
        self.sharded = ShardedTables(
            builder, layout, index_dtype=self.index_dtype, names=TORCHREC if redistributed else REFERENCE
        )
        self.dense: EagerDense | ReplayedDense | None = None
        if dense is not None:
            self.dense = _make_dense_writer(builder, dense, self.sharded.columns, layout.batch_size)
        self.sharded.attach_ddp()

    def write_program(self) -> MarkedProgram:
        """Everything."""
        features = self._make_prefetched_lookups() if self.pipelined else self._fetch_batch(self._begin_step)
        self.sharded.look_up(features)
        if self.dense is not None:
            self.dense.write_bottom_forward()
        embedded = self.sharded.finish_communication()
        if self.dense is not None:
            self.dense.write_top_forward(embedded)
        if self.pipelined:
            with self.builder.use_stream(PREFETCH):
                self._fetch_batch(lambda: None)
        self._write_table_backward(self._write_dense_backward(embedded))
        return MarkedProgram.from_builder(self.builder)

    def _fetch_batch(self, begin: Callable[[], None]) -> list[list[Features]]:
        """A batch copied from the host, and the lookups of each kernel of this rank in it; `begin` comes between."""
        features = self._copy_inputs()
        begin()
        return self.sharded.redistribute_all(features[0][0]) if self.redistributed else features

    def _begin_step(self) -> None:
        """The dense part's inputs are copied, and the gradients of the step before go."""
        if self.dense is not None:
            self.dense.write_inputs()
        self.sharded.drop_gradients()

    def _make_prefetched_lookups(self) -> list[list[Features]]:
        """The lookups of each kernel, there already: `TrainPipelineSparseDist` distributed them alongside the step
        before."""
        builder = self.builder
        builder.open_scope("TrainPipelineSparseDist.progress", Phase.INPUT)
        builder.wait_for_event(builder.record_event(PREFETCH))
        with builder.use_stream(PREFETCH):
            self._begin_step()
        return self.sharded.make_resident_lookups()

    def _copy_inputs(self) -> list[list[Features]]:
        """What is copied from the host: this rank's samples, or the row numbers of this rank's parts."""
        builder, batch = self.builder, self.layout.batch_size
        if not self.redistributed:
            return [
                [
                    copy_features(builder, kernel.tables, kernel.lookups, self.sharded.count_samples(section),
                                  self.index_dtype, weighted=kernel.weighted, offsets=True)
                    for kernel in section.ranks[builder.rank]
                ]
                for section in self.layout.sections
            ]  # fmt: skip
        lookups = round(sum(table.count_lookups(batch) for table in self.tables))
        weighted = any(table.weighted for table in self.tables)
        if isinstance(self.dense, ReplayedDense):  # which copies its own inputs
            return [[make_resident_features(builder, len(self.tables), lookups, batch, weighted=weighted)]]
        return [[copy_features(builder, len(self.tables), lookups, batch, self.index_dtype, weighted=weighted)]]

    def _write_dense_backward(self, embedded: list[Ref]) -> list[Ref]:
        """Gradients of the pooled embeddings, from the dense part or there before the step."""
        if self.dense is not None:
            with self.builder.label_scopes(Mark(ScopeRole.DENSE)):
                return self.dense.write_top_backward()
        return [self.builder.add_resident_tensor(part.shape, StorageKind.BUFFER) for part in embedded]

    def _write_table_backward(self, grads: list[Ref]) -> None:
        """Sends gradients back while the bottom MLP computes its own, then updates the tables."""
        builder, sharded = self.builder, self.sharded
        sharded.start_backward(grads)
        if self.dense is not None:
            with builder.label_scopes(Mark(ScopeRole.DENSE)):
                self.dense.write_bottom_backward()
        came = sharded.finish_backward()
        sharded.reduce_copies()
        if self.dense is not None:
            self.dense.write_end_of_backward()
        builder.free_tensors(*came)
        if self.dense is not None:
            self.dense.write_optimizer_step()
        sharded.step_copies()


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
