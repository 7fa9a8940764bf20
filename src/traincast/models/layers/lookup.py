"""FBGEMM's table-batched lookup and its fused update, written op by op."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from traincast.ir.ops import Phase, StorageKind
from traincast.models.layers.builder import Ref, Scalars, StepBuilder
from traincast.models.layers.optimizers import LEARNING_RATE

MODULE = "Dlrm.tables"


@dataclass(slots=True, eq=False)
class TableBatchedLookup:
    """One kernel for `tables` tables: their weights and, after `write_forward`, what its backward needs.

    `forms` are the scalars of both kernels. `optimizer` is the one fused into the backward kernel; "dense" tables are
    not updated by it: it gives their gradient. `states` are the fused optimizer's.
    """

    builder: StepBuilder
    tables: int
    weights: Ref
    states: Sequence[Ref]
    forms: Scalars
    optimizer: str
    weighted: bool = False
    indices: Ref | None = None
    offsets: Ref | None = None
    per_sample: Ref | None = None
    op: int = -1
    module: str = MODULE
    _constants: tuple[tuple[str, Ref], ...] = field(init=False)
    _checked: tuple[Ref, Ref] = field(init=False)

    def __post_init__(self) -> None:
        resident, buffer = self.builder.add_resident_tensor, StorageKind.BUFFER
        self._constants = (
            ("weights_offsets", resident((self.tables,), buffer, "int64")),
            ("D_offsets", resident((self.tables + 1,), buffer, "int32")),
        )
        self._checked = (resident((self.tables,), buffer, "int64"), resident((1,), buffer, "int64"))

    @property
    def _weighted(self) -> str:
        return "weighted" if self.weighted else "unweighted"

    def write_bounds_check(self, indices: Ref, offsets: Ref, per_sample: Ref | None = None) -> tuple[Ref, Ref]:
        """Takes the lookups of a batch and checks their bounds; gives them as they are used, in int64. `per_sample`
        are their weights."""
        builder = self.builder
        self.indices, self.offsets, self.per_sample = (
            self._cast_to_int64(indices),
            self._cast_to_int64(offsets),
            per_sample,
        )
        rows, warning = self._checked
        builder.open_scope("fbgemm::bounds_check_indices", Phase.FORWARD)
        checked = [("rows_per_table", rows), ("indices", self.indices), ("offsets", self.offsets), ("warning", warning)]
        builder.add_op("fbgemm::bounds_check_indices", checked, [], [("bounds_check_mode", 1)], module=self.module)
        return self.indices, self.offsets

    def write_forward(self, samples: int, columns: int) -> Ref:
        """Pooled embeddings [samples, columns]."""
        builder, family = self.builder, "dense" if self.optimizer == "dense" else "split"
        builder.open_scope("SplitLookupFunction")
        pooled = builder.add_tensor((samples, columns))
        name = f"fbgemm::{family}_embedding_codegen_forward_{self._weighted}_cuda"
        self.op = builder.add_op(name, self._list_arguments(), [pooled], self.forms, module=self.module)
        return pooled

    def write_backward(self, grad: Ref) -> Ref | None:
        """Updates the tables in place; of dense ones gives the gradient."""
        builder = self.builder
        assert self.indices is not None and self.offsets is not None
        builder.open_scope("SplitLookupFunctionBackward", Phase.BACKWARD)
        name = f"fbgemm::split_embedding_backward_codegen_{self.optimizer}_{self._weighted}_exact_cuda"
        moments = [(f"momentum{i + 1}_dev", state) for i, state in enumerate(self.states)]
        arguments = [("grad_output", grad), *self._list_arguments(), *moments]
        result = builder.add_tensor(self.weights.shape, self.weights.spec.dtype) if self.optimizer == "dense" else None
        scalars = [*self.forms, ("learning_rate", LEARNING_RATE)]
        builder.add_op(
            name, arguments, [] if result is None else [result], scalars, module=self.module, forward=self.op
        )
        builder.free_tensors(self.indices, self.offsets, *([] if self.per_sample is None else [self.per_sample]))
        return result

    def _list_arguments(self) -> list[tuple[str, Ref]]:
        assert self.indices is not None and self.offsets is not None
        arguments = [("dev_weights", self.weights), *self._constants]
        arguments += [("indices", self.indices), ("offsets", self.offsets)]
        return arguments if self.per_sample is None else [*arguments, ("indice_weights", self.per_sample)]

    def _cast_to_int64(self, indices: Ref) -> Ref:
        self.builder.open_scope("aten::to", Phase.FORWARD)
        if indices.spec.dtype == "int64":
            return indices
        wide, _ = self.builder.add_cast(indices, "int64", module=self.module)
        self.builder.free_tensors(indices)  # unless the training loop holds it
        return wide
