"""FBGEMM's jagged tensors, by signature: rows of all sequences one after the other, and the same padded."""

from __future__ import annotations

from typing import Any

import torch


def _padded(
    values: torch.Tensor, offsets: list[torch.Tensor], max_lengths: list[int], padding_value: float = 0.0
) -> torch.Tensor:
    return values.new_empty(offsets[0].shape[0] - 1, *max_lengths, values.shape[-1])


def _jagged(dense: torch.Tensor, offsets: list[torch.Tensor], total_L: int) -> torch.Tensor:
    return dense.new_empty(total_L, dense.shape[-1])


def _register() -> torch.library.Library:
    library = torch.library.Library("traincast_zoo_fbgemm", "FRAGMENT")
    sizes = "Tensor[] offsets, int[] max_lengths, float padding_value"
    library.define(f"jagged_to_padded_dense_forward(Tensor values, {sizes}) -> Tensor")
    library.define("dense_to_jagged_forward(Tensor dense, Tensor[] offsets, int total_L) -> Tensor")
    library.impl("jagged_to_padded_dense_forward", _padded, "Meta")
    library.impl("dense_to_jagged_forward", _jagged, "Meta")
    return library


_LIBRARY = _register()  # kept: a library's ops vanish with it


class ToPadded(torch.autograd.Function):
    """Rows of all sequences to [sequences, longest, width]."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, offsets: torch.Tensor, longest: int) -> torch.Tensor:
        """Zeros where a sequence has ended."""
        ctx.offsets, ctx.rows = offsets, values.shape[0]
        padded: torch.Tensor = torch.ops.traincast_zoo_fbgemm.jagged_to_padded_dense_forward(
            values, [offsets], [longest], 0.0
        )
        return padded

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """The gradients of rows that are there."""
        return torch.ops.traincast_zoo_fbgemm.dense_to_jagged_forward(grads[0], [ctx.offsets], ctx.rows), None, None


class ToJagged(torch.autograd.Function):
    """[sequences, longest, width] to the rows that are there."""

    @staticmethod
    def forward(ctx: Any, padded: torch.Tensor, offsets: torch.Tensor, rows: int) -> torch.Tensor:
        """Rows of all sequences, one after the other."""
        ctx.offsets, ctx.longest = offsets, padded.shape[1]
        values: torch.Tensor = torch.ops.traincast_zoo_fbgemm.dense_to_jagged_forward(padded, [offsets], rows)
        return values

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """Zeros where a sequence has ended."""
        padded = torch.ops.traincast_zoo_fbgemm.jagged_to_padded_dense_forward(
            grads[0], [ctx.offsets], [ctx.longest], 0.0
        )
        return padded, None, None
