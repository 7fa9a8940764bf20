"""The embedding tables of a DLRM on a tape: lookup and fused update, batched or FBGEMM."""

from __future__ import annotations

from dataclasses import dataclass

from traincast.embeddings.optimizers import OPTIMIZER_STATE
from traincast.programs.dlrm.config import DlrmConfig
from traincast.programs.optimizers import LEARNING_RATE
from traincast.programs.tape import Ref, Tape
from traincast.workload.ops import Phase, Scalar, StorageKind

MODULE = "Dlrm.tables"


@dataclass(slots=True)
class Tables:
    """All tables and, after the lookup, what its backward needs."""

    config: DlrmConfig
    weights: Ref
    constants: tuple[tuple[str, Ref], ...]  # what the kernel reads besides weights, indices and offsets
    states: tuple[Ref, ...]
    checked: tuple[Ref, Ref] | None  # FBGEMM: rows per table and warning count
    indices: Ref | None = None
    offsets: Ref | None = None
    lookup_op: int = -1
    view_op: int = -1


def tables(tape: Tape, config: DlrmConfig) -> Tables:
    """The weights and constants of all tables, there before the step."""
    rows, dim, count = sum(config.table_rows), config.embedding_dim, config.num_tables
    if config.embedding == "batched":
        weights = tape.resident((rows, dim), StorageKind.PARAMETER)
        offsets = tape.resident((count,), StorageKind.BUFFER, "int64")
        return Tables(config, weights, (("table_offsets", offsets),), (), None)
    buffer = StorageKind.BUFFER
    weights = tape.resident((rows * dim,), StorageKind.PARAMETER)
    constants = (
        ("weights_offsets", tape.resident((count,), buffer, "int64")),
        ("D_offsets", tape.resident((count + 1,), buffer, "int32")),
    )
    checked = (tape.resident((count,), buffer, "int64"), tape.resident((1,), buffer, "int64"))
    states = tuple(tape.resident((rows * dim,), buffer) for _ in range(OPTIMIZER_STATE[config.optimizer].tensors))
    return Tables(config, weights, constants, states, checked)


def lookup(tape: Tape, held: Tables, indices: Ref, offsets: Ref, *, keep: bool) -> Ref:
    """Pooled embeddings [batch, tables, dim]. With `keep` (training) the indices stay for the backward pass."""
    config = held.config
    batch = (offsets.shape[0] - 1) // config.num_tables
    shape = (batch, config.num_tables, config.embedding_dim)
    if held.checked is None:
        held.indices, held.offsets = indices, offsets
        tape.scope("LookupFunction", Phase.FORWARD)
        pooled = tape.new(shape)
        held.lookup_op = tape.op(
            "traincast::batched_embedding_forward", _arguments(held), [pooled], _forms(config), module=MODULE
        )
        return pooled
    held.indices, held.offsets = widened(tape, indices), widened(tape, offsets)
    rows, warning = held.checked
    tape.scope("fbgemm::bounds_check_indices")
    checked = [("rows_per_table", rows), ("indices", held.indices), ("offsets", held.offsets), ("warning", warning)]
    tape.op("fbgemm::bounds_check_indices", checked, [], [("bounds_check_mode", 1)], module=MODULE)
    tape.scope("SplitLookupFunction")
    flat = tape.new((batch, shape[1] * shape[2]))
    name = "fbgemm::split_embedding_codegen_forward_unweighted_cuda"
    held.lookup_op = tape.op(name, _arguments(held), [flat], _forms(config), module=MODULE)
    tape.scope("aten::view")
    pooled = tape.view(flat, shape)
    held.view_op = tape.op("aten::view", [("self", flat)], [pooled], [("size", (-1, *shape[1:]))], module=MODULE)
    if not keep and held.indices is not indices:
        tape.free(held.indices, held.offsets)
    return pooled


def update(tape: Tape, held: Tables, grad: Ref) -> None:
    """The backward pass from the gradient of the pooled embeddings: updates the tables in place."""
    config = held.config
    assert held.indices is not None and held.offsets is not None
    if held.checked is None:
        tape.scope("LookupFunctionBackward", Phase.BACKWARD)
        name, arguments = "traincast::batched_embedding_backward_sgd", [("grad", grad), *_arguments(held)]
    else:
        batch, count, dim = grad.shape
        tape.scope("ViewBackward0", Phase.BACKWARD)
        flat = tape.view(grad, (batch, count * dim), (grad.spec.stride[0], 1))
        tape.reshaped(grad, flat, module=MODULE, forward=held.view_op)
        tape.scope("SplitLookupFunctionBackward")
        name = f"fbgemm::split_embedding_backward_codegen_{config.optimizer}_unweighted_exact_cuda"
        moments = [(f"momentum{i + 1}_dev", state) for i, state in enumerate(held.states)]
        arguments = [("grad_output", flat), *_arguments(held), *moments]
    scalars = [*_forms(config), ("learning_rate", LEARNING_RATE)]
    tape.op(name, arguments, [], scalars, module=MODULE, forward=held.lookup_op)
    tape.free(held.indices, held.offsets)
    # the tables' own gradient is none, but the engine visits them all the same
    tape.scope("torch::autograd::AccumulateGrad")


def _arguments(held: Tables) -> list[tuple[str, Ref]]:
    assert held.indices is not None and held.offsets is not None
    weights = "weights" if held.checked is None else "dev_weights"
    return [(weights, held.weights), *held.constants, ("indices", held.indices), ("offsets", held.offsets)]


def _forms(config: DlrmConfig) -> list[tuple[str, Scalar]]:
    dims = (config.embedding_dim,) * config.num_tables
    forms: list[tuple[str, Scalar]] = [("rows", config.rows_per_table), ("dims", dims)]
    if config.access:
        forms += [("pooling", config.lookups_per_table), ("access", config.access)]
    if config.embedding == "fbgemm":
        return [("total_D", sum(dims)), ("max_D", max(dims)), *forms]
    return forms


def widened(tape: Tape, indices: Ref) -> Ref:
    """FBGEMM works on int64 indices."""
    tape.scope("aten::to", Phase.FORWARD)
    return indices if indices.spec.dtype == "int64" else tape.cast(indices, "int64", module=MODULE)[0]
