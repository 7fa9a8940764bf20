"""Table-batched lookups and their fused updates on a rank's tape, as FBGEMM runs them."""

from __future__ import annotations

from dataclasses import dataclass

from traincast.embeddings.optimizers import OPTIMIZER_STATE
from traincast.placement.kinds import ComputeKernel
from traincast.programs.dlrm.tables import MODULE, widened
from traincast.programs.optimizers import LEARNING_RATE
from traincast.programs.rank_tape import RankTape
from traincast.programs.sharded.layout import Batch
from traincast.programs.tape import Ref, Scalars
from traincast.workload.ops import Phase, Scalar, StorageKind

DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
_CACHE_WAYS = 32


@dataclass(slots=True, eq=False)
class Lookup:
    """One table-batched kernel of a rank: its weights and, after `forward`, what its backward needs."""

    tape: RankTape
    batch: Batch
    samples: int
    weights: Ref
    constants: tuple[tuple[str, Ref], ...]
    states: tuple[Ref, ...]
    checked: tuple[Ref, Ref]
    cache: Ref | None
    indices: Ref | None = None
    offsets: Ref | None = None
    per_sample: Ref | None = None
    op: int = -1

    @staticmethod
    def of(tape: RankTape, batch: Batch, samples: int) -> Lookup:
        """The weights and constants of the kernel, there before the step."""
        buffer = StorageKind.BUFFER
        dtype, in_host = DTYPES[batch.dtype], batch.kernel.in_host_memory
        place = "cpu:pinned" if in_host else "cuda"
        cached = batch.kernel.cached
        count = 0 if batch.kernel is ComputeKernel.DENSE else OPTIMIZER_STATE[batch.optimizer].tensors
        shape = (batch.state_elements // max(count, 1),)
        # FBGEMM keeps the small row-wise state on the device, also of tables in host memory
        beside = "cuda" if batch.optimizer == "rowwise_adagrad" else place
        states = tuple(tape.resident(shape, StorageKind.OPTIMIZER_STATE, device=beside) for _ in range(count))
        return Lookup(
            tape=tape,
            batch=batch,
            samples=samples,
            weights=tape.resident((batch.elements,), StorageKind.PARAMETER, dtype, place),
            constants=(
                ("weights_offsets", tape.resident((batch.tables,), buffer, "int64")),
                ("D_offsets", tape.resident((batch.tables + 1,), buffer, "int32")),
            ),
            states=states,
            checked=(tape.resident((batch.tables,), buffer, "int64"), tape.resident((1,), buffer, "int64")),
            cache=tape.resident((batch.cached_elements,), StorageKind.PARAMETER, dtype) if cached else None,
        )

    def forward(self, indices: Ref, offsets: Ref, weights: Ref | None) -> Ref:
        """Pooled embeddings [samples, columns]; `weights` are those of weighted lookups."""
        tape, batch = self.tape, self.batch
        self.indices, self.offsets = self._widened(indices), self._widened(offsets)
        self.per_sample = weights
        rows, warning = self.checked
        tape.scope("fbgemm::bounds_check_indices", Phase.FORWARD)
        checked = [("rows_per_table", rows), ("indices", self.indices), ("offsets", self.offsets), ("warning", warning)]
        tape.op("fbgemm::bounds_check_indices", checked, [], [("bounds_check_mode", 1)], module=MODULE)
        if self.cache is not None:
            self._fill_cache()
        tape.scope("SplitLookupFunction")
        pooled = tape.new((self.samples, batch.columns))
        kind = "weighted" if batch.weighted else "unweighted"
        name = f"fbgemm::split_embedding_codegen_forward_{kind}_cuda"
        if batch.kernel is ComputeKernel.DENSE:
            name = f"fbgemm::dense_embedding_codegen_forward_{kind}_cuda"
        self.op = tape.op(name, self._arguments(), [pooled], self._forms(), module=MODULE)
        return pooled

    def backward(self, grad: Ref) -> Ref | None:
        """Updates the tables in place; of `dense` ones gives the gradient."""
        tape, batch = self.tape, self.batch
        assert self.indices is not None and self.offsets is not None
        tape.scope("SplitLookupFunctionBackward", Phase.BACKWARD)
        kind = "weighted" if batch.weighted else "unweighted"
        optimizer = "dense" if batch.kernel is ComputeKernel.DENSE else batch.optimizer
        name = f"fbgemm::split_embedding_backward_codegen_{optimizer}_{kind}_exact_cuda"
        moments = [(f"momentum{i + 1}_dev", state) for i, state in enumerate(self.states)]
        arguments = [("grad_output", grad), *self._arguments(), *moments]
        outputs, result = [], None
        if batch.kernel is ComputeKernel.DENSE:
            result = tape.new((batch.elements,), DTYPES[batch.dtype])
            outputs = [result]
        scalars = [*self._forms(), ("learning_rate", LEARNING_RATE)]
        tape.op(name, arguments, outputs, scalars, module=MODULE, forward=self.op)
        tape.free(self.indices, self.offsets, *([] if self.per_sample is None else [self.per_sample]))
        return result

    def _fill_cache(self) -> None:
        """Rows that the cache misses come from the host, those they replace go back."""
        tape, batch = self.tape, self.batch
        assert self.indices is not None and self.cache is not None
        count = self.indices.shape[0]
        tape.scope("fbgemm::linearize_cache_indices")
        linear = tape.new((count,), "int64")
        tape.op("fbgemm::linearize_cache_indices", [("indices", self.indices)], [linear], module=MODULE)
        tape.scope("fbgemm::lru_cache_populate")
        arguments = [("weights", self.weights), ("linear_cache_indices", linear), ("lxu_cache_weights", self.cache)]
        scalars: Scalars = [("fetched_rows", batch.fetched_rows), ("fetched_bytes", batch.fetched_bytes),
                            ("unique_rows", batch.load[2]), ("total_rows", batch.rows)]  # fmt: skip
        tape.op("fbgemm::lru_cache_populate", arguments, [], scalars, module=MODULE)
        tape.scope("fbgemm::lxu_cache_lookup")
        places = tape.new((count,), "int32")
        tape.op("fbgemm::lxu_cache_lookup", [("linear_cache_indices", linear)], [places],
                [("ways", _CACHE_WAYS)], module=MODULE)  # fmt: skip
        tape.free(linear, places)

    def _arguments(self) -> list[tuple[str, Ref]]:
        assert self.indices is not None and self.offsets is not None
        given = [("dev_weights", self.weights), *self.constants, ("indices", self.indices), ("offsets", self.offsets)]
        if self.per_sample is not None:
            given.append(("indice_weights", self.per_sample))
        return given

    def _forms(self) -> list[tuple[str, Scalar]]:
        batch = self.batch
        forms: list[tuple[str, Scalar]] = [
            ("total_D", batch.columns), ("max_D", batch.widest), ("total_rows", batch.rows), ("load", batch.load),
            ("longest_bag", batch.longest_bag),
        ]  # fmt: skip
        return [*forms, ("host", batch.kernel.host_access)] if batch.kernel.in_host_memory else forms

    def _widened(self, indices: Ref) -> Ref:
        wide = widened(self.tape, indices)
        if wide is not indices:
            self.tape.free(indices)
        return wide
