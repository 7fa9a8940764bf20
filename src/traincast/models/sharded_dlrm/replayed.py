"""One rank's step: that of one GPU with its lookups and updates exchanged with others, and its gradients reduced."""

from __future__ import annotations

from collections.abc import Sequence

from traincast.ir.ops import Phase
from traincast.ir.program import Program
from traincast.models.layers.builder import RankBuilder
from traincast.models.sharded_dlrm.captured import EmbeddingModule, find_operand
from traincast.models.sharded_dlrm.collection import ShardedTables
from traincast.models.sharded_dlrm.copying import ReducingCopier
from traincast.models.sharded_dlrm.inputs import Features, make_resident_features
from traincast.models.sharded_dlrm.layout import Layout
from traincast.models.sharded_dlrm.outputs import TORCHREC
from traincast.models.sharded_dlrm.sequences import ShardedSequences
from traincast.models.sharded_dlrm.step import PREFETCH

_INDEX_DTYPE = "int64"
_MODULE = "DistributedModelParallel"


def build_rank_program(
    program: Program, modules: Sequence[EmbeddingModule], layouts: Sequence[Layout], rank: int, gpus_per_node: int,
    *, pipelined: bool, like: Program | None,
) -> Program:  # fmt: skip
    """The program of one rank; `like` is one of a rank that runs the same ops."""
    return _RankWriter(program, modules, layouts, rank, gpus_per_node, pipelined, like).write_program()


class _RankWriter:
    """The scopes of the source in their order, with others in the place of lookups and updates."""

    def __init__(
        self, source: Program, modules: Sequence[EmbeddingModule], layouts: Sequence[Layout], rank: int,
        gpus_per_node: int, pipelined: bool, like: Program | None,
    ) -> None:  # fmt: skip
        self.source, self.modules, self.pipelined = source, modules, pipelined
        self.builder = RankBuilder(source.batch_size, rank, layouts[0].world_size, gpus_per_node, like)
        self.copier = ReducingCopier(source, modules, self.builder)
        self.sharded = [self._make_tables(module, layout) for module, layout in zip(modules, layouts, strict=True)]
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

    def _make_tables(self, module: EmbeddingModule, layout: Layout) -> ShardedTables:
        if module.pooled:
            return ShardedTables(self.builder, layout, index_dtype=_INDEX_DTYPE, names=TORCHREC)
        samples = self.source.batch_size
        return ShardedSequences(self.builder, layout, index_dtype=_INDEX_DTYPE, names=TORCHREC, samples=samples)

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
        self.widths[number] = [part.shape[1] for part in parts]
        rows = parts[0]
        if len(parts) > 1:
            builder.open_scope("aten::cat", Phase.FORWARD)
            rows = builder.add_tensor((module.bags, module.columns))
            self.cats[number] = builder.add_op("aten::cat", [("tensors", parts)], [rows], [("dim", 1)], module=_MODULE)
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
            grads = builder.add_column_slices(grad, self.widths[number], module=_MODULE, forward=self.cats[number])
        tables.start_backward(grads)
        tables.finish_backward()
        self.copier.drop_scopes(module.backward)
