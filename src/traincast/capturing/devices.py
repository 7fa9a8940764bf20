"""The function mode that puts what the user puts on `cuda` on meta tensors, and says `cuda` when asked."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch._C._profiler import _RecordFunctionFast
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.overrides import TorchFunctionMode
from torch.utils import _device
from torch.utils._device import _device_constructors

from traincast.capturing.arguments import list_tensors
from traincast.capturing.assumptions import get_assumptions
from traincast.capturing.attention import is_flex, run_flex_attention
from traincast.capturing.cuda_choices import assign_value, make_one_hot
from traincast.capturing.fbgemm import (
    complete_jagged,
    find_fbgemm_function,
    find_optimizer,
    makes_jagged,
    makes_managed,
    run_lookup,
)
from traincast.capturing.kernels import find_composite
from traincast.capturing.recorder import Recorder
from traincast.capturing.unknown import reject_unknown
from traincast.capturing.value_reading import NUMBERS, WITH_VALUES, ValueReader, is_list_of_tensors

_CPU = torch.device("cpu")
_META = torch.device("meta")
_text: Any = torch._tensor_str._str
_BROKEN: dict[Any, bool] = {  # what a run that goes well answers
    torch.isnan: False, torch.Tensor.isnan: False, torch.isinf: False, torch.Tensor.isinf: False,
    torch.isfinite: True, torch.Tensor.isfinite: True, torch._is_all_true: True,
}  # fmt: skip
_OPERATORS = (torch._ops.OperatorBase, torch._ops.OpOverloadPacket)


def _make_new(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """The old way to make a tensor like another one; sparse ones without data have no such type."""
    if tensor.layout is torch.sparse_coo and len(args) == 3:
        return torch.sparse_coo_tensor(*args, dtype=tensor.dtype, device=tensor.device, check_invariants=False)
    return tensor.new(*args, **kwargs)


OLD_TYPES = {
    "FloatTensor": torch.float32, "DoubleTensor": torch.float64, "HalfTensor": torch.float16,
    "BFloat16Tensor": torch.bfloat16, "LongTensor": torch.int64, "IntTensor": torch.int32, "ShortTensor": torch.int16,
    "CharTensor": torch.int8, "ByteTensor": torch.uint8, "BoolTensor": torch.bool,
}  # fmt: skip
"""Classes that tensors once had, and their element types."""
_TYPE_NAMES = {dtype: name for name, dtype in OLD_TYPES.items()}


def _is_meta(device: Any) -> bool:
    return device is not None and str(device) == "meta"


class DeviceMode(ValueReader, TorchFunctionMode):
    """Moves `cuda` to meta tensors. With `default_cuda`, tensors without a device go there too."""

    def __init__(self, recorder: Recorder, *, default_cuda: bool) -> None:
        super().__init__()
        self.recorder = recorder
        self.default_cuda = default_cuda
        self.uses_cuda = default_cuda
        self._indices: set[int] = set()  # of GPUs that the script has named
        self.meta_is_hollow = True  # not where `cuda` is the default device, which PyTorch itself puts in
        tensor: Any = torch.Tensor
        self._special: dict[Any, Callable[..., Any]] = {
            tensor.device.__get__: lambda t: self.get_device(t),
            tensor.is_cuda.__get__: lambda t: self.get_device(t).type == "cuda",
            tensor.is_cpu.__get__: lambda t: self.get_device(t).type == "cpu",
            tensor.is_meta.__get__: lambda t: False,
            tensor.get_device: lambda t: self.get_device(t).index if self.get_device(t).type == "cuda" else -1,
            tensor.to: self._move_or_cast,
            tensor.cuda: self._move_to_cuda,
            tensor.cpu: lambda t, memory_format=None: self.move_tensor(t, _CPU, memory_format=memory_format),
            tensor.pin_memory: lambda t, device=None: self._pin_memory(t),
            tensor.is_pinned: lambda t, device=None: self._is_pinned(t),
            tensor.new: _make_new,
            tensor.type: self._get_or_change_type,
            tensor.data.__set__: self._set_data,
            tensor.__setitem__: assign_value,
            torch.nn.functional.one_hot: self._make_one_hot,
            tensor.__array__: self._make_array,
            tensor.__format__: self._format_tensor,
            tensor.__repr__: self._represent_tensor,
            torch.tensor: self._wrap_constructor(torch.tensor),
            torch.as_tensor: self._wrap_constructor(torch.as_tensor),
            torch.asarray: self._wrap_constructor(torch.asarray),
            **{ask: self._make_finite_check(ask, result) for ask, result in _BROKEN.items()},
        }

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Answers or redirects one call of torch's Python API."""
        kwargs = kwargs or {}
        special = self._special.get(func)
        if special is not None:
            return special(*args, **kwargs)
        if func in WITH_VALUES:
            return self._read_values(func, *args, **kwargs)
        if func in NUMBERS:
            return self._read_number(func, args[0])
        if isinstance(func, _OPERATORS) and (made := self._run_operator(func, args, kwargs)) is not NotImplemented:
            return made
        if self.recorder.execution.unknown_numbers:
            reject_unknown(args, kwargs)
        hollow = self.meta_is_hollow and _is_meta(kwargs.get("device")) and func in _device_constructors()
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": self.resolve_device(kwargs["device"])}
        elif self.default_cuda and func in _device_constructors():
            kwargs = {**kwargs, "device": _META}
        if kwargs.get("generator") is not None and kwargs.get("device") == _META:
            kwargs = {**kwargs, "generator": None}
        if kwargs.get("pin_memory"):
            return self._pin_memory(func(*args, **{**kwargs, "pin_memory": False}))
        if isinstance(func, FunctionType) and self._works_on_host(args, kwargs):
            return self._call_on_host(func, args, kwargs)
        return self._note_meta_tensor(func(*args, **kwargs)) if hollow else func(*args, **kwargs)

    def _works_on_host(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a function of PyTorch's works on the host alone, on tensors some of which have no data."""
        tensors = list_tensors((args, kwargs))
        get = self.recorder.book.get_device
        return any(tensor.is_meta for tensor in tensors) and all(get(tensor) != "cuda" for tensor in tensors)

    def _call_on_host(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The function, which makes tensors where its own are (`device=input.device`, as it sees it: `meta`)."""
        request = self.recorder.execution.request
        outer, request.host_call = request.host_call, True
        try:
            return func(*args, **kwargs)
        finally:
            request.host_call = outer

    def _run_operator(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Operators that have a stub here; `NotImplemented` for all others."""
        optimizer = find_optimizer(func)
        if optimizer is not None:
            with self:
                return run_lookup(func, optimizer, args, kwargs, self._find_known_values)
        if makes_managed(func):
            return self._make_managed(*args, **kwargs)
        if makes_jagged(func):
            return func(*complete_jagged(self._find_known_values, *args, **kwargs))
        parts = find_composite(func) or find_fbgemm_function(func)
        if parts is not None:
            return parts(*args, **kwargs)
        if is_flex(func):
            return run_flex_attention(self.recorder.regions.compiled, *args, **kwargs)
        return NotImplemented

    def _is_pinned(self, tensor: torch.Tensor) -> bool:
        book = self.recorder.book
        return book.get_device(tensor) == "cpu:pinned" and not book.is_managed(tensor)

    def _make_managed(self, like: torch.Tensor, sizes: list[int], *args: Any, **options: Any) -> torch.Tensor:
        """Unified memory: it says that it is the GPU's, and lies on the host."""
        made = torch.empty(sizes, dtype=like.dtype, device=_META)
        info = self.recorder.book.get_info(made, device="cpu")
        info.device, info.managed, self.recorder.book.any_managed = "cpu:pinned", True, True
        return made

    def _note_meta_tensor(self, made: torch.Tensor) -> torch.Tensor:
        """Notes that the user has put a tensor on `meta`: it takes no memory unless the step uses it."""
        self.recorder.book.any_hollow = self.recorder.book.get_info(made).hollow = True
        return made

    def wrap_function(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, run with this mode on."""

        def run(*args: Any, **kwargs: Any) -> Any:
            with self:
                return function(*args, **kwargs)

        return run

    def get_device(self, tensor: torch.Tensor) -> torch.device:
        """The device that a tensor would be on in a run with a GPU."""
        if isinstance(tensor, (UninitializedParameter, UninitializedBuffer)):
            return self.recorder.regions.device
        held = getattr(tensor, "_local_tensor", tensor)  # a DTensor is a shard in a wrapper
        book = self.recorder.book
        return self.recorder.regions.device if book.get_device(held) == "cuda" or book.is_managed(held) else _CPU

    def resolve_device(self, device: Any) -> torch.device:
        """The device a tensor really goes to when the user says `device`."""
        wanted = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        if wanted.type == "cuda":
            self.uses_cuda = True
            self._note_index(wanted.index)
            return _META
        return wanted

    def _note_index(self, index: int | None) -> None:
        """One process on several GPUs is recorded as if on one."""
        if index is not None:
            self._indices.add(index)
            if len(self._indices) > 1:
                get_assumptions().note_once(
                    "the script uses several GPUs in one process: recorded as one GPU that has the memory of all, "
                    "without the copies between them"
                )

    def _move_to_cuda(self, tensor: torch.Tensor, device: Any = None, **options: Any) -> torch.Tensor:
        if device is not None:
            self.resolve_device(device)
        return self.move_tensor(tensor, _META, **options)

    def _move_or_cast(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """`tensor.to(...)` in all its forms."""
        named = dict(kwargs)
        rest = list(args)
        if rest and isinstance(rest[0], torch.Tensor):
            named["other"] = rest.pop(0)
        elif rest and (rest[0] is None or isinstance(rest[0], (str, int, torch.device))):
            named["device"] = rest.pop(0)
            if rest and (rest[0] is None or isinstance(rest[0], torch.dtype)):
                named["dtype"] = rest.pop(0)
        elif rest:
            named["dtype"] = rest.pop(0)
        named.update(zip(("non_blocking", "copy"), rest, strict=False))
        other = named.pop("other", None)
        if other is not None:
            named.update(device=self.get_device(other), dtype=other.dtype)
        device = named.pop("device", None)
        named = {key: value for key, value in named.items() if value is not None}
        if device is None:
            return tensor.to(**named) if named else tensor
        moved = self.move_tensor(tensor, self.resolve_device(device), **named)
        made = _is_meta(device) and moved.untyped_storage()._cdata != tensor.untyped_storage()._cdata
        return self._note_meta_tensor(moved) if made else moved

    def move_tensor(self, tensor: torch.Tensor, device: torch.device, **options: Any) -> torch.Tensor:
        """To `meta` (the GPU) or `cpu` (the host); a change of side is a copy, made without data."""
        options = {key: value for key, value in options.items() if value is not None}
        target = "cuda" if device == _META else "cpu"
        if device == _META:
            self.uses_cuda = True
        if isinstance(tensor, (UninitializedParameter, UninitializedBuffer)):
            return tensor
        book = self.recorder.book
        if book.get_device(tensor).startswith(target) or book.is_managed(tensor):
            return tensor.to(device=tensor.device, **options)
        options.pop("copy", None)
        self.recorder.execution.request.copy_target = target
        try:
            with _RecordFunctionFast("aten::to"):
                copy: torch.Tensor = torch.ops.aten._to_copy(tensor, device=_META, **options)
        finally:
            self.recorder.execution.request.copy_target = None
        if copy.requires_grad and tensor.is_meta:  # both sides are: autograd itself sees nothing to copy back
            back = _CPU if target == "cuda" else _META
            copy.register_hook(lambda gradient: self.move_tensor(gradient, back))  # type: ignore[no-untyped-call]
        return copy

    def _get_or_change_type(self, tensor: torch.Tensor, dtype: Any = None, non_blocking: bool = False) -> Any:
        """The old way to ask for a type and to change it, with the device in its name."""
        if dtype is None:
            name = _TYPE_NAMES[tensor.dtype]
            return f"torch.cuda.{name}" if self.get_device(tensor).type == "cuda" else f"torch.{name}"
        if isinstance(dtype, torch.dtype):
            return tensor.to(dtype, non_blocking=non_blocking)
        words = dtype.split(".") if isinstance(dtype, str) else [*dtype.__module__.split("."), dtype.__name__]
        wanted = OLD_TYPES[words[-1]] if words[-1] != "Tensor" else torch.get_default_dtype()
        return self.move_tensor(tensor, _META if "cuda" in words else _CPU, dtype=wanted, non_blocking=non_blocking)

    def _make_one_hot(self, tensor: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
        return make_one_hot(tensor, num_classes, _META if self.get_device(tensor).type == "cuda" else _CPU)

    def _set_data(self, tensor: torch.Tensor, data: torch.Tensor) -> None:
        """`tensor.data = data`: a meta tensor takes over another one's form and place, not its values."""
        if tensor.is_meta and not data.is_meta:
            place = self.recorder.book.get_device(data)
            data = data.to("meta")
            self.recorder.book.get_info(data, device=place).device = place
        tensor.data = data

    def _format_tensor(self, tensor: torch.Tensor, form: str) -> str:
        if tensor.dim() == 0:
            get_assumptions().note_once("numbers of tensors that are printed are taken to be 0")
            return format(self._read_number(torch.Tensor.item, tensor.detach()), form)
        return format(_text(tensor), form)

    def _represent_tensor(self, tensor: torch.Tensor, *, tensor_contents: Any = None) -> str:
        if tensor.dim() == 0 and tensor.is_meta:
            return (
                f"tensor({self._read_number(torch.Tensor.item, tensor.detach())}, device='{self.get_device(tensor)}')"
            )
        return str(_text(tensor))

    def _pin_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        """A page-locked copy of a host tensor, with its values where they are known."""
        pinned = torch.empty_like(tensor, device=_META)
        self.recorder.book.get_info(pinned, device="cpu").device = "cpu:pinned"
        values = self.recorder.execution.values
        with torch._C._DisableTorchDispatch():
            values.replace_values(pinned, values.get_values(tensor))
        return pinned

    def _wrap_constructor(self, original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """Tensors from Python data are made on the host, then copied."""

        def make(data: Any, *args: Any, device: Any = None, requires_grad: bool = False, **kwargs: Any) -> torch.Tensor:
            default = None if isinstance(data, torch.Tensor) else _device.CURRENT_DEVICE
            if default is not None:
                kwargs["device"] = _CPU  # a default device would lose the data
            made = self._stack_scalars(data, kwargs) if is_list_of_tensors(data) else original(data, *args, **kwargs)
            device = default if device is None else device
            if device is not None:
                made = self.move_tensor(made, self.resolve_device(device))
            elif self.default_cuda and not isinstance(data, torch.Tensor):
                made = self.move_tensor(made, _META)
            return made.requires_grad_() if requires_grad else made

        return make
