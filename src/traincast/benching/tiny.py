"""Tiny steps: so small that what they take is the host's time, of which a profile needs the price per event."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from traincast.benching.device import Device
from traincast.benching.timing import Reference, run_series, summarise
from traincast.calibration.cpu_ops import cpu_ops
from traincast.calibration.samples import Sample
from traincast.calibration.step import host_events
from traincast.capturing.step import capture_step

Step = Callable[[], object]
_OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD, "adam": torch.optim.AdamW, "adagrad": torch.optim.Adagrad,
}  # fmt: skip
_WIDTH = 16
_SMALLEST_BATCH = 4
_REPEATS = 25


@dataclass(frozen=True, slots=True)
class TinyStep:
    """A step of `layers` linear layers and activations, `views` reshapes, `tables` embedding bags and `norms` layer
    norms, with an optimizer ("" for a forward pass alone); gradients are dropped or zeroed."""

    layers: int
    views: int
    tables: int
    norms: int
    optimizer: str
    zeroed: bool

    @property
    def key(self) -> str:
        """A name that is the same in every run."""
        return f"tiny-{self.layers}-{self.views}-{self.tables}-{self.norms}-{self.optimizer or 'none'}-{self.zeroed}"

    def make(self, batch_size: int) -> Step:
        """Model, optimizer and inputs; the callable runs one iteration."""
        linear = nn.ModuleList(nn.Linear(_WIDTH, _WIDTH) for _ in range(self.layers))
        norms = nn.ModuleList(nn.LayerNorm(_WIDTH) for _ in range(self.norms))
        bags = nn.ModuleList(nn.EmbeddingBag(50, _WIDTH, mode="sum", sparse=True) for _ in range(self.tables))
        data = torch.ones(batch_size, _WIDTH)
        indices = torch.arange(2 * batch_size)
        offsets = torch.arange(0, 2 * batch_size, 2)

        def forward() -> torch.Tensor:
            x = data
            for layer in linear:
                x = torch.relu(layer(x))
            for norm in norms:
                x = norm(x)
            for _ in range(self.views):
                x = x.view(-1).view(batch_size, _WIDTH)
            for bag in bags:
                x = x + bag(indices, offsets)
            return x.sum()

        if not self.optimizer:
            return torch.no_grad()(forward)
        parameters = [*linear.parameters(), *norms.parameters(), *bags.parameters()]
        optimizer = _OPTIMIZERS[self.optimizer](parameters, lr=0.01)

        def step() -> None:
            optimizer.zero_grad(set_to_none=not self.zeroed)
            forward().backward()  # type: ignore[no-untyped-call]
            optimizer.step()

        return step


def tiny_steps(seed: int = 0, number: int = 24) -> Iterator[TinyStep]:
    """Steps that differ in how often each event of the host occurs."""
    random = np.random.default_rng((seed, 7))
    for _ in range(number):
        optimizer = str(random.choice(["", "sgd", "sgd", "adam", "adagrad"]))
        tables = int(random.integers(0, 9)) if optimizer in ("sgd", "") else 0
        yield TinyStep(
            layers=int(random.integers(1, 12)), views=int(random.integers(0, 20)), tables=tables,
            norms=int(random.integers(0, 8)), optimizer=optimizer, zeroed=bool(random.random() < 0.5),
        )  # fmt: skip


def measure_tiny(device: Device, reference: Reference, tiny: TinyStep) -> Sample:
    """Runs the step here, and captures it for what its host and its kernels do."""
    program = capture_step(
        tiny.make, batch_size=_SMALLEST_BATCH, name=tiny.key, rebatch=False, runs_on="cpu",
        mode="training" if tiny.optimizer else "inference",
    ).programs[0]  # fmt: skip
    step = tiny.make(_SMALLEST_BATCH)
    for _ in range(5):
        step()
    series = run_series(device, reference, step, repeats=_REPEATS)
    figures = summarise(series, "busy"), summarise(series, "wall")
    return Sample(
        signature=None, between=0, access="", wall=figures[1].corrected, busy=figures[0].corrected,
        reference_wall=figures[1].reference, reference_busy=figures[0].reference, spread=figures[0].spread,
        events=tuple(host_events(program).tolist()),
        ops=tuple(signature for op in program.ops for signature in cpu_ops(op.signature)),
    )  # fmt: skip
