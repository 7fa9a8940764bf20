"""Any op of a captured step as a call on real tensors: what its signature says, with operands in the state wanted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from traincast.calibration.bench.device import Device
from traincast.costs.cpu.features import count_lookups, get_kind
from traincast.ir.ops import Scalar, Signature, TensorSpec
from traincast.utils.errors import TraincastError


class OpCall:
    """One op, called on any of several equal sets of operands, each with its own table and result."""

    def __init__(
        self,
        signature: Signature,
        device: Device,
        *,
        sets: int = 1,
        rows: Callable[[int, int], Any] | None = None,
    ) -> None:
        self.signature = signature = make_repeatable(signature)
        self._op = find_op(signature)
        self._rows = rows
        self._arguments = [self._bind(device) for _ in range(sets)]
        self._results: list[Any] = [None] * sets

    def __call__(self, number: int = 0) -> None:
        """Runs the op once on a set of operands; its result is where the set's last one lay."""
        args, kwargs = self._arguments[number]
        self._results[number] = None
        self._results[number] = self._op(*args, **kwargs)

    def _bind(self, device: Device) -> tuple[list[Any], dict[str, Any]]:
        tensors = list(self.signature.inputs)
        given = dict(self.signature.groups)
        scalars = dict(self.signature.scalars)
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for argument in self._op._schema.arguments:
            name = argument.name
            if name in given:
                taken, tensors = tensors[: given[name]], tensors[given[name] :]
                value = self._tensor_argument(name, taken, str(argument.type), scalars, device)
            elif name in scalars:
                value = decode_argument(name, scalars[name])
            elif argument.has_default_value():
                continue
            else:
                value = None
            if argument.kwarg_only:
                kwargs[name] = value
            else:
                args.append(value) if len(args) == _find_position(self._op, name) else kwargs.__setitem__(name, value)
        return args, kwargs

    def _tensor_argument(
        self, name: str, specs: list[TensorSpec], kind: str, scalars: dict[str, Scalar], device: Device
    ) -> Any:
        if scalars.get(f"{name}_layout") == "sparse_coo":
            return self._sparse(specs, device)
        made = [self._tensor(name, spec, device) for spec in specs]
        if kind.startswith("List"):
            present = scalars.get(f"{name}_given")
            if isinstance(present, tuple):
                rest = iter(made)
                return [next(rest) if there else None for there in present]
            return made
        return made[0]

    def _sparse(self, specs: list[TensorSpec], device: Device) -> torch.Tensor:
        """A sparse gradient: its indices within the table that it belongs to."""
        rows = self._table_rows()
        count = specs[0].shape[-1]
        values = device.allocate(specs[1].shape, specs[1].dtype)
        indices = device.put(torch.as_tensor(self._draw(rows, count)).view(1, -1))
        return torch.sparse_coo_tensor(
            indices, values, (rows, *specs[1].shape[1:]), check_invariants=False, is_coalesced=False
        )

    def _table_rows(self) -> int:
        """Rows of the table behind this op; where it is not among the operands, as many as there are lookups."""
        number = self.signature.scalar("num_weights")
        lookups, rows, _ = count_lookups(self.signature)
        return int(number) if isinstance(number, int) else max(rows or lookups, 1)

    def _draw(self, rows: int, count: int) -> torch.Tensor:
        if self._rows is not None:
            return torch.as_tensor(self._rows(rows, count))
        return torch.randint(rows, (count,))

    def _tensor(self, name: str, spec: TensorSpec, device: Device) -> torch.Tensor:
        """A tensor of this form; indices and offsets hold values that the op can use."""
        special = self._indices(name, spec)
        if special is not None:
            return device.put(special.to(getattr(torch, spec.dtype)).reshape(spec.shape))
        if spec.is_contiguous or not spec.shape:
            made = device.allocate(spec.shape or (1,), spec.dtype).reshape(spec.shape)
            return torch.sigmoid(made) if "binary_cross_entropy" in self.signature.name else made  # probabilities
        extent = 1 + sum((size - 1) * stride for size, stride in zip(spec.shape, spec.stride, strict=True) if size)
        return device.allocate((extent,), spec.dtype).as_strided(spec.shape, spec.stride)

    def _indices(self, name: str, spec: TensorSpec) -> torch.Tensor | None:
        signature = self.signature
        if spec.dtype not in ("int64", "int32"):
            return None
        if signature.name == "aten::_embedding_bag":
            lookups, bags = signature.inputs[1].numel, signature.inputs[2].numel
            if name == "offsets":
                return torch.arange(bags) * (lookups // max(bags, 1))
            return self._draw(signature.inputs[0].shape[0], spec.numel)
        if signature.name == "aten::_embedding_bag_backward":
            return self._backward_indices(name, spec)
        if signature.name == "aten::max_pool2d_with_indices_backward":
            return self._largest(spec)
        if signature.name in ("aten::embedding", "aten::embedding_dense_backward", "aten::index_select"):
            return self._draw(self._index_range(), spec.numel)
        return torch.randint(max(self._index_range(), 1), (spec.numel,))

    def _backward_indices(self, name: str, spec: TensorSpec) -> torch.Tensor:
        lookups, bags = self.signature.inputs[1].numel, self.signature.inputs[0].shape[0]
        if name == "indices":
            return self._draw(self._table_rows(), spec.numel)
        per_bag = lookups // max(bags, 1)
        if name == "offset2bag":
            return torch.arange(spec.numel) // max(per_bag, 1)
        if name == "offsets":
            return torch.arange(spec.numel) * per_bag
        return torch.full((spec.numel,), per_bag)

    def _largest(self, spec: TensorSpec) -> torch.Tensor:
        """Where the largest of each window was: its first pixel."""
        height, width = self.signature.inputs[1].shape[-2:]
        down, along = torch.arange(spec.shape[-2]), torch.arange(spec.shape[-1])
        first = (down * height // spec.shape[-2])[:, None] * width + along * width // spec.shape[-1]
        return first.expand(spec.shape)

    def _index_range(self) -> int:
        """How many values an index may take: the smallest dimension that such an op can index."""
        number = self.signature.scalar("num_weights")
        if isinstance(number, int):
            return number
        first = self.signature.inputs[0].shape
        if self.signature.name.startswith("aten::nll_loss") or self.signature.name == "aten::gather":
            shapes = [spec.shape for spec in self.signature.inputs if len(spec.shape) > 1]
            return min(min(shape) for shape in shapes) if shapes else 1
        if self.signature.name in ("aten::embedding", "aten::index_select"):
            return first[0]
        return min(first) if first else 1


def make_repeatable(signature: Signature) -> Signature:
    """The op as it can be run a thousand times on the same operands and take the same time.

    Sparse gradients that are added in place would grow without end, and what is scaled in place would end in denormal
    numbers, which are slow.
    """
    if get_kind(signature) == "sparse_add":
        return replace(signature, name="aten::add")
    if signature.name in ("aten::mul_", "aten::div_") and signature.overload == "Scalar":
        return replace(signature, scalars=tuple((key, 1.0 if key == "other" else v) for key, v in signature.scalars))
    return signature


def find_op(signature: Signature) -> Any:
    """The overload of this signature; the one that takes its arguments where the signature does not name it."""
    namespace, _, name = signature.name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), name, None)
    if packet is None:
        raise TraincastError(f"op {signature.name} is unknown to torch {torch.__version__}")
    if signature.overload and signature.overload in packet.overloads():
        return getattr(packet, signature.overload)
    return packet.default if "default" in packet.overloads() else getattr(packet, packet.overloads()[0])


def decode_argument(name: str, value: Scalar) -> Any:
    """A scalar argument as torch takes it."""
    if isinstance(value, str) and name in ("dtype", "input_dtype", "memory_format", "layout"):
        return getattr(torch, value, None)
    return list(value) if isinstance(value, tuple) else value


def _find_position(op: Any, name: str) -> int:
    return next(i for i, argument in enumerate(op._schema.arguments) if argument.name == name)
