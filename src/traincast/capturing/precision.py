"""Which fp32 arithmetic a script lets run in TF32, by whichever of PyTorch's switches it uses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_get: Any = torch._C._get_fp32_precision_getter
_set: Any = torch._C._set_fp32_precision_setter
_SWITCHES = (("generic", "all"), ("cuda", "all"), ("cuda", "matmul"), ("cuda", "conv"), ("cuda", "rnn"))


def list_tf32_arithmetic() -> tuple[str, ...]:
    """What the switches allow now; a switch that was never set follows that of the whole backend."""
    allowed = []
    for arithmetic, op in (("products", "matmul"), ("convolutions", "conv")):
        chosen = (_get("cuda", op), _get("cuda", "all"), _get("generic", "all"))
        if next((value for value in chosen if value != "none"), "ieee") == "tf32":
            allowed.append(arithmetic)
    return tuple(allowed)


@contextmanager
def keep_precision_switches() -> Iterator[None]:
    """Puts PyTorch's precision switches back as they were, whatever a script sets."""
    before = [_get(backend, op) for backend, op in _SWITCHES]
    products, allowed = torch.get_float32_matmul_precision(), list_tf32_arithmetic()
    searches = torch.backends.cudnn.benchmark
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(products)
        torch.backends.cudnn.benchmark = searches
        torch.backends.cudnn.allow_tf32 = "convolutions" in allowed  # the older switch, which the new ones leave
        for (backend, op), value in zip(_SWITCHES, before, strict=True):
            _set(backend, op, value)
