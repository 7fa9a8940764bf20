"""What a training step adds to kernels, host ops and collectives that were measured alone: a few shared numbers.

Benchmarks run one kernel in a loop on a cool board. In a step the board is at its power limit, frameworks choose the
kernels, Python runs between launches, and ranks wait for each other. The numbers are the same for all models, GPUs of
an architecture and layouts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from importlib.resources import files
from typing import Any

from traincast.utils.files.reading import parse_toml

HALF, NARROW = "16", "8"
"""Bits of the operands of GEMMs, as `sustained` names them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InStep:
    """Numbers that steps share.

    Kernels (`costs.kernels.in_step` applies them):
    `sustained`: how much longer GEMMs ("16" and "8" bits) and attention take at the clock that the board's power allows
    and in the library of the day than alone in a benchmark; by architecture. `grouped`: how much longer grouped GEMMs
    of experts take than a batched GEMM of the same sizes (`grouped_narrow`: in eight bits). `batched`: how much longer
    the batched GEMMs of Megatron's unfused attention take. `triton`, `flash2`: shares of the rate of A100-style matrix
    instructions that Triton's first and the second flash attention reach; they use no newer ones. `rowwise`: how much
    longer 8-bit GEMMs with a scale per row take than with one per tensor. `untuned`: how much longer GEMMs take on
    AMD's chips where PyTorch picks their kernels than where a submission tuned them. `ring`: how much longer attention
    takes in PyTorch's ring, which merges parts in fp32, than in one kernel. `narrow_loads`: how much longer kernels
    take that go through elements and load 16-bit values one by one (PyTorch before 1.5).

    Host (`costs.host.profile` applies it): `module_us`: microseconds of Python per module call; `routing_us`: those
    of one call in a mixture's token dispatcher, where token counts reach the host and decide sizes.

    Communication (`simulator.parallelism` applies them): `beside`: the share of a collective's time by which kernels
    that overlap with it take longer. `stall_us`: microseconds that a device idles around a collective that nothing
    overlaps with: hosts do not launch it together (one CUDA graph does).
    """

    sustained: dict[str, float]
    grouped: float
    grouped_narrow: float
    batched: float
    triton: float
    flash2: float
    rowwise: float
    untuned: float
    ring: float
    narrow_loads: float
    beside: float
    stall_us: float
    routing_us: float
    module_us: float

    def by_name(self) -> dict[str, float]:
        """Every number by its name, those of `sustained` by theirs."""
        plain = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "sustained"}
        return {**self.sustained, **plain}


def make_in_step(numbers: Mapping[str, float]) -> InStep:
    """Numbers by name as `InStep.by_name` gives them."""
    names = {field.name for field in fields(InStep)}
    plain = {name: value for name, value in numbers.items() if name in names}
    return InStep(sustained={name: value for name, value in numbers.items() if name not in names}, **plain)


@cache
def load_shipped_tables() -> dict[str, dict[str, Any]]:
    """The shipped file: numbers that were fitted on steps, those that kernels tell, and where both are from."""
    text = (files("traincast.costs") / "data" / "in_step.toml").read_text(encoding="utf-8")
    return parse_toml(text, "in_step.toml")


def _list_shipped_numbers() -> dict[str, float]:
    """All by name; what was measured nowhere has the number of what it is `carried` from."""
    tables = load_shipped_tables()
    known: dict[str, float] = tables["fitted"] | tables["measured"]
    return known | {name: known[source] for name, source in tables["carried"].items()}


SHIPPED = make_in_step(_list_shipped_numbers())
