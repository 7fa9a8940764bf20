"""Small models for one GPU and, wrapped, for many: what data parallelism must agree on with a capture."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from traincast.ir import Program
from traincast_evaluation.zoo.define.gpt2 import Gpt2
from traincast_evaluation.zoo.define.sizes import LanguageModelSizes

OPTIMIZERS: dict[str, Callable[..., Any] | None] = {
    "none": None,
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "adam": lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
}


class Norms(nn.Module):
    """Batch norms: buffers of two types, one of them alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(64, 1300), nn.BatchNorm1d(1300)
        self.middle, self.last = nn.Linear(1300, 1300), nn.Linear(1300, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.middle(torch.relu(self.norm(self.first(x))))))


class Convolutions(nn.Module):
    """Convolutions, three types of buffers in three pieces, and a head whose parameters are made first."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(16, 64)
        self.masked = Masked()
        self.conv1, self.norm1 = nn.Conv2d(1, 16, 3), nn.BatchNorm2d(16)
        self.conv2, self.norm2 = nn.Conv2d(16, 16, 3, bias=False), nn.BatchNorm2d(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.norm1(self.conv1(x.view(-1, 1, 8, 8))))
        return self.masked(self.head(torch.relu(self.norm2(self.conv2(y))).mean((2, 3))))


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("keep", torch.ones(1, 64, dtype=torch.bool))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.masked_fill(self.keep, 0.0)


def classifier(build: Callable[[], nn.Module], optimizer: str, *, set_to_none: bool = True) -> Callable[..., Any]:
    """A step of a model of 64 numbers per sample, copied to the GPU; `wrap` makes it data parallel."""

    def make(batch: int, wrap: Callable[[nn.Module], nn.Module]) -> Callable[[], None]:
        model = wrap(build().cuda())
        chosen = OPTIMIZERS[optimizer]
        optim = chosen(model.parameters()) if chosen else None
        inputs = torch.zeros(batch, 64).pin_memory()
        target = torch.zeros(batch, dtype=torch.int64, device="cuda")

        def step() -> None:
            if optim:
                optim.zero_grad(set_to_none=set_to_none)
            F.cross_entropy(model(inputs.cuda(non_blocking=True)), target).backward()
            if optim:
                optim.step()

        return step

    return make


def language_model(optimizer: str, *, mixed: bool = False) -> Callable[..., Any]:
    """A GPT-2 of two layers with tied weights, attention masks as buffers, and inputs on the GPU."""
    config = LanguageModelSizes(num_layers=2, hidden_size=64, num_heads=4, max_seq_len=16, vocab_size=5000)

    def make(batch: int, wrap: Callable[[nn.Module], nn.Module]) -> Callable[[], None]:
        model = wrap(Gpt2(config).cuda())
        chosen = OPTIMIZERS[optimizer]
        optim = chosen(model.parameters()) if chosen else None
        tokens = torch.zeros(batch, 16, dtype=torch.int64, device="cuda")

        def step() -> None:
            if optim:
                optim.zero_grad()
            with torch.autocast("cuda", dtype=torch.bfloat16, enabled=mixed):
                loss = F.cross_entropy(model(tokens).view(-1, 5000), tokens.view(-1))
            loss.backward()
            if optim:
                optim.step()

        return step

    return make


def described(program: Program) -> tuple[list[tuple[object, ...]], list[tuple[int, ...]]]:
    """Everything a program says, with tensors and storages numbered by first use: scopes and ops in order, storages.

    Modules are left out: a wrapped model has longer names.
    """
    tensors: dict[int, int] = {}
    storages: dict[int, int] = {}

    def named(used: Any) -> list[tuple[object, ...]]:
        return [
            (tensors.setdefault(t.id, len(tensors)), storages.setdefault(t.storage, len(storages)), t.spec)
            for t in used
        ]

    lines: list[tuple[object, ...]] = []
    for scope in program.scopes:
        lines.append((scope.name, scope.phase, scope.thread, scope.after, scope.num_ops))
        for op in program.ops[scope.first_op : scope.first_op + scope.num_ops]:
            s = op.signature
            form = (s.name, s.overload, s.scalars, s.groups, op.stream, op.forward)
            lines.append((*form, named(op.inputs), named(op.outputs)))
    c = program.columns
    columns = (program.storage_nbytes, c.storage_kind, c.storage_alloc, c.storage_free)
    rows = [tuple(int(column[i]) for column in columns) for i in range(len(c.storage_bytes))]
    return lines, sorted((storages.get(i, len(storages)), *row) for i, row in enumerate(rows))
