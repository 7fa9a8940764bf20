"""Views that stay the same op at every length."""

from __future__ import annotations

import torch


def slice_leading(x: torch.Tensor, dim: int, length: int) -> torch.Tensor:
    """The first `length` entries along `dim`, always by `aten::slice`.

    Python's `x[:length]` is another op when it takes everything, and a step must not change its ops with its sizes.
    """
    result: torch.Tensor = torch.ops.aten.slice.Tensor(x, dim, 0, length)
    return result
