"""Values of tensors that a script reads: known, stated by the user, zeros, or rejected."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from traincast.capturing.assumptions import Assumptions, get_assumptions
from traincast.capturing.errors import BRANCH, ITEM, reject_values
from traincast.capturing.recorder import Recorder
from traincast.capturing.unknown import UnknownFloat, UnknownInt


def nest_numbers(numbers: list[int], shape: list[int]) -> Any:
    """Numbers as `tolist` gives them: lists in lists, or one number."""
    if not shape:
        return numbers[0]
    if len(shape) == 1:
        return numbers
    step = len(numbers) // max(1, shape[0])
    return [nest_numbers(numbers[i * step : (i + 1) * step], shape[1:]) for i in range(shape[0])]


def make_stated_array(stated: Assumptions, tensor: torch.Tensor) -> Any:
    """An array of the stated numbers, taken in turn, or of the one that is stated; None where nothing is."""
    numbers = stated.find_numbers(tensor.numel())
    one = stated.find_number() if numbers is None else None
    if numbers is None and one is None:
        return None
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        listed = numbers if numbers is not None else [one] * tensor.numel()
        return torch.tensor(listed, dtype=tensor.dtype).reshape(tensor.shape).numpy()


def make_zero_array(tensor: torch.Tensor) -> Any:
    """An array of the tensor's form; PyTorch has none of bfloat16."""
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        return torch.zeros(tensor.shape, dtype=tensor.dtype).numpy()


def is_list_of_tensors(data: Any) -> bool:
    """Whether data is a list of numbers some of which are tensors without values."""
    return isinstance(data, list | tuple) and any(isinstance(item, torch.Tensor) and item.is_meta for item in data)


_CPU = torch.device("cpu")
_ITEM = f"use torch.where, or state it: {BRANCH}"
NUMBERS = (torch.Tensor.item, torch.Tensor.__float__)
WITH_VALUES = {
    torch.Tensor.__bool__: ("a decision on a tensor (if, while, and, or, not)", _ITEM),
    torch.Tensor.__index__: ("a tensor as an index or size", f"use a Python int, or state it: {ITEM}"),
    torch.Tensor.__int__: ("int(tensor)", f"use a Python int, or state it: {ITEM}"),
    torch.Tensor.tolist: ("tensor.tolist()", "use Python numbers, or state them: `assume` lengths=N,N,..."),
    torch.Tensor.numpy: (
        "tensor.numpy()",
        "stay in torch, or state the numbers: `assume` lengths=N,N,... or item=NUMBER for all of them",
    ),
}
_WHOLE = (torch.Tensor.tolist, torch.Tensor.numpy)


class ValueReader:
    """What a function mode answers where values are asked for; `DeviceMode` also moves tensors."""

    recorder: Recorder

    def move_tensor(self, tensor: torch.Tensor, device: torch.device, **options: Any) -> torch.Tensor:
        """A copy of the tensor on another side; made by `DeviceMode`."""
        raise NotImplementedError

    def _read_values(self, ask: Callable[..., Any], tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Values that the user asks for to decide or compute with: known, stated or rejected."""
        if self.recorder.book.is_without_values(tensor):
            return self._read_stated_values(ask, tensor)
        self.recorder.execution.values.note_read(tensor)
        if not tensor.is_meta:
            return ask(tensor, *args, **kwargs)
        if ask in _WHOLE:
            tensor = self.move_tensor(tensor, _CPU)
        else:
            torch.ops.aten._local_scalar_dense(tensor)  # the device is asked, and waited for
        with torch._C._DisableTorchDispatch():
            return ask(self.recorder.execution.values.get_values(tensor), *args, **kwargs)

    def _make_array(self, tensor: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        """What numpy makes of a tensor that it is given."""
        array = self._read_values(torch.Tensor.numpy, tensor.detach())
        return array if dtype is None else array.astype(dtype, copy=False)

    def _find_known_values(self, tensor: torch.Tensor) -> list[int] | None:
        """Numbers of a tensor as far as they are known, without asking the device."""
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            values = self.recorder.execution.values.get_values(tensor)
            return None if values is None else values.tolist()

    def _make_finite_check(self, ask: Callable[..., torch.Tensor], result: bool) -> Callable[..., torch.Tensor]:
        """Checks for NaN, infinity and what is valid (of distributions): values that are not known pass."""

        def check(input: torch.Tensor) -> torch.Tensor:
            found = ask(input)
            if self.recorder.book.is_without_values(found):
                self.recorder.execution.values.set_value(found, result)
            return found

        return check

    def _read_number(self, ask: Callable[[torch.Tensor], Any], tensor: torch.Tensor) -> Any:
        """A number the user asks for by name, and so can live with one that is unknown."""
        execution = self.recorder.execution
        execution.request.number_asked = True
        try:
            number = ask(tensor)
        finally:
            execution.request.number_asked = False
        if not self.recorder.book.is_without_values(tensor):
            return number
        if type(number) is float:
            if ask is torch.Tensor.__float__:
                get_assumptions().note_assumption("a fraction read from a tensor is taken to be 0.0")
                return number
            return UnknownFloat()
        if type(number) is not int:
            return number
        stated = get_assumptions().find_number()
        if stated is not None:
            return stated
        execution.unknown_numbers = True
        return UnknownInt()

    def _read_stated_values(self, ask: Any, tensor: torch.Tensor) -> Any:
        """What the user has stated of values that decide something; reading them waits for the device."""
        stated = get_assumptions()
        if ask is torch.Tensor.tolist:
            numbers = stated.find_numbers(tensor.numel()) if not tensor.dtype.is_floating_point else None
            value = None if numbers is None else nest_numbers(numbers, list(tensor.shape))
        elif ask is torch.Tensor.numpy:
            value = make_stated_array(stated, tensor)
        elif ask is torch.Tensor.__bool__:
            value = stated.find_decision()
            value = stated.decide_unstated() if value is None else value
        else:
            value = stated.find_number() if ask in (torch.Tensor.__index__, torch.Tensor.__int__) else None
        if value is None and ask in _WHOLE and (tensor.dtype.is_floating_point or not stated.in_step):
            stated.note_assumption("numbers read from tensors as lists and arrays are taken to be 0")
            value = make_zero_array(tensor) if ask is torch.Tensor.numpy else make_zero_array(tensor).tolist()
        if value is None and not stated.in_step and ask is torch.Tensor.__int__:
            return UnknownInt().__index__()
        if value is None:
            raise reject_values(*WITH_VALUES[ask])
        if self.recorder.book.get_device(tensor) == "cuda":
            self.move_tensor(tensor.detach(), _CPU)
        return value

    def _stack_scalars(self, data: Any, options: dict[str, Any]) -> torch.Tensor:
        """A tensor of numbers that are tensors: each is read from the device."""
        for item in data:
            if isinstance(item, torch.Tensor):
                self._read_number(torch.Tensor.item, item.detach())
        dtype = options.get("dtype") or next(item.dtype for item in data if isinstance(item, torch.Tensor))
        made = torch.zeros(len(data), dtype=dtype)
        self.recorder.book.get_info(made, device="cpu", produced=True).unknown = True
        return made
