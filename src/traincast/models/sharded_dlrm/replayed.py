"""One rank's step: that of one GPU with its lookups and updates exchanged with others, and its gradients reduced."""

from __future__ import annotations

from collections.abc import Sequence

from traincast.ir.ops import Phase, StorageKind
from traincast.ir.program import Program
from traincast.models.data_parallel.buckets import Reducer
from traincast.models.data_parallel.data_parallel import find_end_of_backward, find_gradients
from traincast.models.layers.builder import RankBuilder, Ref
from traincast.models.sharded_dlrm.captured import EmbeddingModule, find_operand
from traincast.models.sharded_dlrm.collection import ShardedTables
from traincast.models.sharded_dlrm.copying import StepCopier
from traincast.models.sharded_dlrm.inputs import LENGTH_DTYPE, Features
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
        dropped = [scope for module in modules for scopes in (module.forward, module.backward) for scope in scopes]
        self.source, self.modules, self.pipelined = source, modules, pipelined
        self.builder = RankBuilder(source.batch_size, rank, layouts[0].world_size, gpus_per_node, like)
        self.copier = StepCopier(source, dropped, self.builder)
        self.sharded = [self._make_tables(module, layout) for module, layout in zip(modules, layouts, strict=True)]
        self.inputs: dict[int, Features] = {}  # by the storage of row numbers: modules may be fed the same
        self.local = [self._make_local_lookups(module) for module in modules]
        self.widths: dict[int, list[int]] = {}
        self.cats: dict[int, int] = {}
        self.gradients = find_gradients(source)
        forms = [gradient.grad.spec for gradient in self.gradients]
        self.reducer = Reducer(self.builder, self.builder.world, forms, kind=StorageKind.GRADIENT, as_views=True)

    def write_program(self) -> Program:
        """Everything."""
        prefetched = self._make_prefetched_lookups() if self.pipelined else None
        places = {module.forward.start: number for number, module in enumerate(self.modules)}
        updates = {module.backward.start: number for number, module in enumerate(self.modules)}
        ready = {gradient.scope: gradient for gradient in self.gradients}
        end = find_end_of_backward(self.source, self.gradients)
        begin = self._find_first_backward()
        scope = 0
        while scope < self.source.num_scopes:
            if scope == begin and self.pipelined:
                self._write_prefetch()
            if scope == end:
                self._finish_reduction()
            if scope in places:
                number = places[scope]
                self._look_up(number, None if prefetched is None else prefetched[number])
                scope = self.modules[number].forward.stop
            elif scope in updates:
                self._write_update(updates[scope])
                scope = self.modules[updates[scope]].backward.stop
            else:
                self.copier.copy_scopes(range(scope, scope + 1))
                if scope in ready:
                    self._reduce_gradient(ready[scope].grad, ready[scope].stream)
                scope += 1
        if end == self.source.num_scopes:
            self._finish_reduction()
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
            lengths = len(module.tables) * self.source.batch_size
            self.inputs[indices] = Features(
                self.builder.add_resident_tensor((lengths,), StorageKind.INPUT, LENGTH_DTYPE),
                self.builder.add_resident_tensor((lookups,), StorageKind.INPUT, _INDEX_DTYPE),
                None,
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

    def _find_first_backward(self) -> int:
        """The scope with which backward begins."""
        phases = self.source.columns.scope_phase
        return int((phases == Phase.BACKWARD).argmax())

    def _reduce_gradient(self, grad: Ref, stream: int) -> None:
        """A gradient goes into its bucket, of which it is a part from then on."""
        slot = self.reducer.reduce_gradient(self.copier.get_ref(grad.tensor, grad.spec), stream=stream)
        self.copier.replace_tensor(grad.tensor, slot)
        self.copier.keep_storage(slot)

    def _finish_reduction(self) -> None:
        """Reduced gradients are there."""
        self.reducer.finish_reduction()
        self.copier.join_last_written()
