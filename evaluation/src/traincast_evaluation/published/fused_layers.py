"""MLPs as NVIDIA's training code runs them: few kernels per layer, forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from traincast.ir.ops import Phase, StorageKind
from traincast.models.layers.builder import RankBuilder, Ref, Scalars


@dataclass(slots=True)
class FusedMlp:
    """Weights and biases in fp32, and what backward needs: (weight, bias) in the step's type, result of each layer."""

    masters: list[Ref]
    layers: list[tuple[Ref, Ref]] = field(default_factory=list)
    results: list[Ref] = field(default_factory=list)


class FusedStep:
    """A step whose dense part is of type `dtype`, for `batch` samples.

    `casts`: autocast copies weights to it every step. `epilogue`: bias and activation, and their gradients, ride in the
    GEMMs' epilogues (HugeCTR); else they are a kernel after each (Apex).
    """

    def __init__(
        self, builder: RankBuilder, dtype: str, *, batch: int, casts: bool = False, epilogue: bool = False
    ) -> None:
        self.builder, self.dtype, self.local, self.casts, self.epilogue = builder, dtype, batch, casts, epilogue

    def op(self, name: str, arguments: Sequence[tuple[str, Ref]], result: Ref | None, scalars: Scalars = ()) -> Ref:
        """An op with one result; gives it, or without one its first argument, which it writes in place."""
        self.builder.add_op(name, arguments, [] if result is None else [result], scalars)
        return arguments[0][1] if result is None else result

    def cast(self, source: Ref, dtype: str, *, scope: str = "aten::to") -> Ref:
        """The tensor in another type: a copy, unless it has it."""
        if source.spec.dtype == dtype:
            return source
        self.builder.open_scope(scope)
        return self.builder.add_cast(source, dtype)[0]

    def mlp(self, widths: Sequence[int]) -> FusedMlp:
        """The parameters of an MLP."""
        kind = StorageKind.PARAMETER
        masters = []
        for fan_in, fan_out in zip(widths, widths[1:], strict=False):
            masters += [
                self.builder.add_resident_tensor((fan_out, fan_in), kind),
                self.builder.add_resident_tensor((fan_out,), kind),
            ]
        return FusedMlp(masters)

    def forward(self, mlp: FusedMlp, x: Ref, scope: str) -> Ref:
        """Copies of the weights in half precision where autocast makes them, then a product per layer."""
        builder = self.builder
        refs = [self.cast(ref, self.dtype) for ref in mlp.masters] if self.casts else [
            builder.add_resident_tensor(ref.shape, StorageKind.PARAMETER, self.dtype) for ref in mlp.masters
        ]  # fmt: skip
        mlp.layers = list(zip(refs[::2], refs[1::2], strict=True))
        mlp.results = [x]
        builder.open_scope(scope, Phase.FORWARD)
        for weight, bias in mlp.layers:
            fan_out, fan_in = weight.shape
            turned = builder.add_view(weight, (fan_in, fan_out), (1, fan_in))
            result = builder.add_tensor((x.shape[0], fan_out), self.dtype)
            if self.epilogue:
                arguments = [("self", bias), ("mat1", mlp.results[-1]), ("mat2", turned)]
                self.op("aten::_addmm_activation", arguments, result, [("beta", 1), ("alpha", 1)])
            else:
                self.op("aten::mm", [("self", mlp.results[-1]), ("mat2", turned)], result)
                self.op("aten::relu_", [("self", result)], result)
            mlp.results.append(result)
        return mlp.results[-1]

    def backward(self, mlp: FusedMlp, grad: Ref, scope: str, *, input_grad: bool) -> Ref:
        """Activation and bias gradients in one kernel, then two GEMMs per layer; gradients back to fp32."""
        builder = self.builder
        builder.open_scope(scope, Phase.BACKWARD)
        grads = []
        for number in reversed(range(len(mlp.layers))):
            weight, bias = mlp.layers[number]
            (fan_out, fan_in), batch = weight.shape, grad.shape[0]
            inner = grad
            if not self.epilogue:
                inner = builder.add_tensor(grad.shape, self.dtype)
                self.op("aten::threshold_backward", [("grad_output", grad), ("self", mlp.results[number + 1])], inner)
            grads.append(builder.add_tensor(bias.shape, self.dtype))
            if number or input_grad:
                grad = self.op(
                    "aten::mm", [("self", inner), ("mat2", weight)], builder.add_tensor((batch, fan_in), self.dtype)
                )
            flipped = builder.add_view(inner, (fan_out, batch), (1, fan_out))
            product = [("self", flipped), ("mat2", mlp.results[number])]
            grads.append(self.op("aten::mm", product, builder.add_tensor(weight.shape, self.dtype)))
        if self.casts:
            for weight_grad in grads:
                self.cast(weight_grad, "float32", scope="ToCopyBackward0")
        return grad
