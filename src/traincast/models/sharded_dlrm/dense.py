"""The dense part of a DLRM: MLPs, interaction and loss, as facebookresearch/dlrm runs them."""

from __future__ import annotations

from collections.abc import Sequence

from traincast.ir.ops import Phase
from traincast.models.data_parallel.buckets import Reducer
from traincast.models.layers.builder import RankBuilder, Ref, Scalars
from traincast.models.layers.interaction import Interaction, write_dot_products, write_dot_products_backward
from traincast.models.layers.loss import write_backward_start, write_loss_backward, write_loss_forward
from traincast.models.layers.mlp import Mlp
from traincast.models.layers.optimizers import make_optimizer_state, write_foreach_step, zero_grad
from traincast.models.sharded_dlrm.config import Dense
from traincast.models.sharded_dlrm.cross import CrossNetwork

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
