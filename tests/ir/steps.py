"""Small training steps whose sizes are known polynomials, for the tests of this package."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from traincast.ir import Phase, Program, ProgramBuilder, Signature, StorageKind, TensorSpec, Workload
from traincast.ir.program import Columns

Size = Callable[[int, int], int]


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    stride, step = [], 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    return tuple(reversed(stride))


def spec(*shape: int, dtype: str = "float32", device: str = "cuda") -> TensorSpec:
    return TensorSpec(shape, row_major(shape), dtype, device)


def make_mlp(*, batch: int, seq: int = 0, layers: int = 2, width: int = 16, extra: Size | None = None) -> Program:
    """Input copy, `layers` linear layers, loss, their gradients and SGD. `extra` adds a scalar of that size."""
    b = ProgramBuilder(batch_size=batch, seq_len=seq)
    rows = batch * (seq or 1)
    weights = [
        b.add_tensor(b.add_storage(width * width * 4, StorageKind.PARAMETER, before_step=True)) for _ in range(layers)
    ]
    w, x = spec(width, width), spec(rows, width)
    host = b.add_tensor(b.add_storage(rows * width * 4, StorageKind.INPUT, before_step=True))
    b.open_scope("aten::to", Phase.INPUT)
    storages = [b.add_storage(rows * width * 4, StorageKind.INPUT)]
    current = b.add_tensor(storages[0])
    copy = Signature(
        "aten::_to_copy", (spec(rows, width, device="cpu"),), (x,), (("non_blocking", False),), (("self", 1),)
    )
    b.add_op(copy, [host], [current])
    activations, forward = [current], []
    for layer, weight in enumerate(weights):
        b.open_scope("aten::linear", Phase.FORWARD)
        storages.append(b.add_storage(rows * width * 4))
        out = b.add_tensor(storages[-1])
        scalars = (("alpha", 1), ("beta", 1.0), ("extra", extra(batch, seq) if extra else None))
        mm = Signature("aten::mm", (x, w), (x,), scalars, (("self", 1), ("mat2", 1)))
        forward.append(b.add_op(mm, [activations[-1], weight], [out], module=f"layers.{layer}"))
        activations.append(out)
    last = b.open_scope("aten::sum", Phase.LOSS)
    loss = b.add_tensor(b.add_storage(4))
    b.add_op(Signature("aten::sum", (x,), (spec(),), (("dim", (0, 1)),)), [activations[-1]], [loss])
    gradient = b.add_tensor(b.add_storage(rows * width * 4))
    gradients = []
    for layer in reversed(range(layers)):
        b.open_scope("MmBackward0", Phase.BACKWARD, thread=1, after=last if layer == layers - 1 else -1)
        grad_w = b.add_tensor(b.add_storage(width * width * 4, StorageKind.GRADIENT))
        mm = Signature("aten::mm", (x, x), (w,), (), (("self", 1), ("mat2", 1)))
        b.add_op(mm, [activations[layer], gradient], [grad_w], module=f"layers.{layer}", forward=forward[layer])
        b.free_storage(storages[layer])
        gradients.append(grad_w)
    b.open_scope("Optimizer.step#SGD.step", Phase.OPTIMIZER, after=b.num_scopes - 1)
    foreach = Signature("aten::_foreach_add_", (w,) * (2 * layers), (), (("alpha", -0.1),),
                        (("self", layers), ("other", layers)))  # fmt: skip
    b.add_op(foreach, [*weights, *reversed(gradients)], [])
    b.open_scope("Optimizer.zero_grad#SGD.zero_grad", Phase.OTHER)
    return b.build_program()


def make_workload(**options: int) -> Workload:
    """A workload of one small training step, at batch size 8 unless told."""
    return Workload(name="mlp", programs=(make_mlp(**{"batch": 8, **options}),), meta={"note": "a few layers"})


def same_program(a: Program, b: Program) -> bool:
    """Equal in every column, size, name and signature (`repr` tells 1 from 1.0 and finds NaN equal)."""
    return (
        all(np.array_equal(getattr(a.columns, name), getattr(b.columns, name)) for name in Columns.names())
        and np.array_equal(a.sizes.coefficients, b.sizes.coefficients)
        and np.array_equal(a.sizes.denominator, b.sizes.denominator)
        and repr(a.symbolic) == repr(b.symbolic)
        and [type(x) for s in a.symbolic for _, x in s.scalars] == [type(x) for s in b.symbolic for _, x in s.scalars]
        and (a.names, a.batch_size, a.seq_len, a.rigid) == (b.names, b.batch_size, b.seq_len, b.rigid)
    )
