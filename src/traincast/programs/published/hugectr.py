"""The least a step of HugeCTR's DLRM can take: its dense part alone, fused, in half precision, on one GPU's samples.

HugeCTR replays a CUDA graph and hides lookups, exchanges and all-reduces behind the dense part as far as it can; its
kernels are its own. What it cannot hide is above this bound.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from traincast.programs.published.fused_layers import FusedStep
from traincast.programs.published.run import Run, mlp_parameters
from traincast.programs.rank_tape import RankTape
from traincast.programs.tape import Ref
from traincast.workload.ops import Phase, StorageKind
from traincast.workload.template import share_templates
from traincast.workload.workload import Workload

DIM, VECTORS = 128, 27
BOTTOM = (13, 512, 256, DIM)
TOP = (1024, 1024, 512, 256, 1)
DOT_WIDTH = 480  # padded from 479
CROSS_LAYERS, CROSS_RANK = 3, 512


def write(sizes: Mapping[str, Any], run: Run) -> Workload:
    """Forward and backward of the dense part, alike on all GPUs; `cross` of `sizes` stands for DCN-v2's cross layers
    instead of dot products."""
    batch = run.global_batch // run.gpus
    step = _Bound(RankTape(batch, 0, 1, 1), run.element, batch=batch, epilogue=True)
    step.run(cross=sizes["cross"])
    programs = tuple(share_templates([step.tape.build()]))
    return Workload(name="hugectr-bound", programs=programs, ranks=(0,) * run.gpus, mode="training")


def parameters(sizes: Mapping[str, Any]) -> int:
    """Parameters of the dense part."""
    width = VECTORS * DIM
    crossing = CROSS_LAYERS * 2 * width * CROSS_RANK if sizes["cross"] else 0
    return mlp_parameters(BOTTOM) + mlp_parameters((width if sizes["cross"] else DOT_WIDTH, *TOP)) + crossing


class _Bound(FusedStep):
    def run(self, *, cross: bool) -> None:
        """Everything."""
        tape, batch = self.tape, self.local
        bottom = self.mlp(BOTTOM)
        x = self.forward(bottom, tape.resident((batch, BOTTOM[0]), StorageKind.INPUT, self.dtype), "MlpFunction")
        joined = tape.resident((batch, VECTORS, DIM), StorageKind.ACTIVATION, self.dtype)
        width = VECTORS * DIM if cross else DOT_WIDTH
        products = [self._cross(joined) for _ in range(CROSS_LAYERS)] if cross else [self._dot(joined)]
        top = self.mlp((width, *TOP))
        self.forward(top, tape.resident((batch, width), StorageKind.ACTIVATION, self.dtype), "MlpFunction")
        tape.scope("aten::ones_like", Phase.BACKWARD)
        grad = tape.resident((batch, 1), StorageKind.ACTIVATION, self.dtype)
        self.backward(top, grad, "MlpFunctionBackward", input_grad=True)
        for left, right in products:
            tape.scope("DotBasedInteractBackward")
            self._products_backward(left, right)
        self.backward(bottom, tape.view(x, x.shape), "MlpFunctionBackward", input_grad=False)

    def _dot(self, joined: Ref) -> tuple[Ref, Ref]:
        tape, batch = self.tape, joined.shape[0]
        tape.scope("DotBasedInteract", Phase.FORWARD)
        result = self.op("nvidia::dot_based_interact", [("input", joined)], tape.new((batch, DOT_WIDTH), self.dtype))
        return joined, result

    def _cross(self, joined: Ref) -> tuple[Ref, Ref]:
        """A low-rank layer: down, up, and a product with the input."""
        tape, (batch, count, dim) = self.tape, joined.shape
        tape.scope("DotBasedInteract", Phase.FORWARD)
        flat = tape.view(joined, (batch, count * dim))
        down = tape.resident((count * dim, CROSS_RANK), StorageKind.PARAMETER, self.dtype)
        up = tape.resident((CROSS_RANK, count * dim), StorageKind.PARAMETER, self.dtype)
        inner = self.op("aten::mm", [("self", flat), ("mat2", down)], tape.new((batch, CROSS_RANK), self.dtype))
        outer = self.op("aten::mm", [("self", inner), ("mat2", up)], tape.new(flat.shape, self.dtype))
        self.op("aten::mul", [("self", outer), ("other", flat)], tape.new(flat.shape, self.dtype))
        return flat, down

    def _products_backward(self, left: Ref, right: Ref) -> None:
        """The products that give the gradients of one interaction."""
        tape, batch = self.tape, left.shape[0]
        if len(left.shape) == 3:
            arguments = [("input", left), ("grad", right)]
            self.op("nvidia::dot_based_interact_backward", arguments, tape.new(left.shape, self.dtype))
            return
        width, rank = right.shape
        small, large = (tape.resident((batch, n), StorageKind.ACTIVATION, self.dtype) for n in (rank, width))
        self.op("aten::mul", [("self", large), ("other", left)], tape.new(large.shape, self.dtype))
        for first, second in ((large, right), (small, tape.view(right, (rank, width)))):
            shape = (batch, second.shape[1])
            self.op("aten::mm", [("self", first), ("mat2", second)], tape.new(shape, self.dtype))
        for first, second in ((small, large), (large, small)):
            turned = tape.view(first, (first.shape[1], batch), (1, first.shape[1]))
            shape = (first.shape[1], second.shape[1])
            self.op("aten::mm", [("self", turned), ("mat2", second)], tape.new(shape, self.dtype))
