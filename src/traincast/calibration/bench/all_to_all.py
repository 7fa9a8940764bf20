"""Pooled embeddings on their way between ranks, forward and backward: all-to-all, reduce-scatter and all-gather."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from traincast.calibration.bench.collectives import all_gather, reduce_scatter


class DifferentiableAllToAll(torch.autograd.Function):
    """A flat tensor of which rank r gets `sent[r]` elements and sends `received[r]`; gradients take the way back."""

    @staticmethod
    def forward(ctx: Any, flat: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> torch.Tensor:
        """What the other ranks sent, in the order of ranks."""
        ctx.sent, ctx.received = list(sent), list(received)
        return _run_all_to_all(flat, ctx.sent, ctx.received)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """Gradients of what was sent: means over the ranks, as DDP makes of the others."""
        return _run_all_to_all(grads[0] / len(ctx.sent), ctx.received, ctx.sent), None, None


class Summed(torch.autograd.Function):
    """Partial sums [samples of all ranks, columns]: every rank gets the sums of its own samples."""

    @staticmethod
    def forward(ctx: Any, partial: torch.Tensor) -> torch.Tensor:
        """The sums of this rank's samples."""
        own = partial.new_empty(partial.shape[0] // dist.get_world_size(), partial.shape[1])
        reduce_scatter(own, partial)
        return own

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """The gradients of all ranks' samples, as means over the ranks."""
        grad = grads[0].contiguous() / dist.get_world_size()
        everyone = grad.new_empty(grad.shape[0] * dist.get_world_size(), grad.shape[1])
        all_gather(everyone, grad)
        return everyone


def _run_all_to_all(flat: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
    arrived = flat.new_empty(sum(received))
    dist.all_to_all_single(arrived, flat, received, sent)
    return arrived
