"""Short ways to write signatures in tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from traincast.costs.kernels.contract import KernelCall
from traincast.costs.kernels.lower import lower
from traincast.costs.kernels.registry import Item, LoweringContext
from traincast.ir.ops import Signature, TensorSpec

MODERN = LoweringContext(framework_version=(2, 13))
OLD = LoweringContext(framework_version=(1, 8))


def tensor(
    *shape: int, dtype: str = "float32", device: str = "cuda", stride: tuple[int, ...] | None = None
) -> TensorSpec:
    if stride is None:
        steps = [1]
        for size in reversed(shape[1:]):
            steps.append(steps[-1] * size)
        stride = tuple(reversed(steps))[: len(shape)]
    return TensorSpec(shape, stride if shape else (), dtype, device)


def transposed(*shape: int, dtype: str = "float32") -> TensorSpec:
    """A matrix (stack) stored with its last two dimensions swapped."""
    plain = tensor(*shape[:-2], shape[-1], shape[-2], dtype=dtype)
    return tensor(*shape, dtype=dtype, stride=(*plain.stride[:-2], plain.stride[-1], plain.stride[-2]))


def signature(
    name: str,
    inputs: dict[str, TensorSpec | list[TensorSpec]],
    outputs: TensorSpec | Sequence[TensorSpec] = (),
    **scalars: Any,
) -> Signature:
    flat: list[TensorSpec] = []
    groups = []
    for argument, value in inputs.items():
        specs = value if isinstance(value, list) else [value]
        flat += specs
        groups.append((argument, len(specs)))
    results = (outputs,) if isinstance(outputs, TensorSpec) else tuple(outputs)
    return Signature(name, tuple(flat), results, tuple(scalars.items()), tuple(groups))


def lowered(
    name: str, inputs: Any, outputs: Any = (), context: LoweringContext = MODERN, **scalars: Any
) -> tuple[Item, ...]:
    return lower(signature(name, inputs, outputs, **scalars), context)


def kernels(items: tuple[Item, ...]) -> list[str]:
    """`family:kind` of every kernel, in order."""
    return [f"{item.family.name}:{item.kind}" for item in items if isinstance(item, KernelCall)]


def field(item: Item, name: str) -> float:
    assert isinstance(item, KernelCall)
    return item.values[item.family.fields.index(name)]
