"""GPT-2 divided over GPUs as Megatron does: every layer over all of them, or layers one after the other.

Both are a `make_step` for `capture_distributed`: forward, loss and backward without an optimizer. The batch size is
that of all GPUs together: they work on the same samples.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from traincast.utils.errors import TraincastError
from traincast_evaluation.zoo.build.steps import Step
from traincast_evaluation.zoo.define.gpt2 import Attention, Block, Conv1D, Gpt2, compute_causal_loss
from traincast_evaluation.zoo.define.sizes import LanguageModelSizes

_VOCAB_MULTIPLE = 128  # Megatron pads the vocabulary so that every GPU's part is a multiple of this


class SumOfGradients(torch.autograd.Function):
    """The same input on every GPU; its gradients are summed."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """The input."""
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """The sum over GPUs."""
        total = grads[0].contiguous()
        dist.all_reduce(total)
        return total


class SumOfParts(torch.autograd.Function):
    """A part of the result on every GPU; the result is their sum."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """The sum over GPUs, in place."""
        ctx.mark_dirty(x)
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """The gradient."""
        return grads[0]


class ColumnConv1D(Conv1D):
    """Some of a layer's outputs, of all its inputs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] to [..., part of out]."""
        return super().forward(SumOfGradients.apply(x))


class RowConv1D(Conv1D):
    """All of a layer's outputs, of some of its inputs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., part of in] to [..., out]."""
        total: torch.Tensor = SumOfParts.apply(super().forward(x))
        return total


class SomeTokens(nn.Embedding):
    """Some rows of the vocabulary; the others come from other GPUs."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Rows of all tokens."""
        total: torch.Tensor = SumOfParts.apply(super().forward(input))
        return total


class SomeScores(nn.Linear):
    """The scores of some of the vocabulary."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[..., size] to [..., part of the vocabulary]."""
        return super().forward(SumOfGradients.apply(input))


class DividedAttention(Attention):
    """Some of the heads."""

    def __init__(self, config: LanguageModelSizes, gpus: int) -> None:
        part = config.hidden_size // gpus
        super().__init__(replace(config, hidden_size=part, num_heads=config.num_heads // gpus))
        self.qkv, self.projection = ColumnConv1D(config.hidden_size, 3 * part), RowConv1D(part, config.hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Hidden states [batch, length, size] of all heads together."""
        query, key, value = (self._heads(part) for part in self.qkv(x).split(self.size, dim=2))
        merged = self._eager(query, key, value).permute(0, 2, 1, 3).contiguous().view(*x.shape[:-1], self.size)
        result: torch.Tensor = self.dropout(self.projection(merged))
        return result


class DividedBlock(Block):
    """A block with its heads and its hidden layer divided over GPUs."""

    def __init__(self, config: LanguageModelSizes, gpus: int) -> None:
        super().__init__(config)
        size, part = config.hidden_size, 4 * config.hidden_size // gpus
        self.attention = DividedAttention(config, gpus)
        self.grow, self.shrink = ColumnConv1D(size, part), RowConv1D(part, size)


class DividedGpt2(Gpt2):
    """GPT-2 with every layer, and its vocabulary, divided over GPUs."""

    def __init__(self, config: LanguageModelSizes, gpus: int) -> None:
        super().__init__(replace(config, num_layers=0))
        multiple = _VOCAB_MULTIPLE * gpus
        part = -(-config.vocab_size // multiple) * multiple // gpus
        self.blocks = nn.ModuleList(DividedBlock(config, gpus) for _ in range(config.num_layers))
        self.tokens = SomeTokens(part, config.hidden_size)
        self.head = SomeScores(config.hidden_size, part, bias=False)
        self.head.weight = self.tokens.weight


def compute_divided_loss(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross entropy of scores whose vocabulary is divided: maxima, the labels' scores and sums are exchanged."""
    flat, targets = scores[:, :-1].reshape(-1, scores.shape[-1]), labels[:, 1:].reshape(-1, 1)
    largest = flat.detach().max(dim=-1).values
    dist.all_reduce(largest)
    shifted = flat - largest.unsqueeze(1)
    chosen = SumOfParts.apply(shifted.gather(1, targets).squeeze(1))
    total = SumOfParts.apply(shifted.exp().sum(dim=-1))
    return (total.log() - chosen).mean()


def make_tensor_parallel_step(config: LanguageModelSizes) -> Callable[..., Step]:
    """Every layer divided over all GPUs."""

    def make(batch_size: int, seq_len: int, *, rank: int, world_size: int) -> Step:
        _check(world_size, heads=config.num_heads)
        with torch.device("cuda"):
            model = DividedGpt2(config, world_size)
            tokens = torch.zeros(batch_size, seq_len, dtype=torch.int64)

        def step() -> None:
            compute_divided_loss(model(tokens), tokens).backward()

        return step

    return make


def make_pipeline_step(config: LanguageModelSizes) -> Callable[..., Step]:
    """Layers one after the other, as many on every GPU; all samples at once (one micro-batch)."""

    def make(batch_size: int, seq_len: int, *, rank: int, world_size: int) -> Step:
        _check(world_size, layers=config.num_layers)
        first, last = rank == 0, rank == world_size - 1
        with torch.device("cuda"):
            whole = Gpt2(replace(config, num_layers=config.num_layers // world_size))
            tokens = torch.zeros(batch_size, seq_len, dtype=torch.int64)
            hidden = torch.zeros(batch_size, seq_len, config.hidden_size)
        blocks, ending = whole.blocks, nn.Sequential(whole.norm, whole.head)

        def step() -> None:
            if first:
                positions = torch.arange(seq_len, device="cuda").unsqueeze(0)
                entering = whole.dropout(whole.tokens(tokens) + whole.positions(positions))
            else:
                entering = torch.empty_like(hidden)
                dist.recv(entering, rank - 1)
                entering.requires_grad_()
            x = entering
            for block in blocks:
                x = block(x)
            if last:
                compute_causal_loss(ending(x), tokens).backward()
            else:
                dist.send(x.detach(), rank + 1)
                grad = torch.empty_like(hidden)
                dist.recv(grad, rank + 1)
                x.backward(grad)
            if not first:
                assert entering.grad is not None
                dist.send(entering.grad, rank - 1)

        return step

    return make


def _check(gpus: int, **divided: int) -> None:
    for what, count in divided.items():
        if count % gpus:
            raise TraincastError(f"{count} {what} cannot be divided over {gpus} GPUs; choose a divisor of {count}")
