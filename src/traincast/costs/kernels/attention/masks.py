"""Masks of attention as programs state them, and how many keys a query meets under one."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from traincast.costs.kernels.operands import read_integer_argument
from traincast.ir.ops import Signature

_BLOCK = 128  # queries that a block of fused attention works on, and keys of its step
_CAUSAL, _LOWER_RIGHT = 1, 2  # `custom_mask_type` of the memory-efficient kernel


@dataclass(frozen=True, slots=True)
class Mask:
    """Which keys a query sees: so many `before` and `after` its own place (-1: all). Places are counted from the first
    query and key, or from the last ones (`lower_right`), which matters where there are more keys than queries."""

    before: int = -1
    after: int = -1
    lower_right: bool = False

    @staticmethod
    def of(signature: Signature) -> Mask:
        """Of an op of PyTorch's: flash attention aligns the last query and key, `scaled_dot_product_attention` the
        first."""
        kind = read_integer_argument(signature, "custom_mask_type")
        before, after = _read_sides(signature)
        before = read_integer_argument(signature, "window_size_left", before)
        after = read_integer_argument(signature, "window_size_right", after)
        if signature.scalar("is_causal", False) or kind in (_CAUSAL, _LOWER_RIGHT):
            after = 0
        last = kind == _LOWER_RIGHT if kind else not signature.name.startswith("aten::_scaled")
        return Mask(before, after, lower_right=last)

    @property
    def causal(self) -> bool:
        """Whether no query sees what comes after it."""
        return self.after == 0

    def count_keys(self, queries: int, keys: int) -> tuple[int, bool]:
        """Keys that a query meets, and whether half of them are under the diagonal of a square causal mask. Of other
        masks, the keys of all steps that a block of queries makes: a narrow window costs whole tiles."""
        if self.before < 0 and (self.after < 0 or (self.causal and queries == keys)):
            return keys, self.causal
        first = np.arange(0, queries, _BLOCK)
        last = np.minimum(first + _BLOCK, queries) - 1
        shift = keys - queries if self.lower_right else 0
        begin = np.maximum(first + shift - self.before, 0) if self.before >= 0 else np.zeros_like(first)
        end = np.minimum(last + shift + self.after, keys - 1) if self.after >= 0 else np.full_like(last, keys - 1)
        tiles = np.where(end < begin, 0, end // _BLOCK - begin // _BLOCK + 1)
        seen = np.minimum(tiles * _BLOCK, keys) * (last - first + 1)
        return max(1, round(float(seen.sum()) / queries)), False


def _read_sides(signature: Signature) -> tuple[int, int]:
    """Of a window that is given as a pair."""
    given = signature.scalar("window_size")
    sides = tuple(side for side in given if isinstance(side, int)) if isinstance(given, tuple) else ()
    return (sides[0], sides[1]) if len(sides) == 2 else (-1, -1)
