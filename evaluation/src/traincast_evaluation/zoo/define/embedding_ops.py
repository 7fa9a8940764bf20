"""The embedding operators PyTorch does not ship: the papers' table-batched kernel, and FBGEMM's.

They exist here only by signature (meta kernels), so that a step that uses them can be captured; FBGEMM's in a
name space of their own, as the library may be loaded in the same process, and recorded under its name. `rows` are the
true table heights, which the weights' shape cannot say when fewer rows are resident; `dims` their widths.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from traincast.models.embeddings.table import OPTIMIZER_STATE

FBGEMM_OPTIMIZERS = ("sgd", "adagrad", "rowwise_adagrad", "adam")

_TABLES = "Tensor indices, Tensor offsets, int[] rows, int[] dims"
_FBGEMM_TABLES = f"Tensor weights_offsets, Tensor D_offsets, int total_D, int max_D, {_TABLES}"


def _batched_forward(
    weights: torch.Tensor,
    table_offsets: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    rows: Sequence[int],
    dims: Sequence[int],
) -> torch.Tensor:
    tables = len(rows)
    return weights.new_empty((offsets.shape[0] - 1) // tables, tables, weights.shape[1])


def _fbgemm_forward(
    dev_weights: torch.Tensor,
    weights_offsets: torch.Tensor,
    d_offsets: torch.Tensor,
    total_d: int,
    max_d: int,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    rows: Sequence[int],
    dims: Sequence[int],
) -> torch.Tensor:
    return dev_weights.new_empty((offsets.shape[0] - 1) // len(rows), total_d)


def _writes_in_place(*_: object) -> None:
    """An op without outputs."""


def _register() -> list[torch.library.Library]:
    traincast = torch.library.Library("traincast", "FRAGMENT")
    fbgemm = torch.library.Library("traincast_zoo_fbgemm", "FRAGMENT")

    def add(library: torch.library.Library, schema: str, kernel: Callable[..., object]) -> None:
        library.define(schema)
        library.impl(schema.partition("(")[0], kernel, "Meta")

    add(
        traincast,
        f"batched_embedding_forward(Tensor weights, Tensor table_offsets, {_TABLES}) -> Tensor",
        _batched_forward,
    )
    add(
        traincast,
        "batched_embedding_backward_sgd"
        f"(Tensor grad, Tensor(a!) weights, Tensor table_offsets, {_TABLES}, float learning_rate) -> ()",
        _writes_in_place,
    )
    add(
        fbgemm,
        "bounds_check_indices(Tensor rows_per_table, Tensor(a!) indices, Tensor(b!) offsets, "
        "int bounds_check_mode, Tensor(c!) warning) -> ()",
        _writes_in_place,
    )
    add(
        fbgemm,
        f"split_embedding_codegen_forward_unweighted_cuda(Tensor dev_weights, {_FBGEMM_TABLES}) -> Tensor",
        _fbgemm_forward,
    )
    for optimizer in FBGEMM_OPTIMIZERS:
        states = "".join(f", Tensor(b{i}!) momentum{i + 1}_dev" for i in range(OPTIMIZER_STATE[optimizer].tensors))
        add(
            fbgemm,
            f"split_embedding_backward_codegen_{optimizer}_unweighted_exact_cuda"
            f"(Tensor grad_output, Tensor(a!) dev_weights, {_FBGEMM_TABLES}{states}, float learning_rate) -> ()",
            _writes_in_place,
        )
    return [traincast, fbgemm]


_LIBRARIES = _register()  # kept: a library's ops vanish with it
