"""What ops give on meta tensors where PyTorch itself has no answer, and ops that cannot have one."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch._prims_common import suggest_memory_format

from traincast.capturing.attention import infer_fused_attention, infer_fused_attention_backward
from traincast.capturing.errors import MASK
from traincast.capturing.recurrent import (
    infer_cudnn_rnn,
    infer_cudnn_rnn_backward,
    infer_fused_gru_cell,
    infer_fused_gru_cell_backward,
)

aten = torch.ops.aten
_OPS = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)

_MASK = f"use torch.where or masked_fill, or state how much is kept: {MASK}"
_DISTINCT = "state how many differ: `assume` distinct=SHARE"
_DATA_DEPENDENT: dict[Any, str] = {
    aten.nonzero.default: _MASK,
    aten.nonzero_numpy.default: _MASK,
    aten.masked_select.default: _MASK,
    aten._unique2.default: _DISTINCT,
    aten.unique_dim.default: _DISTINCT,
    aten.unique_consecutive.default: _DISTINCT,
    aten.bincount.default: "state how many there are: `assume` experts=NUMBER",
}


def size_depends_on_values(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """What to do instead of this op if the size of its result depends on values; "" if it does not."""
    if func is aten.index.Tensor and any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1]):
        return _MASK
    if func is aten._pack_padded_sequence.default:
        return "give lengths that are known on the host"
    if func is aten.repeat_interleave.Tensor and kwargs.get("output_size") is None:
        return "give output_size, or state the numbers: `assume` lengths=N,N,..."
    return _DATA_DEPENDENT.get(func, "")


# Backward formulas use the first form only because a mode is watching; without one they write into fresh zeros.
WRITTEN_IN_PLACE: dict[Any, Any] = {
    aten.index_put.default: aten._index_put_impl_.default,
    aten.scatter.src: aten.scatter_.src,
    aten.scatter.value: aten.scatter_.value,
    aten.scatter_add.default: aten.scatter_add_.default,
    aten.index_add.default: aten.index_add_.default,
    aten.index_fill.int_Scalar: aten.index_fill_.int_Scalar,
    aten.masked_scatter.default: aten.masked_scatter_.default,
    aten.put.default: aten.put_.default,
}

# Likewise in the backward formula of binary cross entropy from logits alone.
LOGITS_NODE = "BinaryCrossEntropyWithLogitsBackward0"
WRITTEN_IN_LOGITS: dict[Any, Any] = {aten.sub.Tensor: aten.sub_.Tensor, aten.mul.Tensor: aten.mul_.Tensor}


def find_composite(func: Any) -> Callable[..., Any] | None:
    """A library's op as it is made of others, where for meta tensors the library has a kernel instead, which
    no gradient would pass (FBGEMM's padding of jagged tensors); None for all other functions."""
    return _find_library_composite(func) if isinstance(func, _OPS) else None


@cache
def _find_library_composite(func: Any) -> Callable[..., Any] | None:
    op: Any = getattr(func, "default", func)
    if type(op) is not _OPS[0] or op.namespace == "aten":
        return None
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    both = has(op._name, "CompositeImplicitAutograd") and has(op._name, "Meta")
    return partial(op._op_dk, torch._C.DispatchKey.CompositeImplicitAutograd) if both else None


def _return_nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _return_first(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return self


def _infer_coalesce(self: torch.Tensor) -> torch.Tensor:
    """As large as before: how many rows are equal is unknown."""
    made = torch.sparse_coo_tensor(
        torch.empty_like(self._indices()), torch.empty_like(self._values()), self.shape, check_invariants=False
    )
    return made._coalesced_(True)


def _infer_clone(self: torch.Tensor, *, memory_format: torch.memory_format | None = None) -> torch.Tensor:
    """Sparse meta tensors lose their length when cloned."""
    if self.layout is torch.sparse_coo:
        return _infer_coalesce(self)._coalesced_(self.is_coalesced())
    copy: torch.Tensor = aten.clone.default(self, memory_format=memory_format)
    return copy


def _infer_sparse_add(self: torch.Tensor, other: Any, *, alpha: Any = 1) -> torch.Tensor:
    """A sparse tensor is added to a dense one in place, whatever its indices."""
    if isinstance(other, torch.Tensor) and other.layout is torch.sparse_coo and self.layout is torch.strided:
        return self
    result: torch.Tensor = aten.add_.Tensor(self, other, alpha=alpha)
    return result


def _make_sparse_gemm(op: Any, *, added: bool = False) -> Callable[..., Any]:
    """A product with a sparse matrix, which is dense; PyTorch's own answer where both are dense."""

    def made(*args: Any, **kwargs: Any) -> Any:
        left, right = args[added : added + 2]
        if left.layout is torch.strided:
            return op(*args, **kwargs)
        return right.new_empty(left.shape[0], right.shape[1])

    return made


def _infer_sparse_mask(self: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return _infer_clone(mask)


def take_over(gradient: torch.Tensor) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The call with which autograd takes a sparse gradient over; it clones it only because a mode is watching."""
    size = list(gradient.shape)
    args = (gradient.sparse_dim(), gradient.dense_dim(), size, gradient._indices(), gradient._values())
    kwargs = {"dtype": gradient.dtype, "layout": torch.sparse_coo, "device": gradient.device}
    return aten._sparse_coo_tensor_with_dims_and_tensors.default, args, kwargs


def _infer_convolution(input: torch.Tensor, weight: torch.Tensor, *args: Any) -> torch.Tensor:
    out = aten.convolution.default(input, weight, *args)
    return _lay_out_as_cudnn(out, input, weight)


def _infer_convolution_backward(
    grad: torch.Tensor, input: torch.Tensor, weight: torch.Tensor, *args: Any
) -> tuple[Any, ...]:
    grad_input, grad_weight, grad_bias = aten.convolution_backward.default(grad, input, weight, *args)
    laid_out = (None if g is None else _lay_out_as_cudnn(g, input, weight) for g in (grad_input, grad_weight))
    return (*laid_out, grad_bias)


def _lay_out_as_cudnn(made: torch.Tensor, input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """cuDNN puts channels last as soon as the input or the weight has them last."""
    suggested = {suggest_memory_format(input), suggest_memory_format(weight)}
    last = suggested & {torch.channels_last, torch.channels_last_3d}
    if not last or made.dtype == torch.float64:
        return made if made.is_contiguous() else torch.empty(made.shape, dtype=made.dtype, device="meta")
    return made.to(memory_format=last.pop())


def _make_contiguous_first(op: Any) -> Callable[..., Any]:
    """CUDA writes these gradients row by row whatever the strides of what comes in; PyTorch's answer without data
    keeps them."""

    def made(*args: Any, **kwargs: Any) -> Any:
        outs = op(*args, **kwargs)
        if isinstance(outs, torch.Tensor):
            return outs.contiguous()
        return (outs[0] if outs[0] is None else outs[0].contiguous(), *outs[1:])

    return made


def _infer_grouped_mm(
    a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor | None = None, bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:  # fmt: skip
    """PyTorch's own answer is for bfloat16 alone; CUDA takes float32 and half as well."""
    halves = (t if t is None else t.to(torch.bfloat16) for t in (a, b))
    made: torch.Tensor = aten._grouped_mm.default(*halves, offs, bias)
    return made.to(out_dtype or a.dtype)


def _infer_statistics(input: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and inverse deviation of every channel, in float: one pass of synchronised batch norm."""
    made = input.new_empty(input.shape[1], dtype=_choose_accumulation_dtype(input))
    return made, torch.empty_like(made)


def _infer_gathered_statistics(
    input: torch.Tensor, mean: torch.Tensor, *rest: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    made = mean.new_empty(mean.shape[1])
    return made, torch.empty_like(made)


def _infer_normalised(input: torch.Tensor, *rest: Any) -> torch.Tensor:
    return torch.empty_like(input)


def _infer_norm_sums(
    grad_out: torch.Tensor, input: torch.Tensor, mean: torch.Tensor, invstd: torch.Tensor, weight: torch.Tensor | None,
    input_g: bool, weight_g: bool, bias_g: bool,
) -> tuple[torch.Tensor | None, ...]:  # fmt: skip
    sums = [torch.empty_like(mean) if input_g else None for _ in range(2)]
    like = mean if weight is None else weight
    return *sums, *(torch.empty_like(like) if wanted else None for wanted in (weight_g, bias_g))


def _infer_normalised_backward(grad_out: torch.Tensor, input: torch.Tensor, *rest: Any) -> torch.Tensor:
    return torch.empty_like(input)


def _infer_ctc_loss(
    log_probs: torch.Tensor, targets: torch.Tensor, input_lengths: Any, target_lengths: Any, *rest: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Losses, and a table of the longest target; where targets are end to end, that of their mean length."""
    steps, batch = log_probs.shape[0], log_probs.shape[1] if log_probs.dim() == 3 else 1
    longest = targets.shape[1] if targets.dim() == 2 else -(-targets.numel() // max(1, batch))
    return log_probs.new_empty(batch), log_probs.new_empty(batch, steps, 2 * longest + 1)


def _infer_ctc_loss_backward(grad: torch.Tensor, log_probs: torch.Tensor, *rest: Any) -> torch.Tensor:
    return torch.empty_like(log_probs)


def _choose_accumulation_dtype(tensor: torch.Tensor) -> torch.dtype:
    return torch.float32 if tensor.dtype in (torch.float16, torch.bfloat16) else tensor.dtype


def _find_fused_ops(name: str) -> list[Any]:
    packet = getattr(aten, name)
    return [getattr(packet, overload) for overload in packet.overloads() if "out" not in overload]


_ROW_BY_ROW = (
    aten.native_layer_norm_backward.default, aten.native_group_norm_backward.default,
    aten._fused_rms_norm_backward.default, aten._log_softmax_backward_data.default,
)  # fmt: skip
WITHOUT_META: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys((*_find_fused_ops("_fused_sgd_"), *_find_fused_ops("_fused_adagrad_")), _return_nothing),
    aten._coalesce.default: _infer_coalesce,
    aten.clone.default: _infer_clone,
    aten._cudnn_rnn.default: infer_cudnn_rnn,
    aten._cudnn_rnn_backward.default: infer_cudnn_rnn_backward,
    aten._thnn_fused_gru_cell.default: infer_fused_gru_cell,
    aten._thnn_fused_gru_cell_backward.default: infer_fused_gru_cell_backward,
    aten._scaled_dot_product_fused_attention_overrideable.default: infer_fused_attention,
    aten._scaled_dot_product_fused_attention_overrideable_backward.default: infer_fused_attention_backward,
    aten.convolution.default: _infer_convolution,
    aten.convolution_backward.default: _infer_convolution_backward,
    aten._grouped_mm.default: _infer_grouped_mm,
    **{op: _make_contiguous_first(op) for op in _ROW_BY_ROW},
    **dict.fromkeys((aten._ctc_loss.default, aten._ctc_loss.Tensor), _infer_ctc_loss),
    **dict.fromkeys((aten._ctc_loss_backward.default, aten._ctc_loss_backward.Tensor), _infer_ctc_loss_backward),
    aten.batch_norm_stats.default: _infer_statistics,
    aten.batch_norm_gather_stats_with_counts.default: _infer_gathered_statistics,
    aten.batch_norm_elemt.default: _infer_normalised,
    aten.batch_norm_backward_reduce.default: _infer_norm_sums,
    aten.batch_norm_backward_elemt.default: _infer_normalised_backward,
    aten.add_.Tensor: _infer_sparse_add,
    aten.sparse_mask.default: _infer_sparse_mask,
    aten.mm.default: _make_sparse_gemm(aten.mm.default),
    aten.addmm.default: _make_sparse_gemm(aten.addmm.default, added=True),
    aten._sparse_addmm.default: _make_sparse_gemm(aten._sparse_addmm.default, added=True),
    aten.index_put_.default: _return_first,
    aten._index_put_impl_.default: _return_first,
    aten._amp_foreach_non_finite_check_and_unscale_.default: _return_nothing,
    aten._amp_update_scale_.default: _return_first,
}
