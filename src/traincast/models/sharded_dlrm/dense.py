"""The dense part of a sharded DLRM or DLRM-DCNv2: MLPs, interaction or cross network, and loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from traincast.ir.ops import Phase
from traincast.models.data_parallel.data_parallel import Reducer
from traincast.models.dlrm.config import INDEX_DTYPES, INTERACTIONS, LOSSES, OPTIMIZERS, DcnConfig, DlrmConfig
from traincast.models.embeddings.table import OPTIMIZER_STATE, STATE_ITEM_BYTES
from traincast.models.layers.builder import RankBuilder, Ref, Scalars
from traincast.models.layers.interaction import Interaction, write_dot_products, write_dot_products_backward
from traincast.models.layers.mlp import (
    Mlp,
    write_backward_start,
    write_forward,
    write_loss_backward,
    write_loss_forward,
)
from traincast.models.layers.optimizers import make_optimizer_state, write_foreach_step, zero_grad
from traincast.models.sharded_dlrm.cross import CrossNetwork
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


MODULE = "Dlrm"


class EagerDense:
    """The parts of one step that every rank runs on its own samples, in the order they run."""

    def __init__(self, builder: RankBuilder, dense: Dense, columns: int, batch: int) -> None:
        self.builder, self.dense, self.batch = builder, dense, batch
        builder.half = dense.half
        self.bottom = Mlp(builder, f"{MODULE}.bottom", dense.bottom_mlp, input_grad=False)
        self.float_op = -1
        self.modules: list[Mlp | CrossNetwork] = [
            self.bottom,
            *self._make_top_modules(dense.compute_top_width(columns)),
        ]
        self.reducers = self._make_reducers()
        self.stepped = make_optimizer_state(
            builder, dense.optimizer, [ref for module in self.modules for ref in module.list_parameters()]
        )

    def _make_top_modules(self, width: int) -> list[Mlp | CrossNetwork]:
        """Modules after the interaction, whose result is so wide."""
        self.top = Mlp(self.builder, f"{MODULE}.top", (width, *self.dense.top_mlp), last="sigmoid", input_grad=True)
        return [self.top]

    def _make_reducers(self) -> list[Reducer]:
        """Each module is under a DDP of its own."""
        reducers = [Reducer(self.builder, self.builder.world, module.list_gradient_specs()) for module in self.modules]
        for module, reducer in zip(self.modules, reducers, strict=True):
            module.reducer = reducer
        return reducers[::-1]

    def write_inputs(self) -> None:
        """Dense features and targets, copied from the host."""
        self.features = self.builder.add_input_copy((self.batch, self.dense.bottom_mlp[0]), "float32")
        self.target = self.builder.add_input_copy((self.batch, 1), "float32")
        zero_grad(self.builder, self.dense.optimizer)
        for reducer in self.reducers:
            reducer.drop_gradients()

    def write_bottom_forward(self) -> None:
        """The bottom MLP."""
        self.x = self.bottom.write_forward(self.features)

    def write_top_forward(self, embedded: Sequence[Ref]) -> None:
        """Interaction, top MLP and loss from pooled embeddings [batch, columns]."""
        builder, width = self.builder, self.dense.bottom_mlp[-1]
        self.widths = (width, *(part.shape[1] for part in embedded))
        builder.open_scope("aten::cat", Phase.FORWARD)
        joined = builder.add_tensor((self.batch, sum(self.widths)))
        self.cat_op = builder.add_op(
            "aten::cat", [("tensors", (self.x, *embedded))], [joined], [("dim", 1)], module=MODULE
        )
        builder.free_tensors(*embedded)
        if self.dense.interaction == "dot":
            builder.open_scope("aten::view")
            features = builder.add_view(joined, (self.batch, joined.shape[1] // width, width))
            scalars: Scalars = [("size", (self.batch, -1, width))]
            self.view_op = builder.add_op("aten::view", [("self", joined)], [features], scalars, module=MODULE)
            self.dot = Interaction(self.x, features, features, self.view_op, self.cat_op)
            joined = write_dot_products(builder, self.dot, keep=True)
        self.probabilities = self.top.write_forward(joined)
        if builder.half:
            builder.free_tensors(*([] if self.dense.interaction == "dot" else [joined]))
            self.leave_autocast()
            builder.open_scope("aten::to", Phase.LOSS)
            self.probabilities, self.float_op = builder.add_cast(self.probabilities, "float32")
        self._write_loss()

    def leave_autocast(self) -> None:
        """Casts of weights that nothing but autocast's cache holds are let go."""
        for module in self.modules:
            module.leave_autocast()

    def _write_loss(self) -> None:
        self.loss, self.loss_op = write_loss_forward(self.builder, self.dense.loss, self.probabilities, self.target)

    def write_top_backward(self) -> list[Ref]:
        """Back to the pooled embeddings: their gradients, in the order they were given."""
        builder = self.builder
        self.one = write_backward_start(builder, self.loss)
        grad = self._write_loss_backward(self.one)
        if builder.half:
            builder.free_tensors(self.probabilities)
        grad = self.top.write_backward(builder.add_cast_backward(grad, self.float_op, dtype=builder.half))
        return self._write_interaction_backward(grad)

    def _write_loss_backward(self, one: Ref) -> Ref:
        """The gradient of the top MLP's result."""
        return write_loss_backward(
            self.builder, self.dense.loss, one, self.probabilities, self.target, forward=self.loss_op
        )

    def _write_interaction_backward(self, grad: Ref) -> list[Ref]:
        builder = self.builder
        to_x: Ref | None = None
        if self.dense.interaction == "dot":
            to_x, features = write_dot_products_backward(builder, self.dot, grad)
            builder.open_scope("ViewBackward0")
            grad = builder.add_view(features, (self.batch, sum(self.widths)))
            size: Scalars = [("size", grad.shape)]
            builder.add_op("aten::view", [("self", features)], [grad], size, module=MODULE, forward=self.view_op)
        builder.open_scope("CatBackward0", Phase.BACKWARD)
        blocks = builder.add_column_slices(grad, self.widths, module=MODULE, forward=self.cat_op)
        self.x_grad, cast = builder.add_autocast(blocks[0], MODULE)
        if to_x is not None:
            arguments = [("self", to_x), ("other", self.x_grad)]
            narrow = [self.x_grad] if cast >= 0 else []
            self.x_grad = builder.add_tensor(blocks[0].shape, to_x.spec.dtype)
            builder.add_op("aten::add", arguments, [self.x_grad], [("alpha", 1)], overload="Tensor", module=MODULE,
                    forward=self.cat_op)  # fmt: skip
            builder.free_tensors(to_x, *narrow)
        return blocks[1:]

    def write_bottom_backward(self) -> None:
        """Back through the bottom MLP."""
        self.bottom.write_backward(self.x_grad)

    def write_end_of_backward(self) -> None:
        """Reduced gradients come back."""
        for reducer in self.reducers:
            reducer.finish_reduction()
        self.builder.free_tensors(self.one, self.loss)

    def write_optimizer_step(self) -> None:
        """The optimizer's."""
        grads = [ref for module in self.modules for ref in module.list_gradients()]
        write_foreach_step(self.builder, self.dense.optimizer, self.stepped, grads)


TABLES = f"{MODULE}.tables"


class EagerDcn(EagerDense):
    """The parts of one step that every rank runs on its own samples. All modules are under one DDP."""

    dense: DcnDense

    def _make_top_modules(self, width: int) -> list[Mlp | CrossNetwork]:
        """The cross network, and the top MLP that ends in a logit."""
        layers, rank = self.dense.cross_layers, self.dense.cross_rank
        self.cross = CrossNetwork(self.builder, f"{MODULE}.cross", width, layers, rank)
        self.top = Mlp(self.builder, f"{MODULE}.top", (width, *self.dense.top_mlp), last="", input_grad=True)
        return [self.cross, self.top]

    def _make_reducers(self) -> list[Reducer]:
        """Gradients of all modules in the order in which they come."""
        forms = [form for module in reversed(self.modules) for form in module.list_gradient_specs()]
        reducer = Reducer(self.builder, self.builder.world, forms)
        for module in self.modules:
            module.reducer = reducer
        return [reducer]

    def write_top_forward(self, embedded: Sequence[Ref]) -> None:
        """Cross network, top MLP and loss from pooled embeddings [batch, columns]."""
        builder, dim = self.builder, self.dense.bottom_mlp[-1]
        pooled = self._join_pooled(embedded)
        count = pooled.shape[1] // dim
        builder.open_scope("aten::view", Phase.FORWARD)
        tables = builder.add_view(pooled, (self.batch, count, dim))
        self.split_op = builder.add_op(
            "aten::view", [("self", pooled)], [tables], [("size", (-1, count, dim))], module=TABLES
        )
        builder.open_scope("aten::unsqueeze")
        x = builder.add_view(self.x, (self.batch, 1, dim))
        self.unsqueeze_op = builder.add_op("aten::unsqueeze", [("self", self.x)], [x], [("dim", 1)], module=MODULE)
        builder.open_scope("aten::cat")
        joined = builder.add_tensor((self.batch, 1 + count, dim))
        self.cat_op = builder.add_op("aten::cat", [("tensors", (x, tables))], [joined], [("dim", 1)], module=MODULE)
        builder.open_scope("aten::view")
        flat = builder.add_view(joined, (self.batch, (1 + count) * dim))
        self.view_op = builder.add_op(
            "aten::view", [("self", joined)], [flat], [("size", (self.batch, -1))], module=MODULE
        )
        crossed = self.cross.write_forward(flat)
        # the last layer is a module of its own: the one before lets go of what it was given
        hidden = write_forward(builder, self.top.layers[:-1], crossed, keep=True)
        if builder.half and hidden is not crossed:
            builder.free_tensors(crossed)
        self.probabilities = write_forward(builder, self.top.layers[-1:], hidden, keep=True)
        builder.free_tensors(pooled)
        self._write_loss()

    def _join_pooled(self, embedded: Sequence[Ref]) -> Ref:
        """What came from each sender, side by side."""
        builder = self.builder
        self.parts = [part.shape[1] for part in embedded]
        if len(embedded) == 1:
            return embedded[0]
        builder.open_scope("aten::cat", Phase.FORWARD)
        pooled = builder.add_tensor((self.batch, sum(self.parts)))
        self.pooled_op = builder.add_op("aten::cat", [("tensors", embedded)], [pooled], [("dim", 1)], module=TABLES)
        builder.free_tensors(*embedded)
        return pooled

    def _write_loss(self) -> None:
        builder, name = self.builder, "aten::binary_cross_entropy_with_logits"
        builder.open_scope(name, Phase.LOSS)
        if builder.half:
            self.probabilities, self.float_op = builder.add_cast(self.probabilities, "float32")
        self.loss = builder.add_tensor(())
        scalars: Scalars = [("weight", None), ("pos_weight", None), ("reduction", 1)]
        self.loss_op = builder.add_op(
            name, [("self", self.probabilities), ("target", self.target)], [self.loss], scalars
        )
        self.leave_autocast()

    def _write_loss_backward(self, one: Ref) -> Ref:
        """The gradient of the logits."""
        return write_loss_backward(self.builder, "logits", one, self.probabilities, self.target, forward=self.loss_op)

    def _write_interaction_backward(self, grad: Ref) -> list[Ref]:
        builder, dim, columns = self.builder, self.dense.bottom_mlp[-1], sum(self.parts)
        grad = self.cross.write_backward(grad)
        count = columns // dim
        builder.open_scope("ViewBackward0")
        joined = builder.add_view(grad, (self.batch, 1 + count, dim))
        builder.add_op(
            "aten::view", [("self", grad)], [joined], [("size", joined.shape)], module=MODULE, forward=self.view_op
        )
        builder.open_scope("CatBackward0")
        x, tables = builder.add_column_slices(joined, (1, count), module=MODULE, forward=self.cat_op)
        x, cast = builder.add_autocast(x, MODULE)
        builder.open_scope("UnsqueezeBackward0")
        self.x_grad = builder.add_view(x, (self.batch, dim), (dim if cast >= 0 else columns + dim, 1))
        builder.add_op("aten::squeeze", [("self", x)], [self.x_grad], [("dim", 1)], overload="dim", module=MODULE,
                forward=self.unsqueeze_op)  # fmt: skip
        builder.open_scope("ViewBackward0")
        pooled = builder.add_view(grad, (self.batch, columns), (columns + dim, 1))
        builder.add_reshape(tables, pooled, module=TABLES, forward=self.split_op)
        return self._split_gradients(pooled)

    def _split_gradients(self, pooled: Ref) -> list[Ref]:
        """The gradients of what came from each sender."""
        if len(self.parts) == 1:
            return [pooled]
        self.builder.open_scope("CatBackward0")
        return self.builder.add_column_slices(pooled, self.parts, module=TABLES, forward=self.pooled_op)
