"""Sizes that depend on batch size and sequence length, and signatures whose integers are indices into a `SizeTable`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from typing import TypeAlias

import numpy as np

from traincast.ir.ops import Scalar, Signature, TensorSpec
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


_POWERS = ((0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2), (2, 0))
"""Exponents of batch size and sequence length in `MONOMIALS`."""


class SizeBook:
    """The sizes of a program and those that are added to them; all are indices, as in symbolic signatures."""

    def __init__(self, table: SizeTable) -> None:
        self._table = table
        self._new: dict[tuple[tuple[int, ...], int, int], int] = {}
        self._keys: list[tuple[tuple[int, ...], int, int]] = []  # of `_new`, in order

    def constant(self, value: int) -> int:
        """A plain number."""
        known = self._constants.get(value)
        return self._add((value, *(len(MONOMIALS) - 1) * [0]), 1, 1) if known is None else known

    @cached_property
    def _constants(self) -> dict[int, int]:
        """The sizes of the program that are plain numbers."""
        table = self._table
        plain = ~np.any(table.coefficients[:, 1:], axis=1) & (table.denominator == 1)
        indices = np.flatnonzero(plain)
        return dict(zip(table.coefficients[indices, 0].tolist(), indices.tolist(), strict=True))

    def total(self, terms: Sequence[int], *, times: int = 1, plus: int = 0) -> int:
        """The sum of sizes, multiplied by an integer, plus another."""
        rows = [self._row(term) for term in terms]
        multiples = {multiple for *_, multiple in rows}
        if len(multiples) > 1:
            raise TraincastError("its sizes round sequences up differently and cannot be added")
        below = math.lcm(*(denominator for _, denominator, _ in rows))
        sums = sum(times * coefficients * (below // denominator) for coefficients, denominator, _ in rows)
        assert not isinstance(sums, int)
        sums[0] += plus * below
        return self._add(tuple(sums.tolist()), below, multiples.pop())

    def product(self, factors: Sequence[int], *, times: int = 1) -> int:
        """The product of sizes and an integer."""
        powers: dict[tuple[int, int], int] = {(0, 0): times}
        below, multiples = 1, {1}
        for factor in factors:
            coefficients, denominator, multiple = self._row(factor)
            below *= denominator
            multiples.add(multiple)
            terms = [(power, int(c)) for power, c in zip(_POWERS, coefficients.tolist(), strict=True) if c]
            grown: dict[tuple[int, int], int] = {}
            for (b, s), value in powers.items():
                for (more_b, more_s), c in terms:
                    key = (b + more_b, s + more_s)
                    grown[key] = grown.get(key, 0) + value * c
            powers = grown
        if len(multiples) > 2 or not set(powers) <= set(_POWERS):
            raise TraincastError("a size of the edited step grows faster than workloads can say; capture it instead")
        common = math.gcd(below, *powers.values()) or 1
        row = tuple(powers.get(power, 0) // common for power in _POWERS)
        return self._add(row, below // common, max(multiples))

    def share(self, size: int, parts: int) -> int:
        """One of this many equal parts of a size."""
        coefficients, below, multiple = self._row(size)
        common = math.gcd(below * parts, *coefficients.tolist()) or 1
        return self._add(tuple((coefficients // common).tolist()), below * parts // common, multiple)

    def scaled(self, size: int, factor: Fraction) -> int:
        """A size, this many times as large."""
        return self.share(self.total([size], times=factor.numerator), factor.denominator)

    def at(self, size: int, batch: int, seq_len: int) -> int:
        """A size as a plain number."""
        coefficients, below, multiple = self._row(size)
        powers = compute_monomials(batch, round_up_size(seq_len, multiple))
        return sum(int(c) * power for c, power in zip(coefficients.tolist(), powers, strict=True)) // below

    def table(self) -> SizeTable:
        """The sizes of the program with the new ones behind them."""
        if not self._new:
            return self._table
        new = self._keys
        return SizeTable(
            np.concatenate([self._table.coefficients, np.array([key[0] for key in new], dtype=np.int64)]),
            np.concatenate([self._table.denominator, np.array([key[1] for key in new], dtype=np.int64)]),
            np.concatenate([self._table.seq_multiple, np.array([key[2] for key in new], dtype=np.int64)]),
        )

    def _row(self, index: int) -> tuple[IntArray, int, int]:
        old = len(self._table)
        if index < old:
            table = self._table
            return table.coefficients[index], int(table.denominator[index]), int(table.seq_multiple[index])
        coefficients, below, multiple = self._keys[index - old]
        return np.array(coefficients, dtype=np.int64), below, multiple

    def _add(self, coefficients: tuple[int, ...], below: int, multiple: int) -> int:
        key = (coefficients, below, multiple)
        if key not in self._new:
            self._new[key] = len(self._table) + len(self._new)
            self._keys.append(key)
        return self._new[key]


class SizeRef(int):
    """An index into a `SizeTable`, standing for an integer scalar argument.

    It equals no plain number: `alpha=1.0` and an alpha that is size number 1 are different arguments.
    """

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SizeRef) and int(self) == int(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(("SizeRef", int(self)))


Number: TypeAlias = Callable[[int], int]


def replace_sizes_by_indices(
    signature: Signature, index: Number, known: dict[TensorSpec, TensorSpec] | None = None
) -> Signature:
    """A plain signature with `index` of every dimension, stride and integer argument in its place, in that order.

    `known` keeps what forms of tensors became, for an `index` that gives the same number for the same size.
    """

    def mapped(spec: TensorSpec) -> TensorSpec:
        if known is None:
            return _map_spec(spec, index)
        found = known.get(spec)
        if found is None:
            found = known[spec] = _map_spec(spec, index)
        return found

    return Signature(
        name=signature.name,
        inputs=tuple([mapped(spec) for spec in signature.inputs]),
        outputs=tuple([mapped(spec) for spec in signature.outputs]),
        scalars=tuple([(name, _index_value(value, index)) for name, value in signature.scalars]),
        groups=signature.groups,
        overload=signature.overload,
    )


def replace_indices_by_sizes(signatures: Sequence[Signature], sizes: Sequence[int]) -> tuple[Signature, ...]:
    """Signatures with indices, each looked up in `sizes`.

    Each tensor form is looked up once: fused optimizers pass hundreds of tensors of a few forms.
    """
    size = sizes.__getitem__
    forms = {id(spec): spec for s in signatures for spec in (*s.inputs, *s.outputs)}
    known: dict[TensorSpec, TensorSpec] = {}
    plain = {key: known.get(spec) or known.setdefault(spec, _map_spec(spec, size)) for key, spec in forms.items()}
    return tuple(
        [
            Signature(
                name=s.name,
                inputs=tuple([plain[id(spec)] for spec in s.inputs]),
                outputs=tuple([plain[id(spec)] for spec in s.outputs]),
                scalars=tuple([(name, _resolve_value(value, size)) for name, value in s.scalars]),
                groups=s.groups,
                overload=s.overload,
            )
            for s in signatures
        ]
    )


def list_size_indices(signature: Signature) -> list[int]:
    """The indices of a signature with indices: where these sizes are equal, so are the plain signatures."""
    used = [size for spec in (*signature.inputs, *signature.outputs) for size in (*spec.shape, *spec.stride)]
    values = [value for _, value in signature.scalars]
    while values:
        value = values.pop()
        if isinstance(value, tuple):
            values.extend(value)
        elif isinstance(value, SizeRef):
            used.append(value)
    return used


def separate_forms_and_sizes(signatures: Sequence[Signature]) -> tuple[tuple[Signature, tuple[int, ...]], ...]:
    """Plain signatures with every size set to index zero, each with the sizes that were taken out, in order.

    Each tensor form is taken apart once, as in `with_plain_sizes`.
    """
    specs = {id(spec): spec for s in signatures for spec in (*s.inputs, *s.outputs)}
    empty = {key: _map_spec(spec, lambda _: 0) for key, spec in specs.items()}
    sizes = {key: (*spec.shape, *spec.stride) for key, spec in specs.items()}
    apart = []
    for s in signatures:
        taken = [size for spec in (*s.inputs, *s.outputs) for size in sizes[id(spec)]]

        def take(size: int, taken: list[int] = taken) -> int:
            taken.append(size)
            return 0

        form = Signature(
            name=s.name,
            inputs=tuple([empty[id(spec)] for spec in s.inputs]),
            outputs=tuple([empty[id(spec)] for spec in s.outputs]),
            scalars=tuple([(name, _index_value(value, take)) for name, value in s.scalars]),
            groups=s.groups,
            overload=s.overload,
        )
        apart.append((form, tuple(taken)))
    return tuple(apart)


def _map_spec(spec: TensorSpec, number: Number) -> TensorSpec:
    return TensorSpec(
        tuple([number(size) for size in spec.shape]),
        tuple([number(size) for size in spec.stride]),
        spec.dtype,
        spec.device,
    )


def _index_value(value: Scalar, index: Number) -> Scalar:
    if isinstance(value, tuple):
        return tuple([_index_value(item, index) for item in value])
    return SizeRef(index(value)) if type(value) is int else value


def _resolve_value(value: Scalar, size: Number) -> Scalar:
    if isinstance(value, tuple):
        if set(map(type, value)) == {SizeRef}:  # sizes to and from a thousand ranks
            return tuple(map(size, value))  # type: ignore[arg-type]
        return tuple([_resolve_value(item, size) for item in value])
    return size(value) if isinstance(value, SizeRef) else value
