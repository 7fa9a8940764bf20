"""FBGEMM's ops on meta tensors, where the library has no answer without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_SPACE = "fbgemm"


class _PermutedPooled(torch.autograd.Function):
    """Columns of pooled embeddings in another order, and their gradients back: one kernel each way."""

    @staticmethod
    def forward(ctx: Any, op: Any, pooled: Any, offsets: Any, order: Any, back_offsets: Any, back_order: Any) -> Any:
        ctx.call = (op, (back_offsets, back_order, offsets, order))
        return op(pooled, offsets, order, back_offsets, back_order)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        op, orders = ctx.call
        return None, op(grad, *orders), None, None, None, None


def _permute_pooled(*args: Any, **kwargs: Any) -> Any:
    return _PermutedPooled.apply(torch.ops.fbgemm.permute_pooled_embs_split.default, *args, **kwargs)  # type: ignore[no-untyped-call]


_REPLACED: dict[str, Callable[..., Any]] = {"permute_pooled_embs_auto_grad_split": _permute_pooled}
_MANAGED = ("new_unified_tensor", "new_managed_tensor", "new_host_mapped_tensor", "new_vanilla_managed_tensor")


def makes_managed(func: Any) -> bool:
    """Whether an op of FBGEMM makes a tensor in unified memory."""
    return _find_name(func) in _MANAGED


def find_fbgemm_function(func: Any) -> Callable[..., Any] | None:
    """A function of other ops that an op of FBGEMM is made of on a GPU; None for all other functions."""
    return _REPLACED.get(_find_name(func))


def _find_name(func: Any) -> str:
    """The name of an op of FBGEMM; "" for all other functions."""
    space, _, op = (getattr(func, "_qualified_op_name", None) or "").replace("::", ".").partition(".")
    return str(op.partition(".")[0]) if space == _SPACE else ""


def _return_nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _infer_unique(indices: torch.Tensor, largest: int, compute_count: bool) -> Any:
    """As many places as indices, how many are used, and how often each index is there."""
    counts = indices.new_empty(indices.numel(), dtype=torch.int32) if compute_count else None
    return torch.empty_like(indices), indices.new_empty(1, dtype=torch.int32), counts


def _infer_segments(
    values: torch.Tensor, lengths: torch.Tensor, offsets: torch.Tensor, indices: torch.Tensor, batch_size: int,
    weights: torch.Tensor | None = None, selected_lengths_sum: int | None = None,
) -> list[torch.Tensor]:  # fmt: skip
    """Segments of every `batch_size` that are picked: where nobody says how long they are, as long as the others."""
    total = selected_lengths_sum
    if total is None:
        total = round(values.numel() * indices.numel() / max(1, batch_size))
    picked = [values.new_empty(total), lengths.new_empty(indices.numel() * (lengths.numel() // batch_size))]
    return picked if weights is None else [*picked, weights.new_empty(total)]


_SHAPES: dict[str, Callable[..., Any]] = {
    "fbgemm::keyed_jagged_index_select_dim1": _infer_segments,
    "fbgemm::lxu_cache_flush": _return_nothing,
    "fbgemm::lru_cache_populate": _return_nothing,
    "fbgemm::lfu_cache_populate": _return_nothing,
    "fbgemm::lxu_cache_locations_update": _return_nothing,
    "fbgemm::lxu_cache_locking_counter_decrement": _return_nothing,
    "fbgemm::reset_weight_momentum": _return_nothing,
    "fbgemm::get_unique_indices": _infer_unique,
    "fbgemm::uvm_storage": lambda tensor: False,
}


def find_fbgemm_shape(name: str) -> Callable[..., Any] | None:
    """What an op of this name makes, where its library does not say."""
    return _SHAPES.get(name)
