"""Set-ups that people train, each a `make_step` of few and narrow layers of the real classes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Setup:
    """One set-up. `needs` is the package that it is of; `gpus` of them it runs on (0: one, without ranks)."""

    name: str
    kind: str
    build: Callable[..., Callable[[], object]]
    batch: int = 2
    seq_len: int | None = None
    gpus: int = 0
    needs: tuple[str, ...] = ()
    like_cpu: bool = True  # compared with a real run on this CPU if it runs on one GPU
    beside: str = ""  # why a real run on a CPU differs, or cannot be had
    refused: str = ""  # part of the message it must be refused with


SETUPS: dict[str, Setup] = {}


def setup(name: str, kind: str, **how: Any) -> Callable[[Any], Any]:
    """Registers a function of (batch[, seq_len], device) as a set-up."""

    def register(build: Any) -> Any:
        assert name not in SETUPS, name
        SETUPS[name] = Setup(name, kind, build, **how)
        return build

    return register


def trained(
    model: torch.nn.Module, loss: Callable[[], torch.Tensor], optimizer: Callable[..., Any] | None = None
) -> Callable[[], object]:
    """One iteration of the plainest loop there is."""
    made = (optimizer or (lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=True)))(model.parameters())

    def step() -> object:
        made.zero_grad()
        value = loss()
        value.backward()
        made.step()
        return model

    return step


def tokens(batch: int, length: int, vocabulary: int, device: str) -> torch.Tensor:
    return torch.randint(0, vocabulary, (batch, length), device=device)
