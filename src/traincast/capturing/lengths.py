"""Lengths of jagged tensors through FBGEMM's ops: they do not depend on the ids that are moved with them.

Where ids themselves decide (which rank holds a row), ids that are not known are taken to be spread evenly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from traincast.capturing.assumptions import get_assumptions

Read = Callable[[torch.Tensor], "torch.Tensor | None"]
"""The values of a tensor, None where they are not known."""
_EVEN = "ids whose values are not known are taken to be spread evenly over the blocks of rows"


def find_lengths(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], read: Read) -> dict[int, torch.Tensor]:
    """The values of results that follow from lengths alone, by their position."""
    find = _FINDERS.get(name)
    return {} if find is None else find(read, *args, **kwargs)


def has_lengths(name: str) -> bool:
    """Whether an op of this name passes lengths on."""
    return name in _FINDERS


def _permute_lengths(read: Read, permute: torch.Tensor, lengths: torch.Tensor, *rest: Any, **options: Any) -> Any:
    order, known = read(permute), read(lengths)
    return {} if order is None or known is None else {0: known[order.long()]}


def _spread_lengths(
    read: Read, lengths: torch.Tensor, indices: torch.Tensor, bucketize_pos: bool, sequence: bool,
    block_sizes: torch.Tensor, my_size: int, *rest: Any, **options: Any,
) -> Any:  # fmt: skip
    """Every `my_size`-th id goes to the same block: lengths of bags add up, and blocks get equally many."""
    known = read(lengths)
    if known is None or read(indices) is not None:
        return {}
    get_assumptions().note_assumption(_EVEN)
    ends = known.cumsum(0, dtype=torch.int64)
    starts = ends - known
    blocks = torch.arange(my_size)[:, None]
    below = [(places[None] - blocks + my_size - 1).div(my_size, rounding_mode="floor") for places in (starts, ends)]
    return {0: (below[1] - below[0]).reshape(-1).to(known.dtype)}


def _pick_segments(
    read: Read, values: torch.Tensor, lengths: torch.Tensor, offsets: torch.Tensor, indices: torch.Tensor,
    batch_size: int, *rest: Any, **options: Any,
) -> Any:  # fmt: skip
    """Segments of one batch in another order: their lengths, and what is in them where that is known."""
    sizes, order, inside = read(lengths), read(indices), read(values)
    if sizes is None or order is None or sizes.numel() != batch_size:
        return {}
    found = {1: sizes[order.long()]}
    if inside is not None:
        ends = sizes.cumsum(0)
        found[0] = torch.cat([inside[ends[place] - sizes[place] : ends[place]] for place in order.tolist()])
    return found


_FINDERS: dict[str, Callable[..., Any]] = {
    "fbgemm::keyed_jagged_index_select_dim1": _pick_segments,
    "fbgemm::permute_2D_sparse_data": _permute_lengths,
    "fbgemm::permute_1D_sparse_data": _permute_lengths,
    "fbgemm::block_bucketize_sparse_features": _spread_lengths,
}
