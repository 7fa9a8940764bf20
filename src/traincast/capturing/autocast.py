"""`torch.autocast("cuda")` on meta tensors, by CUDA's own lists of ops.

CUDA's autocast looks only at CUDA tensors. The same casts are made here on an autocast key of its own, so that ops
called from C++ are cast too.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils._pytree import tree_iter, tree_map_only

from traincast.capturing.patches import Patches
from traincast.ir.ops import BANNED, FLOAT32, FLOAT32_RESULT, LOWER_PRECISION, NORMS, RECURRENT, WIDEST

_KEY = "AutocastPrivateUse1"
_KEY_VALUE: Any = getattr(torch._C.DispatchKey, _KEY)
_DEVICE = "privateuseone"


class Autocast:
    """The casts, and the copies of weights kept until the outermost autocast block ends."""

    def __init__(self) -> None:
        self._copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def install_casts(self, patches: Patches) -> None:
        """Puts the casts in place until the patches are undone."""
        library: Any = torch.library.Library("aten", "IMPL", _KEY)  # type: ignore[no-untyped-call]
        patches.callback(library._destroy)
        for names, policy in (
            (LOWER_PRECISION, self._cast_to_lower), (RECURRENT, self._cast_to_lower), (FLOAT32, self._cast_to_float32),
            (FLOAT32_RESULT, self._set_float32_result), (NORMS, self._cast_norm), (WIDEST, self._cast_to_widest),
            ((BANNED,), self._reject_banned),
        ):  # fmt: skip
            for name in names:
                if _has_op(name):
                    library.impl(name, self._make_kernel(_find_overload(name), policy))
        anything: Any = torch.library.Library("_", "IMPL", _KEY)  # type: ignore[no-untyped-call]
        patches.callback(anything._destroy)
        anything.fallback(torch.library.fallthrough_kernel)
        clear = torch.clear_autocast_cache

        def clear_both() -> None:
            self._copies.clear()
            clear()

        patches.set_attribute(torch, "clear_autocast_cache", clear_both)
        patches.callback(torch.set_autocast_enabled, _DEVICE, torch.is_autocast_enabled(_DEVICE))
        torch.set_autocast_enabled(_DEVICE, True)
        patches.enter_context(torch._C._IncludeDispatchKeyGuard(_KEY_VALUE))

    def _make_kernel(self, op: Any, policy: Callable[..., Any]) -> Callable[..., Any]:
        def kernel(*args: Any, **kwargs: Any) -> Any:
            with _dispatch_below_autocast():
                return policy(op, args, kwargs) if torch.is_autocast_enabled("cuda") else op(*args, **kwargs)

        return kernel

    def _cast_to_lower(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._cast_arguments(op, torch.get_autocast_dtype("cuda"), args, kwargs)

    def _cast_to_float32(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._cast_arguments(op, torch.float32, args, kwargs)

    def _set_float32_result(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        position = [argument.name for argument in op._schema.arguments].index("dtype")
        requested = args[position] if position < len(args) else kwargs.get("dtype")
        if not _is_eligible(args[0]) or requested is not None:
            return op(*args, **kwargs)
        return op(*args[:position], **{**kwargs, "dtype": torch.float32})

    def _cast_norm(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with_type = _find_overload(NORMS[op.name().removeprefix("aten::")])
        bound = [*args, *(argument.default_value for argument in op._schema.arguments[len(args) :])]
        return with_type(*bound, dtype=torch.float32 if _is_eligible(args[0]) else args[0].dtype)

    def _cast_to_widest(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        types = {t.dtype for t in tree_iter((args, kwargs)) if isinstance(t, torch.Tensor) and _is_eligible(t)}
        wide = torch.float32 if torch.float32 in types else torch.get_autocast_dtype("cuda")
        return self._cast_arguments(op, wide, args, kwargs)

    def _reject_banned(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not _is_eligible(args[0]):
            return op(*args, **kwargs)
        raise RuntimeError(
            "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast: "
            "use binary_cross_entropy_with_logits"
        )

    def _cast_arguments(self, op: Any, dtype: torch.dtype, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # The last argument is cast first: that is the order in which PyTorch's compiler evaluates them.
        cast = [
            tree_map_only(torch.Tensor, lambda t: self._cast_tensor(t, dtype), a) for a in (kwargs, *reversed(args))
        ]
        return op(*reversed(cast[1:]), **cast[0])

    def _cast_tensor(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if not _is_eligible(tensor) or tensor.dtype == dtype:
            return tensor
        keep = (
            torch.is_autocast_cache_enabled()
            and dtype == torch.get_autocast_dtype("cuda")
            and tensor.dtype == torch.float32
            and tensor.requires_grad and tensor.is_leaf and not tensor._is_view()
        )  # fmt: skip
        if not keep:
            return tensor.to(dtype)
        if id(tensor) not in self._copies:
            self._copies[id(tensor)] = (tensor, tensor.to(dtype))
        return self._copies[id(tensor)][1]


def _is_eligible(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor) and value.is_meta and value.is_floating_point() and value.dtype != torch.float64
    )


def _dispatch_below_autocast() -> AbstractContextManager[Any]:
    """Dispatch below autocast: a cast op is not cast again."""
    guard: AbstractContextManager[Any] = torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(_KEY_VALUE))
    return guard


def _has_op(name: str) -> bool:
    """Whether this PyTorch has the op: the lists are those of the newest that is tested."""
    return hasattr(torch.ops.aten, name.partition(".")[0])


def _find_overload(name: str) -> Any:
    base, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, base), overload or "default")
