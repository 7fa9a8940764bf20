"""Sizes that depend on batch size and sequence length.

A captured integer (a dimension, a stride, a byte count, a scalar argument) is a polynomial
`c0 + c1*B + c2*S + c3*B*S + c4*S^2 + c5*B*S^2 + c6*B^2` in the batch size B and the sequence length S.
A `SizeTable` holds the distinct polynomials of a program once; everything else refers to them by index.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from traincast.utils.arrays import IntArray
from traincast.utils.errors import TraincastError

MONOMIALS = ("1", "B", "S", "B*S", "S^2", "B*S^2", "B^2")


def compute_monomials(batch: int, seq_len: int) -> list[int]:
    """The monomials at one (batch, sequence length), in the order of `MONOMIALS`."""
    b, s = batch, seq_len
    return [1, b, s, b * s, s * s, b * s * s, b * b]


@dataclass(frozen=True, slots=True)
class SizeTable:
    """Distinct size polynomials: integer coefficients over a common denominator per row.

    `coefficients` is int64[n, 7], `denominator` and `seq_multiple` int64[n]; row i means
    `coefficients[i] @ monomials / denominator[i]`, which must come out whole, with the sequence length first
    rounded up to a multiple of `seq_multiple[i]` (kernels that pad; 1, the default, everywhere else).
    """

    coefficients: IntArray
    denominator: IntArray
    seq_multiple: IntArray = field(default_factory=lambda: np.ones(0, dtype=np.int64))

    def __post_init__(self) -> None:
        if not len(self.seq_multiple):
            object.__setattr__(self, "seq_multiple", np.ones(len(self.denominator), dtype=np.int64))

    def __len__(self) -> int:
        return len(self.denominator)

    def at(self, batch: int, seq_len: int) -> IntArray:
        """Every size at this batch size and sequence length."""
        if np.all(self.seq_multiple == 1):
            raw = _evaluate_polynomials(self.coefficients, batch, seq_len)
        else:
            raw = np.zeros(len(self), dtype=np.int64)
            for multiple in np.unique(self.seq_multiple).tolist():
                rows = self.seq_multiple == multiple
                raw[rows] = _evaluate_polynomials(self.coefficients[rows], batch, round_up_size(seq_len, multiple))
        sizes: IntArray = raw // self.denominator
        if np.any(sizes * self.denominator != raw):
            raise TraincastError(
                f"batch size {batch} with sequence length {seq_len} does not divide evenly in this workload; "
                "choose a multiple of the sizes it was captured at"
            )
        return sizes

    def depends_on_batch(self) -> bool:
        """Whether any size changes with the batch size."""
        return bool(np.any(self.coefficients[:, [1, 3, 5, 6]]))

    def depends_on_seq_len(self) -> bool:
        """Whether any size changes with the sequence length."""
        return bool(np.any(self.coefficients[:, [2, 3, 4, 5]]))

    def batch_step(self, seq_len: int) -> int:
        """The smallest number of whose multiples every batch size gives whole sizes, at this sequence length."""
        step = 1
        for row in np.flatnonzero(self.denominator > 1).tolist():
            length = round_up_size(seq_len, int(self.seq_multiple[row]))
            c, below = [int(value) for value in self.coefficients[row]], int(self.denominator[row])
            by_batch = c[1] + c[3] * length + c[5] * length * length
            if (c[0] + c[2] * length + c[4] * length * length) % below == 0 and c[6] % below == 0:
                step = math.lcm(step, below // math.gcd(by_batch, below))
        return step

    @staticmethod
    def constant(values: IntArray) -> SizeTable:
        """A table of plain numbers: nothing depends on batch or sequence length."""
        coefficients = np.zeros((len(values), len(MONOMIALS)), dtype=np.int64)
        coefficients[:, 0] = values
        return SizeTable(coefficients, np.ones(len(values), dtype=np.int64))


def round_up_size(size: int, multiple: int) -> int:
    """The size, or the next multiple above it."""
    return -(-size // multiple) * multiple


def _evaluate_polynomials(coefficients: IntArray, batch: int, seq_len: int) -> IntArray:
    terms = compute_monomials(batch, seq_len)
    # A constant (slices end at 2^63 - 1) cannot overflow; a sum of growing terms can.
    growing = np.any(coefficients[:, 1:], axis=1)
    reach = np.abs(coefficients[growing].astype(np.float64)) @ np.array(terms, dtype=np.float64)
    if reach.max(initial=0.0) > 2.0**62:
        raise TraincastError(
            f"batch size {batch} with sequence length {seq_len} gives sizes beyond 64 bits; choose smaller ones"
        )
    used = np.any(coefficients, axis=0)
    values: IntArray = coefficients @ np.where(used, np.array(terms, dtype=object), 0).astype(np.int64)
    return values
