"""Batch norms of 16-bit types that cuDNN does not take: PyTorch runs its own kernels."""

from __future__ import annotations

from dataclasses import replace

from traincast.ir.ops import Signature, StorageKind, TensorSpec
from traincast.ir.rows import OpRow, ScopeRow
from traincast.ir.symbolic import SizeRef
from traincast.transforms.retyping.typing import Typing

_FORWARD, _BACKWARD = "aten::cudnn_batch_norm", "aten::cudnn_batch_norm_backward"
_GRADIENTS = {"grad_output": "grad_out", "save_var": "save_invstd"}
_RENAMED = {"exponential_average_factor": "momentum", "epsilon": "eps"}


def _refused(signature: Signature) -> bool:
    """cuDNN takes no bfloat16, and float16 with weights in float32 only."""
    kind, weight = signature.inputs[0].dtype, signature.tensors("weight")
    return kind == "bfloat16" or (kind == "float16" and weight[0].dtype != "float32")


def native_norm(op: OpRow, typing: Typing) -> list[OpRow]:
    """Turns a batch norm that cuDNN does not take into PyTorch's own; gives what then runs before it."""
    old = op.signature
    if old.name != _FORWARD or not _refused(old):
        return []
    scalars = tuple((_RENAMED.get(name, name), value) for name, value in old.scalars)
    op.signature = replace(old, name="aten::native_batch_norm", outputs=old.outputs[:3], scalars=scalars)
    op.outputs = op.outputs[:3]
    none = typing.sizes.constant(0)
    empty = TensorSpec((none,), (typing.sizes.constant(1),), "uint8")
    options = (("size", (SizeRef(none),)), ("dtype", "uint8"), ("memory_format", None))
    signature = Signature("aten::empty", (), (empty,), options, (), "memory_format")
    reserve = typing.editor.add_tensor(none, StorageKind.ACTIVATION)
    typing.original.append(len(typing.editor.storages) - 1)
    return [OpRow(signature, (), (reserve,), op.module, op.stream)]


def native_norm_backward(scope: ScopeRow, op: OpRow) -> None:
    """The same for the gradient of one; its inputs are in another order."""
    old = op.signature
    if old.name != _BACKWARD or not _refused(old):
        return
    order = (1, 0, *range(2, len(op.inputs) - 1))  # gradient first, nothing in reserve
    arguments = [old.groups[place][0] for place in order]
    groups = tuple((_GRADIENTS.get(argument, argument), 1) for argument in arguments)
    given = len(op.outputs)
    scalars = (("train", True), ("eps", old.scalar("epsilon")), ("output_mask", tuple(n < given for n in range(3))))
    op.signature = Signature(
        "aten::native_batch_norm_backward", tuple(old.inputs[place] for place in order), old.outputs, scalars, groups
    )
    op.inputs = tuple(op.inputs[place] for place in order)
    scope.name = "NativeBatchNormBackward0"
