"""The dense part of HugeCTR's DLRM and DCNv2: GEMMs with their activations in epilogues, in half precision."""

from __future__ import annotations

from traincast.ir.ops import Phase, StorageKind
from traincast.models.layers.builder import Communicator, RankBuilder, Ref
from traincast_evaluation.published.fused_layers import FusedStep

DIM, VECTORS = 128, 27
BOTTOM = (16, 512, 256, DIM)  # 13 features, padded to whole vectors of 16 bytes
TOP = (1024, 1024, 512, 256, 1)
DOT_WIDTH = 480  # padded from 479
CROSS_LAYERS, CROSS_RANK = 3, 512
_ALL_REDUCE = 1 << 20  # number of a communicator of its own: it overlaps with the collectives of embeddings


class DenseStep(FusedStep):
    """Bottom MLP, interaction (dot products, or `cross` layers) and top MLP of `batch` samples on one rank."""

    def __init__(self, builder: RankBuilder, batch: int, *, cross: bool) -> None:
        super().__init__(builder, "float16", batch=batch, epilogue=True)
        self.cross = cross
        self.width = VECTORS * DIM if cross else DOT_WIDTH
        self.bottom, self.top = self.mlp(BOTTOM), self.mlp((self.width, *TOP))
        kind, shapes = StorageKind.PARAMETER, ((self.width, CROSS_RANK), (CROSS_RANK, self.width), (self.width,))
        self.crossing = [
            tuple(builder.add_resident_tensor(s, kind) for s in shapes) for _ in range(CROSS_LAYERS if cross else 0)
        ]
        self.inner: list[tuple[Ref, Ref, Ref]] = []  # of each cross layer: its input, the narrow product, the wide one

    def begin(self, *streams: int) -> None:
        """A graph begins when the one before it has ended, on all streams."""
        self.builder.open_scope("hugectr::Graph", Phase.INPUT)
        begun = self.builder.record_event(0)
        for stream in streams:
            self.builder.wait_for_event(begun, stream)

    def end(self, *streams: int) -> None:
        """It has ended when all its streams have."""
        self.builder.open_scope("hugectr::GraphEnd", Phase.OTHER)
        for stream in streams:
            self.builder.wait_for_event(self.builder.record_event(stream))

    @property
    def count(self) -> int:
        """Parameters."""
        refs = [*self.bottom.masters, *self.top.masters, *(ref for layer in self.crossing for ref in layer)]
        return sum(ref.spec.numel for ref in refs)

    def bottom_forward(self) -> Ref:
        """[batch, dim] from the dense features."""
        features = self.builder.add_resident_tensor((self.local, BOTTOM[0]), StorageKind.INPUT, self.dtype)
        return self.forward(self.bottom, features, "hugectr::MLP")

    def top_forward(self, bottom: Ref, embedded: Ref) -> None:
        """From the pooled embeddings [batch, tables, dim] to the loss."""
        builder = self.builder
        builder.open_scope("hugectr::Interaction", Phase.FORWARD)
        crossed = self._cross_forward(bottom, embedded) if self.cross else self._dot_forward(bottom, embedded)
        result = self.forward(self.top, crossed, "hugectr::MLP")
        builder.open_scope("hugectr::BinaryCrossEntropyLoss", Phase.LOSS)
        self.op("aten::sub", [("self", result)], builder.add_tensor(result.shape, self.dtype))

    def _dot_forward(self, bottom: Ref, embedded: Ref) -> Ref:
        """One kernel reads both."""
        result = self.builder.add_tensor((self.local, DOT_WIDTH), self.dtype)
        self.dotted = (bottom, embedded)
        return self.op("nvidia::dot_based_interact", [("input", embedded), ("mlp", bottom)], result)

    def _cross_forward(self, bottom: Ref, embedded: Ref) -> Ref:
        """Both side by side, then layer after layer: x <- first * (x U V + bias) + x."""
        builder = self.builder
        self.joined = x = builder.add_tensor((self.local, self.width), self.dtype)
        pieces = [builder.add_view(ref, (self.local, ref.spec.numel // self.local)) for ref in (embedded, bottom)]
        builder.add_op("aten::cat", [("tensors", pieces)], [x], [("dim", 1)])
        for narrow_weight, wide_weight, bias in self.crossing:
            half = [
                builder.add_resident_tensor(ref.shape, StorageKind.PARAMETER, self.dtype)
                for ref in (narrow_weight, wide_weight)
            ]
            shift = builder.add_resident_tensor(bias.shape, StorageKind.PARAMETER, self.dtype)
            narrow = self.op(
                "aten::mm", [("self", x), ("mat2", half[0])], builder.add_tensor((self.local, CROSS_RANK), self.dtype)
            )
            arguments = [("self", shift), ("mat1", narrow), ("mat2", half[1])]
            wide = self.op(
                "aten::_addmm_activation",
                arguments,
                builder.add_tensor(x.shape, self.dtype),
                [("beta", 1), ("alpha", 1)],
            )
            self.inner.append((x, narrow, wide))
            x = self.op(
                "hugectr::cross",
                [("x0", self.joined), ("wide", wide), ("x", x)],
                builder.add_tensor(x.shape, self.dtype),
            )
        return x

    def interaction_backward(self) -> Ref:
        """Back through the top MLP to the gradients of all vectors, [batch, vectors, dim]."""
        builder = self.builder
        grad = builder.add_resident_tensor((self.local, 1), StorageKind.ACTIVATION, self.dtype)
        grad = self.backward(self.top, grad, "hugectr::MLPBackward", input_grad=True)
        builder.open_scope("hugectr::InteractionBackward", Phase.BACKWARD)
        if self.cross:
            return builder.add_view(self._cross_backward(grad), (self.local, VECTORS, DIM))
        bottom, embedded = self.dotted
        arguments = [("input", embedded), ("mlp", bottom), ("grad", grad)]
        result = builder.add_tensor((self.local, VECTORS, DIM), self.dtype)
        return self.op("nvidia::dot_based_interact_backward", arguments, result)

    def _cross_backward(self, grad: Ref) -> Ref:
        builder = self.builder
        to_first = builder.add_resident_tensor(grad.shape, StorageKind.ACTIVATION, self.dtype)
        for (narrow_weight, wide_weight, _), (x, narrow, wide) in zip(
            reversed(self.crossing), reversed(self.inner), strict=True
        ):
            to_wide = builder.add_tensor(grad.shape, self.dtype)
            arguments = [("grad", grad), ("x0", self.joined), ("wide", wide), ("x0_grad", to_first)]
            builder.add_op("hugectr::cross_backward", arguments, [to_wide, builder.add_view(to_first, to_first.shape)])
            to_narrow = self._product_backward(narrow, wide_weight, to_wide)
            grad = self._product_backward(x, narrow_weight, to_narrow)
        return self.op("aten::add_", [("self", grad), ("other", to_first)], grad)

    def _product_backward(self, given: Ref, weight: Ref, grad: Ref) -> Ref:
        """Gradients of a product's weight, and, given back, of what it was given."""
        builder, (depth, columns) = self.builder, weight.shape
        turned = builder.add_view(given, (depth, given.shape[0]), (1, depth))
        self.op("aten::mm", [("self", turned), ("mat2", grad)], builder.add_tensor(weight.shape, self.dtype))
        half = builder.add_resident_tensor(weight.shape, StorageKind.PARAMETER, self.dtype)
        flipped = builder.add_view(half, (columns, depth), (1, columns))
        return self.op(
            "aten::mm", [("self", grad), ("mat2", flipped)], builder.add_tensor((grad.shape[0], depth), self.dtype)
        )

    def bottom_backward(self, grad: Ref) -> None:
        """Back through the bottom MLP."""
        self.backward(self.bottom, grad, "hugectr::MLPBackward", input_grad=False)

    def update(self, optimizer: str, *, after: int) -> None:
        """All gradients applied, in one kernel, not before stream `after` is done: what is bound by memory gains
        nothing alongside an update of rows."""
        builder, count = self.builder, self.count
        builder.open_scope("hugectr::Optimizer", Phase.OPTIMIZER)
        builder.wait_for_event(builder.record_event(after))
        weights = [builder.add_resident_tensor((count,), StorageKind.PARAMETER)]
        grads = [builder.add_resident_tensor((count,), StorageKind.GRADIENT)]
        if optimizer == "adagrad":
            states = [builder.add_resident_tensor((count,), StorageKind.OPTIMIZER_STATE)]
            builder.add_op("aten::_fused_adagrad", [("self", weights), ("grads", grads), ("state_sums", states)])
        else:
            builder.add_op("aten::_fused_sgd", [("self", weights), ("grads", grads)])

    def reduce(self, beside: int, *, sent: int = -1) -> None:
        """Gradients of all parameters, and `beside` more numbers, summed over ranks in half precision, not before the
        event `sent`, if there is one: between nodes collectives take turns on the adapters."""
        builder = self.builder
        if builder.world_size == 1:
            return
        builder.open_scope("hugectr::AllReduce", Phase.BACKWARD)
        if sent >= 0:
            builder.wait_for_event(sent)
        flat = builder.add_resident_tensor((self.count + beside,), StorageKind.GRADIENT, self.dtype)
        builder.wait_for_event(builder.add_all_reduce(Communicator(_ALL_REDUCE, builder.world.ranks), flat))
