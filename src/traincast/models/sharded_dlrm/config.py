"""The dense part of a recommender whose tables are sharded."""

from __future__ import annotations

from dataclasses import dataclass, fields

from traincast.models.dlrm.config import INDEX_DTYPES, INTERACTIONS, LOSSES, OPTIMIZERS, DcnConfig, DlrmConfig
from traincast.models.embeddings.table import OPTIMIZER_STATE, STATE_ITEM_BYTES
from traincast.utils.errors import TraincastError, make_unknown_error

HALVES = ("", "bfloat16", "float16")
_STEP_COPIES = {"adagrad": 2, "adam": 1}  # numbers per parameter that a step makes and drops


@dataclass(frozen=True, kw_only=True, slots=True)
class Dense:
    """What every rank has a copy of, under DDP.

    `bottom_mlp` runs from the number of dense features to the width of its output, `top_mlp` lists layer outputs after
    the interaction of that output with all pooled embeddings. With `half` (bfloat16, float16) the forward pass runs
    under autocast to that type; weights, tables and what is exchanged stay as they are. `index_dtype` is the type of
    the row numbers that it is fed with.
    """

    bottom_mlp: tuple[int, ...]
    top_mlp: tuple[int, ...]
    interaction: str = "dot"
    loss: str = "bce"
    optimizer: str = "sgd"
    half: str = ""
    index_dtype: str = "int64"

    def __post_init__(self) -> None:
        if len(self.bottom_mlp) < 2 or not self.top_mlp:
            raise TraincastError("bottom_mlp needs at least two widths and top_mlp one; give them")
        for what, value, known in (
            ("interaction", self.interaction, INTERACTIONS),
            ("loss", self.loss, LOSSES),
            ("optimizer", self.optimizer, OPTIMIZERS),
            ("half", self.half, HALVES),
            ("index_dtype", self.index_dtype, INDEX_DTYPES),
        ):
            if value not in known:
                raise make_unknown_error(what, value, known, f"Choose {', '.join(known)}.")

    @staticmethod
    def from_dlrm(config: DlrmConfig) -> Dense:
        """The dense part of a DLRM."""
        common = {field.name: getattr(config, field.name) for field in fields(Dense) if field.name != "half"}
        if isinstance(config, DcnConfig):
            return DcnDense(**common, cross_layers=config.cross_layers, cross_rank=config.cross_rank)
        return Dense(**common)

    @property
    def equal_widths(self) -> bool:
        """Whether all embeddings must be as wide as the bottom MLP's output."""
        return self.interaction == "dot"

    def compute_top_width(self, columns: int) -> int:
        """Width of the interaction's output when the embeddings have this many columns together."""
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

    def compute_memory_bytes(self, columns: int, batch_size: int) -> float:
        """Bytes on every rank: weights, gradients, their buckets, optimizer state; activations and their gradients."""
        top = (self.compute_top_width(columns), *self.top_mlp)
        layers = [*zip(self.bottom_mlp, self.bottom_mlp[1:], strict=False), *zip(top, top[1:], strict=False)]
        kept, widest = sum(self.bottom_mlp) + sum(top), max(*self.bottom_mlp, *top)
        # gradients of a layer's output are there before and after its activation function
        activations = batch_size * (kept + max(kept, 2 * widest))
        return self._compute_held_bytes(sum(n * m + m for n, m in layers), activations)

    def _compute_held_bytes(self, parameters: int, activations: int) -> float:
        """Bytes of parameters and activations, which are gone when the optimizer makes what it needs in its step."""
        lasting = parameters * (3 + OPTIMIZER_STATE[self.optimizer].per_weight)
        return STATE_ITEM_BYTES * float(lasting + max(activations, _STEP_COPIES.get(self.optimizer, 0) * parameters))


@dataclass(frozen=True, kw_only=True, slots=True)
class DcnDense(Dense):
    """A dense part with a low-rank cross network over the bottom output and all pooled embeddings, side by side.

    `cross_layers` layers, each through `cross_rank` columns. The top MLP ends in a logit, of which the loss is taken.
    """

    interaction: str = "cat"
    cross_layers: int
    cross_rank: int

    def __post_init__(self) -> None:
        Dense.__post_init__(self)
        if self.interaction != "cat" or self.loss != "bce":
            raise TraincastError("a cross network has interaction 'cat' and loss 'bce'; leave others out")
        if self.cross_layers < 1 or self.cross_rank < 1:
            raise TraincastError("cross_layers and cross_rank must be 1 or more; give them")

    @property
    def equal_widths(self) -> bool:
        """Whether all embeddings must be as wide as the bottom MLP's output."""
        return True

    def compute_memory_bytes(self, columns: int, batch_size: int) -> float:
        """Bytes on every rank, those of the cross network included."""
        width = self.compute_top_width(columns)
        parameters = self.cross_layers * (2 * width * self.cross_rank + width)
        # kept of a layer: the narrow product, what multiplies, the result; at a time in backward: three gradients
        activations = batch_size * (self.cross_layers * (self.cross_rank + 2 * width) + 3 * width)
        return Dense.compute_memory_bytes(self, columns, batch_size) + self._compute_held_bytes(parameters, activations)
