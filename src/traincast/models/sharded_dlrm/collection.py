"""The tables of one embedding module on one rank: weights, states and caches, row numbers to whoever holds the rows,
rows back."""

from __future__ import annotations

from dataclasses import dataclass, replace

from traincast.ir.ops import ACCUMULATE_GRAD, Phase, StorageKind
from traincast.models.data_parallel.data_parallel import Reducer
from traincast.models.embeddings.table import OPTIMIZER_STATE
from traincast.models.layers.builder import RankBuilder, Ref, Scalars
from traincast.models.layers.optimizers import (
    OptimizedParameter,
    TableBatchedLookup,
    make_optimizer_state,
    write_foreach_step,
)
from traincast.models.placement.plan import ComputeKernel, ShardingKind
from traincast.models.recommenders.storage import DEVICE, HashTable, Stash, Storage
from traincast.models.sharded_dlrm.communication import (
    Features,
    HostOpNames,
    OutputCommunication,
    PooledOutputs,
    order_by_section,
    redistribute_lookups,
    split_by_kernel,
    write_offsets,
)
from traincast.models.sharded_dlrm.layout import Batch, Layout, Mark, ScopeRole, Section

DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}


@dataclass(slots=True, eq=False)
class KernelLookup:
    """One table-batched kernel of a rank, or one hash table, for the lookups of `samples` samples."""

    builder: RankBuilder
    batch: Batch
    samples: int
    kernel: TableBatchedLookup | HashTable
    cache: Ref | None
    storage: Storage
    stash: Stash | None = None
    _bags: Ref | None = None

    @staticmethod
    def from_batch(builder: RankBuilder, batch: Batch, samples: int, storage: Storage) -> KernelLookup:
        """The weights and states of the kernel, there before the step."""
        if storage.kind == "hash":
            hashed = HashTable(builder, storage, batch.widest, batch.tables, batch.rows, batch.load[2], batch.optimizer)
            return KernelLookup(builder, batch, samples, hashed, None, storage)
        dtype, dense = DTYPES[batch.dtype], batch.kernel is ComputeKernel.DENSE
        place = "cpu:pinned" if batch.kernel.in_host_memory else "cuda"
        count = 0 if dense else OPTIMIZER_STATE[batch.optimizer].tensors
        shape = (batch.state_elements // max(count, 1),)
        # FBGEMM keeps the small row-wise state on the device, also of tables in host memory
        beside = "cuda" if OPTIMIZER_STATE[batch.optimizer].per_row else place
        kernel = TableBatchedLookup(
            builder=builder,
            tables=batch.tables,
            weights=builder.add_resident_tensor((batch.elements,), StorageKind.PARAMETER, dtype, place),
            states=[
                builder.add_resident_tensor(shape, StorageKind.OPTIMIZER_STATE, device=beside) for _ in range(count)
            ],
            forms=_make_scalars(batch),
            optimizer="dense" if dense else batch.optimizer,
            weighted=batch.weighted,
        )
        cached = batch.kernel.cached
        cache = builder.add_resident_tensor((batch.cached_elements,), StorageKind.PARAMETER, dtype) if cached else None
        return KernelLookup(builder, batch, samples, kernel, cache, storage)

    @property
    def weights(self) -> Ref:
        """The tables, one after the other."""
        return self.kernel.weights

    def write_forward(self, indices: Ref, offsets: Ref, weights: Ref | None) -> Ref:
        """Pooled embeddings [samples, columns]; `weights` are those of weighted lookups."""
        batch, kernel = self.batch, self.kernel
        if isinstance(kernel, HashTable):
            self._bags = offsets
            return kernel.write_lookup(indices, self.samples, _make_scalars(batch), DLRM_MODULE)
        kernel.write_bounds_check(indices, offsets, weights)
        if self.cache is not None:
            fetched, nbytes, distinct = float(batch.fetched_rows), float(batch.fetched_bytes), batch.load[2]
            if self.storage.missed is not None:
                fetched = self.storage.missed * distinct
                nbytes = fetched * batch.elements / batch.rows * self.weights.spec.itemsize
            kernel.write_cache_fill(self.cache, *self.storage.list_fill_scalars(fetched, nbytes, distinct, batch.rows))
        pooled = kernel.write_forward(self.samples, batch.columns)
        self.stash = Stash(self.builder, kernel) if self.storage.kind == "stashed" else None
        return pooled

    def write_backward(self, grad: Ref) -> Ref | None:
        """Updates the tables in place; of dense ones gives the gradient."""
        if isinstance(self.kernel, HashTable):
            self.kernel.write_update(grad)
            self.builder.free_tensors(self.kernel.indices, *([] if self._bags is None else [self._bags]))
            return None
        if self.stash is not None:
            self.stash.wait()
        return self.kernel.write_backward(grad)


def _make_scalars(batch: Batch) -> Scalars:
    forms: Scalars = [
        ("total_D", batch.columns), ("max_D", batch.widest), ("total_rows", batch.rows), ("load", batch.load),
        ("longest_bag", batch.longest_bag),
    ]  # fmt: skip
    return [*forms, ("host", batch.kernel.host_access)] if batch.kernel.in_host_memory else forms


DLRM_MODULE = "Dlrm"
DENSE_OPTIMIZERS = {"sgd": "sgd", "adagrad": "adagrad", "rowwise_adagrad": "adagrad", "adam": "adam"}
"""The optimizer of a copied table, by that of the table. TorchRec fuses optimizers into sharded tables only: a copied
one is a parameter like any other, and a row-wise one becomes that of the dense part's kind."""


class ShardedTables:
    """Under a layout, in the order of its sections: `redistribute_all`, `look_up`, `finish_communication`, and the way
    back."""

    def __init__(
        self, builder: RankBuilder, layout: Layout, *, index_dtype: str, names: HostOpNames, storage: Storage = DEVICE
    ) -> None:
        self.builder, self.layout, self.index_dtype = builder, layout, index_dtype
        self.sections = layout.sections
        self.lookups = [
            [
                KernelLookup.from_batch(builder, batch, self._count_rows(section), storage)
                for batch in section.ranks[builder.rank]
            ]
            for section in self.sections
        ]
        self.names = names
        self.outputs = [self._make_output(section) for section in self.sections]
        self.reshapes: dict[str, int] = {}  # by kind of sharding
        self.copies = self._list_data_parallel_lookups()
        self.reducer: Reducer | None = None
        self.stepped: list[OptimizedParameter] = []
        self._parts: list[int] = []
        self._grads: list[list[Ref]] = []
        self._reduced: list[Ref] = []

    @property
    def columns(self) -> int:
        """Columns of every sample's rows together."""
        return sum(output.columns for output in self.outputs)

    @property
    def own_samples(self) -> int:
        """Samples of one rank."""
        return self.layout.batch_size

    def count_samples(self, section: Section) -> int:
        """The samples that a rank looks up in the tables of a section."""
        return section.kind.count_samples(self.own_samples, self.layout.world_size)

    def _count_rows(self, section: Section) -> int:
        """Rows that a kernel gives of each of its tables."""
        return self.count_samples(section)

    def _make_output(self, section: Section) -> OutputCommunication:
        """The collective of what the kernels of a section give."""
        return PooledOutputs(self.builder, self.layout, section, self.names)

    def _redistribute_lookups(self, section: Section, features: Features) -> Features | None:
        """Lookups to the ranks that hold the tables of a section."""
        return redistribute_lookups(self.builder, section, features, self.own_samples)

    def attach_ddp(self) -> None:
        """Copied tables get their buckets and the state of their optimizers."""
        builder, forms = self.builder, [lookup.weights.spec for lookup in self.copies]
        self.reducer = Reducer(builder, builder.world, forms, as_views=True) if forms else None
        self.stepped = [
            state
            for lookup in self.copies
            for state in make_optimizer_state(builder, DENSE_OPTIMIZERS[lookup.batch.optimizer], [lookup.weights])
        ]

    def drop_gradients(self) -> None:
        """The gradients of the step before go."""
        if self.reducer is not None:
            self.reducer.drop_gradients()

    def make_resident_lookups(self) -> list[list[Features]]:
        """The lookups of each kernel as if they had been distributed before."""
        builder, kind = self.builder, StorageKind.INPUT
        return [
            [
                Features(
                    builder.add_resident_tensor(
                        (kernel.tables * self.count_samples(section) + 1,), kind, self.index_dtype
                    ),
                    builder.add_resident_tensor((kernel.lookups,), kind, self.index_dtype),
                    builder.add_resident_tensor((kernel.lookups,), kind) if kernel.weighted else None,
                )
                for kernel in section.ranks[builder.rank]
            ]
            for section in self.sections
        ]

    def redistribute_all(self, local: Features) -> list[list[Features]]:
        """The lookups of each kernel, for the samples of all ranks."""
        builder = self.builder
        result = []
        dealt = order_by_section(builder, self.sections, local, self.own_samples)
        for section, features in zip(self.sections, dealt, strict=True):
            batches = section.ranks[builder.rank]
            arrived = features if section.kind.copied else self._redistribute_lookups(section, features)
            parts = (
                split_by_kernel(builder, arrived, batches, self.count_samples(section)) if arrived is not None else []
            )
            result.append([self._make_offsets(part, section, number) for number, part in enumerate(parts)])
        return result

    def look_up(self, features: list[list[Features]]) -> None:
        """Runs the kernels of every section and sends what they pooled on its way."""
        for section, lookups, output, taken in zip(self.sections, self.lookups, self.outputs, features, strict=True):
            self._look_up(section, lookups, output, taken)

    def finish_communication(self) -> list[Ref]:
        """Waits; gives the pooled embeddings of this rank's samples, in the order of sections and senders."""
        parts = []
        for section, output in zip(self.sections, self.outputs, strict=True):
            parts.append([self.local] if section.kind.copied else output.finish_forward())
        self._parts = [len(several) for several in parts]
        return [part for several in parts for part in several]

    def start_backward(self, grads: list[Ref]) -> None:
        """Sends the gradients of what `finish_communication` gave on their way back."""
        flat = iter(grads)
        self._grads = [[next(flat) for _ in range(count)] for count in self._parts]
        for section, output, gradients in reversed(list(zip(self.sections, self.outputs, self._grads, strict=True))):
            if not section.kind.copied:
                output.start_backward(gradients)

    def restore_stashed(self) -> None:
        """Weights that left the device behind their lookup start on their way back."""
        for lookup in (one for several in self.lookups for one in several):
            if lookup.stash is not None:
                lookup.stash.restore()

    def finish_backward(self) -> list[Ref]:
        """Waits for gradients and updates the tables; gives what is held until backward ends."""
        builder = self.builder
        came: list[Ref] = []
        for section, lookups, output, gradients in reversed(
            list(zip(self.sections, self.lookups, self.outputs, self._grads, strict=True))
        ):
            if section.kind.copied:
                self._reduced = self._update_tables(section, lookups, gradients[0])
                builder.free_tensors(gradients[0])
            else:
                flat = output.finish_backward()
                if lookups:
                    self._update_tables(section, lookups, self._shape_gradients(flat, section, lookups))
                builder.free_tensors(flat)
                came += [flat] if self.names.keeps else []
        return came

    def reduce_copies(self) -> None:
        """Reduced gradients of copied tables come back."""
        if self.reducer is not None:
            self.reducer.finish_reduction()

    def step_copies(self) -> None:
        """The optimizers of copied tables."""
        for number, (lookup, stepped, grad) in enumerate(zip(self.copies, self.stepped, self._reduced, strict=True)):
            with self.builder.label_scopes(Mark(ScopeRole.STEP, ShardingKind.DATA_PARALLEL, number)):
                write_foreach_step(self.builder, DENSE_OPTIMIZERS[lookup.batch.optimizer], [stepped], [grad])

    def _list_data_parallel_lookups(self) -> list[KernelLookup]:
        pairs = zip(self.sections, self.lookups, strict=True)
        return [lookup for section, lookups in pairs if section.kind.copied for lookup in lookups]

    def _make_offsets(self, lookups: Features, section: Section, batch: int) -> Features:
        """The lookups of one kernel, by where each bag starts."""
        with self.builder.label_scopes(Mark(ScopeRole.LOOKUP, section.kind, batch)):
            return replace(lookups, bags=write_offsets(self.builder, lookups.bags, self.index_dtype))

    def _look_up(
        self, section: Section, lookups: list[KernelLookup], output: OutputCommunication, inputs: list[Features]
    ) -> None:
        """Runs the kernels of a section and sends what they pooled on its way."""
        builder = self.builder
        pooled = []
        for number, (lookup, features) in enumerate(zip(lookups, inputs, strict=True)):
            weights = features.weights if lookup.batch.weighted else None
            with builder.label_scopes(Mark(ScopeRole.LOOKUP, section.kind, number)):
                pooled.append(lookup.write_forward(features.values, features.bags, weights))
        if section.kind.copied:
            self.local = self._join_pooled(pooled, section)
            return
        if not pooled:
            builder.open_scope("aten::new_empty", Phase.FORWARD)
            flat = builder.compute("aten::empty", [], (0,), [("size", (0,)), ("dtype", None)], module=DLRM_MODULE)
        else:
            whole = self._join_pooled(pooled, section)
            with builder.label_scopes(Mark(ScopeRole.FLATTEN, section.kind)):
                builder.open_scope("aten::reshape")
            flat = builder.add_view(whole, (whole.shape[0] * whole.shape[1],))
            self.reshapes[section.kind] = builder.add_op(
                "aten::view", [("self", whole)], [flat], [("size", (-1,))], module=DLRM_MODULE
            )
        output.start_forward(flat)

    def _join_pooled(self, pooled: list[Ref], section: Section) -> Ref:
        """What several kernels pooled, side by side."""
        if len(pooled) == 1:
            return pooled[0]
        builder = self.builder
        with builder.label_scopes(Mark(ScopeRole.BESIDE, section.kind)):
            builder.open_scope("aten::cat", Phase.FORWARD)
        shape = (pooled[0].shape[0], sum(part.shape[1] for part in pooled))
        joined = builder.compute("aten::cat", [("tensors", pooled)], shape, [("dim", 1)], module=DLRM_MODULE)
        builder.free_tensors(*pooled)
        return joined

    def _shape_gradients(self, flat: Ref, section: Section, lookups: list[KernelLookup]) -> Ref:
        """Gradients as [samples, columns] again."""
        builder, forward = self.builder, self.reshapes[section.kind]
        with builder.label_scopes(Mark(ScopeRole.SHAPE, section.kind)):
            builder.open_scope("ViewBackward0", Phase.BACKWARD)
        shape = (lookups[0].samples, sum(lookup.batch.columns for lookup in lookups))
        whole = builder.add_view(flat, shape)
        builder.add_op("aten::view", [("self", flat)], [whole], [("size", shape)], module=DLRM_MODULE, forward=forward)
        return whole

    def _update_tables(self, section: Section, lookups: list[KernelLookup], grad: Ref) -> list[Ref]:
        """The backward of each kernel; gives the reduced gradients of data-parallel tables."""
        builder = self.builder
        blocks = [grad]
        if len(lookups) > 1:
            with builder.label_scopes(Mark(ScopeRole.PART, section.kind)):
                builder.open_scope("CatBackward0", Phase.BACKWARD)
            blocks = builder.add_column_slices(grad, [lookup.batch.columns for lookup in lookups], module=DLRM_MODULE)
        kept = []
        for number, (lookup, block) in enumerate(zip(lookups, blocks, strict=True)):
            with builder.label_scopes(Mark(ScopeRole.UPDATE, section.kind, number)):
                dense = lookup.write_backward(block)
                if dense is not None and self.reducer is not None:
                    kept.append(self.reducer.accumulate_gradient(dense))
                else:  # the tables' own gradient is none, but the engine visits them all the same
                    builder.open_scope(ACCUMULATE_GRAD)
        return kept
