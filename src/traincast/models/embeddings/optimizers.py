"""What each optimizer keeps alongside the weights: the one table that memory, traffic and writers of steps read."""

from __future__ import annotations

from dataclasses import dataclass

STATE_ITEM_BYTES = 4
"""Bytes of one number of optimizer state: fp32 whatever the weights are (FBGEMM's and PyTorch's default)."""


@dataclass(frozen=True, slots=True)
class OptimizerState:
    """Numbers of state that an optimizer keeps: for every weight, and for every row of a table."""

    per_weight: int = 0
    per_row: int = 0

    @property
    def tensors(self) -> int:
        """Tensors of state of one parameter or table."""
        return self.per_weight + self.per_row

    def count_state_per_row(self, columns: int) -> int:
        """Numbers of state that belong to a row of this many columns."""
        return self.per_weight * columns + self.per_row


OPTIMIZER_STATE = {
    "none": OptimizerState(),
    "sgd": OptimizerState(),
    "adagrad": OptimizerState(per_weight=1),  # sums of squared gradients
    "rowwise_adagrad": OptimizerState(per_row=1),  # a row's mean of them
    "adam": OptimizerState(per_weight=2),  # first and second moment
}
