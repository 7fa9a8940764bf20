"""The dense part of a recommender whose tables are sharded."""

from __future__ import annotations

from dataclasses import dataclass

from traincast.errors import TraincastError, unknown
from traincast.models.dlrm_config import LOSSES, OPTIMIZERS, DlrmConfig

INTERACTIONS = ("dot", "cat")


@dataclass(frozen=True, kw_only=True, slots=True)
class Dense:
    """What every rank has a copy of, under DDP.

    `bottom_mlp` runs from the number of dense features to the width of its output, `top_mlp` lists layer outputs after
    the interaction of that output with all pooled embeddings.
    """

    bottom_mlp: tuple[int, ...]
    top_mlp: tuple[int, ...]
    interaction: str = "dot"
    loss: str = "bce"
    optimizer: str = "sgd"

    def __post_init__(self) -> None:
        if len(self.bottom_mlp) < 2 or not self.top_mlp:
            raise TraincastError("bottom_mlp needs at least two widths and top_mlp one; give them")
        for what, value, known in (
            ("interaction", self.interaction, INTERACTIONS),
            ("loss", self.loss, LOSSES),
            ("optimizer", self.optimizer, OPTIMIZERS),
        ):
            if value not in known:
                raise unknown(what, value, known, f"Choose {', '.join(known)}.")

    @staticmethod
    def of(config: DlrmConfig) -> Dense:
        """The dense part of a DLRM."""
        return Dense(
            bottom_mlp=config.bottom_mlp,
            top_mlp=config.top_mlp,
            interaction=config.interaction,
            loss=config.loss,
            optimizer=config.optimizer,
        )

    def top_input(self, columns: int) -> int:
        """Width of the interaction's output when the embeddings have so many columns together."""
        width = self.bottom_mlp[-1]
        if self.interaction == "cat":
            return width + columns
        if columns % width:
            raise TraincastError(
                f"the dot interaction needs embeddings as wide as the bottom MLP's output ({width}); "
                f"their {columns} columns are no multiple of it"
            )
        features = columns // width + 1
        return features * (features - 1) // 2 + width
