"""What a GPU does where PyTorch takes another road for meta tensors: assigned numbers, and one-hot rows."""

from __future__ import annotations

from typing import Any

import torch
from torch._C._profiler import _RecordFunctionFast

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
