"""The dense part of a DLRM-DCNv2: MLPs, cross network and loss, as TorchRec's model runs them."""

from __future__ import annotations

from collections.abc import Sequence

from traincast.ir.ops import Phase
from traincast.models.data_parallel.reducer import Reducer
from traincast.models.layers.builder import Ref, Scalars
from traincast.models.layers.mlp import Mlp, forward
from traincast.models.sharded_dlrm.config import DcnDense
from traincast.models.sharded_dlrm.cross import CrossNetwork
from traincast.models.sharded_dlrm.dense import MODULE, EagerDense

TABLES = f"{MODULE}.tables"


class EagerDcn(EagerDense):
    """The parts of one step that every rank runs on its own samples. All modules are under one DDP."""

    dense: DcnDense

    def _above(self, width: int) -> list[Mlp | CrossNetwork]:
        """The cross network, and the top MLP that ends in a logit."""
        layers, rank = self.dense.cross_layers, self.dense.cross_rank
        self.cross = CrossNetwork(self.builder, f"{MODULE}.cross", width, layers, rank)
        self.top = Mlp(self.builder, f"{MODULE}.top", (width, *self.dense.top_mlp), last="", input_grad=True)
        return [self.cross, self.top]

    def _under_ddp(self) -> list[Reducer]:
        """Gradients of all modules in the order in which they come."""
        forms = [form for module in reversed(self.modules) for form in module.arriving()]
        reducer = Reducer(self.builder, self.builder.world, forms)
        for module in self.modules:
            module.reducer = reducer
        return [reducer]

    def top_forward(self, embedded: Sequence[Ref]) -> None:
        """Cross network, top MLP and loss from pooled embeddings [batch, columns]."""
        builder, dim = self.builder, self.dense.bottom_mlp[-1]
        pooled = self._pooled(embedded)
        count = pooled.shape[1] // dim
        builder.scope("aten::view", Phase.FORWARD)
        tables = builder.view(pooled, (self.batch, count, dim))
        self.split_op = builder.op(
            "aten::view", [("self", pooled)], [tables], [("size", (-1, count, dim))], module=TABLES
        )
        builder.scope("aten::unsqueeze")
        x = builder.view(self.x, (self.batch, 1, dim))
        self.unsqueeze_op = builder.op("aten::unsqueeze", [("self", self.x)], [x], [("dim", 1)], module=MODULE)
        builder.scope("aten::cat")
        joined = builder.new((self.batch, 1 + count, dim))
        self.cat_op = builder.op("aten::cat", [("tensors", (x, tables))], [joined], [("dim", 1)], module=MODULE)
        builder.scope("aten::view")
        flat = builder.view(joined, (self.batch, (1 + count) * dim))
        self.view_op = builder.op("aten::view", [("self", joined)], [flat], [("size", (self.batch, -1))], module=MODULE)
        crossed = self.cross.forward(flat)
        # the last layer is a module of its own: the one before lets go of what it was given
        hidden = forward(builder, self.top.layers[:-1], crossed, keep=True)
        if builder.half and hidden is not crossed:
            builder.free(crossed)
        self.probabilities = forward(builder, self.top.layers[-1:], hidden, keep=True)
        builder.free(pooled)
        self._loss()

    def _pooled(self, embedded: Sequence[Ref]) -> Ref:
        """What came from each sender, side by side."""
        builder = self.builder
        self.parts = [part.shape[1] for part in embedded]
        if len(embedded) == 1:
            return embedded[0]
        builder.scope("aten::cat", Phase.FORWARD)
        pooled = builder.new((self.batch, sum(self.parts)))
        self.pooled_op = builder.op("aten::cat", [("tensors", embedded)], [pooled], [("dim", 1)], module=TABLES)
        builder.free(*embedded)
        return pooled

    def _loss(self) -> None:
        builder, name = self.builder, "aten::binary_cross_entropy_with_logits"
        builder.scope(name, Phase.LOSS)
        if builder.half:
            self.probabilities, self.float_op = builder.cast(self.probabilities, "float32")
        self.loss = builder.new(())
        scalars: Scalars = [("weight", None), ("pos_weight", None), ("reduction", 1)]
        self.loss_op = builder.op(name, [("self", self.probabilities), ("target", self.target)], [self.loss], scalars)
        self.leave_autocast()

    def _loss_backward(self, one: Ref) -> Ref:
        """The gradient of the logits."""
        builder = self.builder
        builder.scope("BinaryCrossEntropyWithLogitsBackward0")
        shape = self.probabilities.shape
        likely = builder.new(shape)
        builder.op("aten::sigmoid", [("self", self.probabilities)], [likely], forward=self.loss_op)
        arguments = [("self", likely), ("other", self.target)]
        missed = builder.new(shape)
        builder.op("aten::sub", arguments, [missed], [("alpha", 1)], overload="Tensor", forward=self.loss_op)
        builder.free(likely)
        grad = builder.new(shape)
        builder.op("aten::mul", [("self", missed), ("other", one)], [grad], overload="Tensor", forward=self.loss_op)
        builder.free(missed)
        mean: Scalars = [("other", self.batch)]
        builder.op("aten::div_", [("self", grad)], [grad], mean, overload="Scalar", forward=self.loss_op)
        return grad

    def _interaction_backward(self, grad: Ref) -> list[Ref]:
        builder, dim, columns = self.builder, self.dense.bottom_mlp[-1], sum(self.parts)
        grad = self.cross.backward(grad)
        count = columns // dim
        builder.scope("ViewBackward0")
        joined = builder.view(grad, (self.batch, 1 + count, dim))
        builder.op(
            "aten::view", [("self", grad)], [joined], [("size", joined.shape)], module=MODULE, forward=self.view_op
        )
        builder.scope("CatBackward0")
        x, tables = builder.slices(joined, (1, count), module=MODULE, forward=self.cat_op)
        x, cast = builder.autocast(x, MODULE)
        builder.scope("UnsqueezeBackward0")
        self.x_grad = builder.view(x, (self.batch, dim), (dim if cast >= 0 else columns + dim, 1))
        builder.op("aten::squeeze", [("self", x)], [self.x_grad], [("dim", 1)], overload="dim", module=MODULE,
                forward=self.unsqueeze_op)  # fmt: skip
        builder.scope("ViewBackward0")
        pooled = builder.view(grad, (self.batch, columns), (columns + dim, 1))
        builder.reshaped(tables, pooled, module=TABLES, forward=self.split_op)
        return self._parted(pooled)

    def _parted(self, pooled: Ref) -> list[Ref]:
        """The gradients of what came from each sender."""
        if len(self.parts) == 1:
            return [pooled]
        self.builder.scope("CatBackward0")
        return self.builder.slices(pooled, self.parts, module=TABLES, forward=self.pooled_op)
