"""The dense part of a captured recommender: everything that its step of one GPU does alongside its FBGEMM tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from traincast.ir.memory import compute_peak_memory
from traincast.ir.ops import Phase
from traincast.ir.program import Program
from traincast.ir.workload import TABLES, Workload
from traincast.models.embeddings.documents import list_entries
from traincast.models.embeddings.read import make_table
from traincast.models.embeddings.table import Table
from traincast.models.layers.builder import RankBuilder, Ref
from traincast.models.sharded_dlrm.captured import (
    EmbeddingModule,
    compute_resident_bytes,
    find_embedding_modules,
    find_operand,
)
from traincast.models.sharded_dlrm.copying import ReducingCopier
from traincast.utils.errors import TraincastError
from traincast.utils.files.reading import parse_json

MODULE = "DistributedModelParallel"


@dataclass(frozen=True, eq=False, slots=True)
class CapturedDense:
    """A step of one GPU without the lookups and updates of its embedding `modules`."""

    workload: Workload
    modules: tuple[EmbeddingModule, ...]

    @property
    def program(self) -> Program:
        """The step."""
        return self.workload.programs[0]

    def compute_memory_bytes(self, columns: int, batch_size: int) -> float:
        """Bytes of the step alongside its tables and their state."""
        tables = sum(compute_resident_bytes(self.program, module) for module in self.modules)
        return max(0.0, float(compute_peak_memory(self.program).peak_bytes - tables))


def split_recommender(workload: Workload) -> tuple[tuple[Table, ...], CapturedDense]:
    """The tables of a captured step of one GPU, under the names and lookups that its script had, and all else of it."""
    if workload.mode != "training" or len(workload.ranks) != 1:
        raise TraincastError(f"'{workload.name}' is no training step of one GPU; capture it without `gpus`")
    program = workload.programs[0]
    modules = find_embedding_modules(program)
    if not modules or not all(module.pooled for module in modules):
        raise TraincastError(
            f"the step of '{workload.name}' has no fused tables that pool their rows (an EmbeddingBagCollection under "
            "DistributedModelParallel has), or others besides them; `shard` places only such tables"
        )
    dense = CapturedDense(workload, modules)
    found = [table for module in modules for table in module.tables]
    noted = workload.meta.get(TABLES)
    if noted is None:
        return tuple(found), dense
    entries = list_entries(parse_json(noted, "its tables"), workload.name)
    known = [make_table(entry, f"table {place}", Path()) for place, entry in enumerate(entries, 1)]
    return tuple(_name_table(table, known, workload.name) for table in found), dense


def _name_table(table: Table, known: list[Table], name: str) -> Table:
    """The first table of these sizes that has not been seen, as it was updated."""
    for one in known:
        if (one.rows, one.dim, one.weighted) == (table.rows, table.dim, table.weighted):
            known.remove(one)
            return replace(one, optimizer=table.optimizer)
    raise TraincastError(f"a table of {table.rows} rows of '{name}' is none that its script was seen to have")


class ReplayedDense:
    """The scopes of the captured step in their order: what comes before its lookups, between them and its updates, and
    after."""

    def __init__(self, builder: RankBuilder, dense: CapturedDense, batch: int) -> None:
        source = self.source = dense.program
        if batch != source.batch_size:
            raise TraincastError(f"the step was captured at batch size {source.batch_size}; it has no other")
        self.builder, self.modules = builder, dense.modules
        self.copier = ReducingCopier(source, dense.modules, builder)
        self.done = 0

    def write_inputs(self) -> None:
        """What the step does before its first lookup: its inputs are copied, its bottom part may run."""
        self._copy_until(min(module.forward.start for module in self.modules))

    def write_bottom_forward(self) -> None:
        """It has run."""

    def write_top_forward(self, embedded: Sequence[Ref]) -> None:
        """From pooled embeddings [batch, columns] to the loss."""
        builder, c = self.builder, self.source.columns
        self.widths = [part.shape[1] for part in embedded]
        columns = [module.columns for module in self.modules]
        joined = embedded[0]
        if len(embedded) > 1:
            builder.open_scope("aten::cat", Phase.FORWARD)
            joined = builder.add_tensor((joined.shape[0], sum(self.widths)))
            builder.add_op("aten::cat", [("tensors", embedded)], [joined], [("dim", 1)], module=MODULE)
            builder.free_tensors(*embedded)
        parts = [joined]
        if len(columns) > 1:
            builder.open_scope("aten::split_with_sizes", Phase.FORWARD)
            parts = builder.add_column_slices(joined, columns, module=MODULE)
        for module, part in zip(self.modules, parts, strict=True):
            self.copier.replace_tensor(int(c.output_tensor[c.output_ptr[module.lookup]]), part)
        self._copy_until(self.copier.begin)

    def write_top_backward(self) -> list[Ref]:
        """Back to the pooled embeddings: their gradients, in the order they were given."""
        self._copy_until(max(module.backward.start for module in self.modules))
        builder, c, grads = self.builder, self.source.columns, []
        for module in self.modules:
            spec = self.source.signatures[c.op_signature[module.update]].tensors("grad_output")[0]
            grads.append(self.copier.get_ref(find_operand(self.source, module.update, "grad_output"), spec))
        grad = grads[0]
        if len(grads) > 1:
            builder.open_scope("SplitWithSizesBackward0", Phase.BACKWARD)
            grad = builder.add_tensor((grad.shape[0], sum(self.widths)))
            builder.add_op("aten::cat", [("tensors", grads)], [grad], [("dim", 1)], module=MODULE)
        if len(self.widths) == 1:
            return [grad]
        builder.open_scope("CatBackward0", Phase.BACKWARD)
        return builder.add_column_slices(grad, self.widths, module=MODULE)

    def write_bottom_backward(self) -> None:
        """What is left of backward."""
        self._copy_until(self.copier.end)

    def write_end_of_backward(self) -> None:
        """Reduced gradients come back."""
        self.copier.finish_reduction()

    def write_optimizer_step(self) -> None:
        """The optimizer's, and whatever the loop does besides."""
        self._copy_until(self.source.num_scopes)

    def _copy_until(self, scope: int) -> None:
        """Scopes up to one, those of lookups and updates left out."""
        for one in range(self.done, scope):
            self.copier.copy_scope(one)
        self.done = max(self.done, scope)
