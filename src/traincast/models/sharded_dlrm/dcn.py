"""The dense part of a DLRM-DCNv2: MLPs, cross network and loss, as TorchRec's model runs them."""

from __future__ import annotations

from collections.abc import Sequence

from traincast.ir.ops import Phase
from traincast.models.data_parallel.buckets import Reducer
from traincast.models.layers.builder import Ref, Scalars
from traincast.models.layers.loss import write_loss_backward
from traincast.models.layers.mlp import Mlp, write_forward
from traincast.models.sharded_dlrm.config import DcnDense
from traincast.models.sharded_dlrm.cross import CrossNetwork
from traincast.models.sharded_dlrm.dense import MODULE, EagerDense

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
