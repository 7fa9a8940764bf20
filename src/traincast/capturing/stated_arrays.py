"""Arrays and lists of the numbers that a user has stated of a tensor, or of zeros."""

from __future__ import annotations

from typing import Any

import torch

from traincast.capturing.assumptions import Assumptions


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
