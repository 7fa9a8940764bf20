"""The few numbers of a step that no kernel or link measurement tells: shared by all models, GPUs and layouts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from importlib.resources import files
from typing import Any

from traincast.utils.files.reading import parse_toml

HALF, NARROW = "16", "8"
"""Bits of the operands of matrix products, as `sustained` names them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Constants:
    """Numbers that steps share.

    `sustained`: how much longer matrix products ("16" and "8" bits) and attention take in long steps, at the clock that
    the board's power allows and in the library of the day, than alone in a benchmark; by architecture. `grouped`: how
    much longer grouped products of experts take than a batched product of the same sizes (`grouped_narrow`: in eight
    bits); `batched`: how much longer those of attention that is written out take. `triton`, `flash2`: shares of the
    rate of A100-style matrix instructions that Triton's first and the second flash attention reach, which know no newer
    ones. `rowwise`: how much longer 8-bit products with a scale for every row take than with one for the tensor.
    `untuned`: how much longer products take on AMD's chips where PyTorch picks their kernels than where a submission
    tuned them. `ring`: how much longer attention takes in PyTorch's ring, which merges parts in fp32, than in one
    kernel.

    `async_tp`: the share of tensor-parallel exchanges that PyTorch's products in parts hide, net of what parts lose.
    `beside`: the share of the time of an exchange by which kernels beside it take longer. `module_us`: microseconds
    that the Python of a framework's modules adds to the host time of each kernel it launches. `exchange_us`:
    microseconds of the host per exchange. `meeting_us`: microseconds that a device stands still around an exchange that
    nothing runs beside; `routing_us`: while the counts of tokens of experts reach the host, once a layer.
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
    async_tp: float
    beside: float
    meeting_us: float
    routing_us: float
    module_us: float
    exchange_us: float

    def named(self) -> dict[str, float]:
        """Every number by its name, those of `sustained` by theirs."""
        plain = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "sustained"}
        return {**self.sustained, **plain}


def constants_of(numbers: Mapping[str, float]) -> Constants:
    """Numbers by name as `Constants.named` gives them."""
    names = {field.name for field in fields(Constants)}
    plain = {name: value for name, value in numbers.items() if name in names}
    return Constants(sustained={name: value for name, value in numbers.items() if name not in names}, **plain)


@cache
def shipped_tables() -> dict[str, dict[str, Any]]:
    """The file that is shipped: numbers that were fitted on steps, those that kernels tell, and where both are from."""
    text = (files("traincast.simulator.parallelism") / "data" / "constants.toml").read_text(encoding="utf-8")
    return parse_toml(text, "constants.toml")


SHARED = constants_of(shipped_tables()["fitted"] | shipped_tables()["measured"])
