"""What CUDA runs where PyTorch takes another path for meta tensors."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch._C._profiler import _RecordFunctionFast

from traincast.capturing import recurrent
from traincast.capturing.patches import Patches

_NUMBERS = (bool, int, float, complex)


def assign_value(tensor: torch.Tensor, index: Any, value: Any) -> None:
    """`tensor[index] = value` of a tensor on the device: a number stays on the host, and one kernel fills with it."""
    if tensor.is_meta and isinstance(value, _NUMBERS):
        with torch._C._DisableTorchDispatch():
            value = torch.scalar_tensor(value, dtype=tensor.dtype)
    tensor[index] = value


def make_one_hot(tensor: torch.Tensor, num_classes: int, device: torch.device) -> torch.Tensor:
    """Zeros on `device`, and ones put into them."""
    with _RecordFunctionFast("aten::one_hot"):
        if num_classes == -1:
            num_classes = int(tensor.max().item()) + 1
        made = torch.zeros((*tensor.shape, num_classes), dtype=torch.long, device=device)
        return made.scatter_(-1, tensor.unsqueeze(-1), 1)


aten: Any = torch.ops.aten
Tensor: TypeAlias = torch.Tensor
_switches: Any = torch.backends.cuda
_HALF = (torch.float16, torch.bfloat16)
_CUDNN_MIN_EPS = 1e-5  # CUDNN_BN_MIN_EPSILON
_MOST_SAMPLES = {True: 880801, False: 65535}  # cuDNN's batch limit by training
_ALIGNED = 8  # elements of the last dimension of a mask


def install_choices(patches: Patches) -> None:
    """Replaces the composites until the patches are undone."""
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    patches.callback(library._destroy)
    replacements: dict[str, Callable[..., Any]] = {
        **recurrent.list_replacements(),
        "reshape": _decompose_reshape,
        "flatten.using_ints": _decompose_flatten,
        "softmax.int": _make_softmax(aten._softmax),
        "log_softmax.int": _make_softmax(aten._log_softmax),
        "dropout": _decompose_dropout,
        "_batch_norm_impl_index": _batch_norm,
        "rms_norm": _decompose_rms_norm,
        "scaled_dot_product_attention": _choose_attention,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns that a kernel is overridden: it is meant to be
        for name, function in replacements.items():
            library.impl(name, function, "CompositeImplicitAutograd", allow_override=True)
        library.m.impl(
            "_fused_rms_norm", "Meta", _infer_fused_rms_norm, False
        )  # with a kernel of its own it stays whole
    patches.set_attribute(torch.backends.cudnn, "is_acceptable", lambda tensor: False)  # weights stay as they are
    patches.set_attribute(torch.backends.mha, "get_fastpath_enabled", lambda: False)


def _decompose_reshape(self: Tensor, shape: list[int]) -> Tensor:
    """As in C++, whose choice of the view op depends on whether a mode is watching."""
    if self.is_contiguous() or self.layout is not torch.strided:
        return self.view(shape)
    with torch._C._DisableTorchDispatch():
        try:
            form = torch.empty_strided(self.shape, self.stride(), device="meta").view(shape)
            strides = form.stride()
        except RuntimeError:  # no view can do it
            form, strides = torch.empty(self.shape, device="meta").view(shape), None
    if strides is not None and hasattr(type(self), "__tensor_flatten__"):
        return self.view(shape)  # of a wrapper (DTensor), whose parts have other shapes
    if strides is None:
        result: Tensor = aten._unsafe_view(self.clone(memory_format=torch.contiguous_format), form.shape)
    else:
        result = aten._reshape_alias(self, form.shape, strides)
    return result


def _decompose_flatten(self: Tensor, start_dim: int = 0, end_dim: int = -1) -> Tensor:
    """As in C++, which reshapes without asking the dispatcher."""
    if self.dim() == 0:
        return _decompose_reshape(self, [1])
    first, last = start_dim % self.dim(), end_dim % self.dim()
    if first == last:
        return self
    shape = list(self.shape)
    return _decompose_reshape(self, [*shape[:first], math.prod(shape[first : last + 1]), *shape[last + 1 :]])


def _make_softmax(op: Any) -> Callable[..., Tensor]:
    """CUDA widens half to float inside the kernel."""

    def softmax(self: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
        widens = self.is_meta and self.dtype == torch.float16 and dtype == torch.float32
        result: Tensor = op(self if widens or dtype is None else self.to(dtype), dim, widens)
        return result

    return softmax


def _decompose_dropout(input: Tensor, p: float, train: bool) -> Tensor:
    if p == 0 or not train or input.numel() == 0:
        return input
    if p == 1:
        return input * torch.zeros((), dtype=input.dtype, device=input.device)
    kept: Tensor = aten.native_dropout(input, p, train)[0]
    return kept


def _batch_norm(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor | None, running_var: Tensor | None,
    training: bool, momentum: float, eps: float, cudnn_enabled: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, int]:  # fmt: skip
    parameters = (weight, bias, running_mean, running_var)
    if cudnn_enabled and _is_taken_by_cudnn(input, parameters, training, eps):
        layout = torch.channels_last if _is_channels_last(input) else torch.contiguous_format
        made = aten.cudnn_batch_norm(
            input.contiguous(memory_format=layout), *(p if p is None else p.contiguous() for p in parameters),
            training, momentum, eps,
        )  # fmt: skip
        return (*made, 1)
    reserve = torch.empty([0], dtype=torch.uint8, device=input.device)
    return (*aten.native_batch_norm(input, *parameters, training, momentum, eps), reserve, 0)


def _is_channels_last(tensor: Tensor) -> bool:
    if tensor.dim() != 4 or tensor.is_contiguous():
        return False
    return tensor.is_contiguous(memory_format=torch.channels_last)


def _decompose_rms_norm(
    input: Tensor, normalized_shape: list[int], weight: Tensor | None = None, eps: float | None = None
) -> Any:
    """One kernel, unless weights are of another type or channels last: then step by step."""
    fits = weight is None or weight.dtype == input.dtype
    if not fits or _is_channels_last(input) or input.is_complex():
        key = torch._C.DispatchKey.CompositeImplicitAutograd
        return aten._fused_rms_norm.default._op_dk(key, input, normalized_shape, weight, eps)[0]
    return aten._fused_rms_norm(input, normalized_shape, weight, eps)[0]


def _infer_fused_rms_norm(
    input: Tensor, normalized_shape: list[int], weight: Tensor | None, eps: float | None
) -> tuple[Tensor, Tensor]:
    """The normalised rows, and one over their root mean square each, in float."""
    rows = list(input.shape[: input.dim() - len(normalized_shape)]) + [1] * len(normalized_shape)
    wide = torch.float32 if input.dtype in _HALF else input.dtype
    return input.new_empty(input.shape), input.new_empty(rows, dtype=wide)


def _is_taken_by_cudnn(input: Tensor, parameters: tuple[Tensor | None, ...], training: bool, eps: float) -> bool:
    weight, bias, running_mean, running_var = parameters
    if not input.is_meta or weight is None or bias is None or input.dim() < 3 or eps < _CUDNN_MIN_EPS:
        return False
    if torch.bfloat16 in (input.dtype, weight.dtype):
        return False
    if input.dtype == torch.float16 and weight.dtype != torch.float32:
        return False
    statistics = (running_mean is not None) + (running_var is not None)
    return (statistics == 2 or (statistics == 0 and training)) and input.shape[0] <= _MOST_SAMPLES[training]


def _choose_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """One op that says what is wanted where some device has a fused kernel: which one runs is the device's choice, and
    so lowering's. Back-ends that the script has switched off are obeyed here."""
    flash = _is_taken_by_flash(query, key, value, attn_mask, is_causal, enable_gqa)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = _make_additive_mask(attn_mask, query.dtype)
    efficient = _is_taken_by_efficient(query, key, value)
    if not (flash or efficient):
        made = aten._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
        )
    else:
        mask = None if attn_mask is None else _align_mask(attn_mask).expand(*query.shape[:3], key.shape[2])
        if flash and hasattr(query, "_local_tensor"):  # a DTensor has rules for PyTorch's own kernels only
            flash_op = aten._scaled_dot_product_flash_attention
            out_of_shards: Tensor = flash_op(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
            return out_of_shards
        if efficient and (not _switches.flash_sdp_enabled() or hasattr(query, "_local_tensor")):
            needs_backward = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
            op, options = aten._scaled_dot_product_efficient_attention, [needs_backward, dropout_p, is_causal]
        else:
            op, options = aten._scaled_dot_product_fused_attention_overrideable, [dropout_p, is_causal, False]
        made = op(query, key, value, mask, *options, scale=scale)
    out: Tensor = made[0]
    return out


def _is_taken_by_flash(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, enable_gqa: bool
) -> bool:
    if not _switches.flash_sdp_enabled() or mask is not None or not _has_fused_shapes(query, key, value):
        return False
    if query.dtype not in _HALF or max(query.shape[-1], value.shape[-1]) > 256 or query.shape[-1] != value.shape[-1]:
        return False
    heads_fit = query.shape[1] == key.shape[1] or (enable_gqa and query.shape[1] % key.shape[1] == 0)
    return heads_fit and not (is_causal and query.shape[2] != key.shape[2])


def _is_taken_by_efficient(query: Tensor, key: Tensor, value: Tensor) -> bool:
    aligned = 8 if query.dtype in _HALF else 4
    return (
        _switches.mem_efficient_sdp_enabled()
        and _has_fused_shapes(query, key, value)
        and query.dtype in (*_HALF, torch.float32)
        and query.shape[1] == key.shape[1]
        and query.shape[-1] % aligned == value.shape[-1] % aligned == 0
    )


def _has_fused_shapes(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """What every fused kernel wants: four dimensions, one batch size, one type, nothing empty, rows without gaps."""
    tensors = (query, key, value)
    return (
        all(t.is_meta and t.dim() == 4 and t.numel() > 0 and t.stride(-1) == 1 for t in tensors)
        and len({t.dtype for t in tensors}) == 1
        and len({t.shape[0] for t in tensors}) == 1
        and key.shape[1:3] == value.shape[1:3]
    )


def _make_additive_mask(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A boolean mask as one to add: zero where attention is paid, minus infinity elsewhere."""
    return torch.where(mask, 0.0, torch.scalar_tensor(-math.inf, dtype=dtype, device=mask.device))


def _align_mask(mask: Tensor) -> Tensor:
    """The mask in rows that start at multiples of eight elements, as the memory-efficient kernel loads them."""
    size = mask.shape[-1]
    if all(stride % _ALIGNED == 0 for stride in mask.stride()[:-1]) and mask.stride(-1) in (0, 1):
        return mask
    return torch.nn.functional.pad(mask, (0, _ALIGNED - size % _ALIGNED))[..., :size]
