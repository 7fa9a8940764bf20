"""Kernel calls: what a family of kernels is asked to do, one at a time and as columns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from traincast.utils.arrays import BoolArray, FloatArray, IndexArray, IntArray

COMPUTE_TYPES = (
    "fp32", "tf32", "fp16", "bf16", "fp8", "fp64", "int64", "int32", "int16", "int8", "bool", "fp8_block", "fp4",
)  # fmt: skip
"""What kernels compute in. fp8_block has a scale for every 128 elements, fp4 (NVFP4) one for every 16."""
# tf32 is stored as fp32; the scales of fp4 are bytes
COMPUTE_BYTES = dict(
    zip(COMPUTE_TYPES, (4.0, 4.0, 2.0, 2.0, 1.0, 8.0, 8.0, 4.0, 2.0, 1.0, 1.0, 1.0, 0.5625), strict=True)
)
_COMPUTE_CODE = {name: code for code, name in enumerate(COMPUTE_TYPES)}


@dataclass(frozen=True, slots=True)
class Family:
    """A kernel family: the kinds it knows and the numbers that describe a call, by name and order."""

    name: str
    kinds: tuple[str, ...]
    fields: tuple[str, ...]

    def call(self, kind: str, compute: str = "fp32", /, *, estimated: bool = False, **sizes: float) -> KernelCall:
        """A call of this family; every field must be given, and nothing else."""
        if kind not in self.kinds:
            raise AssertionError(f"kernel family {self.name} has no kind {kind!r}")
        if sizes.keys() != set(self.fields):
            raise AssertionError(f"a {self.name} call needs {', '.join(self.fields)}; got {', '.join(sizes)}")
        return KernelCall(self, kind, compute, tuple(float(sizes[field]) for field in self.fields), estimated)


@dataclass(frozen=True, slots=True)
class KernelCall:
    """One kernel launch. `compute` is the type it computes in; `values` follow `family.fields`.

    `estimated` marks a call that stands in for an op nobody has modelled; `variant` are words that say which of the
    family's implementations runs where sizes do not tell (`costs.kernels.in_step` knows them).
    """

    family: Family
    kind: str
    compute: str
    values: tuple[float, ...]
    estimated: bool = False
    variant: str = ""


@dataclass(frozen=True, slots=True)
class Calls:
    """Many calls of one family as columns: `kind` and `compute` are codes, `values` is float64[n, fields]."""

    family: Family
    kind: IntArray
    compute: IntArray
    values: FloatArray

    def __len__(self) -> int:
        return len(self.kind)

    def __getitem__(self, field: str) -> FloatArray:
        return self.values[:, self.family.fields.index(field)]

    def is_kind(self, *kinds: str) -> BoolArray:
        """Which calls are of one of these kinds."""
        wanted = np.zeros(len(self.family.kinds), dtype=np.bool_)
        wanted[[self.family.kinds.index(kind) for kind in kinds]] = True
        return np.asarray(wanted[self.kind])

    def is_compute(self, *compute: str) -> BoolArray:
        """Which calls compute in one of these types."""
        return np.isin(self.compute, [_COMPUTE_CODE[name] for name in compute])

    def per_compute(self, table: dict[str, float], default: float) -> FloatArray:
        """A value per call, looked up by its compute type."""
        lookup = np.array([table.get(name, default) for name in COMPUTE_TYPES])
        return lookup[self.compute]

    def item_bytes(self) -> FloatArray:
        """Bytes of one element of the compute type."""
        return self.per_compute({name: float(size) for name, size in COMPUTE_BYTES.items()}, 4.0)

    def only_compute(self) -> str:
        """The compute type that all calls share; calls of several are a mistake of the caller's."""
        (code,) = np.unique(self.compute)
        return COMPUTE_TYPES[code]

    def take(self, rows: IndexArray | BoolArray) -> Calls:
        """A selection of the calls."""
        return Calls(self.family, self.kind[rows], self.compute[rows], self.values[rows])

    def computing_in(self, compute: str) -> Calls:
        """The same calls in another compute type."""
        return Calls(self.family, self.kind, np.full_like(self.compute, _COMPUTE_CODE[compute]), self.values)

    @staticmethod
    def of(family: Family, calls: Iterable[KernelCall]) -> Calls:
        """Columns from single calls of one family."""
        calls = list(calls)
        return Calls.from_columns(
            family,
            [call.kind for call in calls],
            [call.compute for call in calls],
            np.array([call.values for call in calls], dtype=np.float64).reshape(len(calls), len(family.fields)),
        )

    @staticmethod
    def from_columns(family: Family, kind: Sequence[str], compute: Sequence[str], values: FloatArray) -> Calls:
        """Columns from names and a value matrix (n x fields)."""
        kinds = {name: code for code, name in enumerate(family.kinds)}
        return Calls(
            family,
            np.array([kinds[name] for name in kind], dtype=np.int64),
            np.array([_COMPUTE_CODE[name] for name in compute], dtype=np.int64),
            values,
        )


@dataclass(frozen=True, slots=True)
class Estimate:
    """Device times of calls: `seconds`, `sigma` (standard deviation of log time, so that a 90 % interval is
    seconds * exp(±1.645 sigma)) and `in_domain` (inside what the model was fitted on).

    How far outside: `factor` is how many times the size that is farthest outside is beyond the fitted ones (1 where
    all are inside, and for kinds and types that were not fitted at any size), `new_gpu` marks calls of a chip that was
    not measured. A model that tells neither leaves both out.
    """

    seconds: FloatArray
    sigma: FloatArray
    in_domain: BoolArray
    factor: FloatArray | None = None
    new_gpu: BoolArray | None = None

    @staticmethod
    def zeros(n: int) -> Estimate:
        """Of n calls, to be filled in: nothing takes time or is in domain."""
        outside = np.zeros(n, dtype=np.bool_)
        return Estimate(np.zeros(n), np.zeros(n), outside, np.ones(n), outside.copy())

    def columns(self) -> tuple[FloatArray, FloatArray, BoolArray, FloatArray, BoolArray]:
        """All columns in their order, those left out filled in."""
        factor = np.ones(len(self.seconds)) if self.factor is None else self.factor
        new_gpu = np.zeros(len(self.seconds), dtype=np.bool_) if self.new_gpu is None else self.new_gpu
        return self.seconds, self.sigma, self.in_domain, factor, new_gpu

    def take(self, rows: IndexArray | BoolArray) -> Estimate:
        """A selection of the calls."""
        seconds, sigma, in_domain, factor, new_gpu = self.columns()
        return Estimate(seconds[rows], sigma[rows], in_domain[rows], factor[rows], new_gpu[rows])

    def put(self, rows: IndexArray | BoolArray, part: Estimate) -> None:
        """Fills these rows of an estimate with all its columns."""
        for mine, other in zip(self.columns(), part.columns(), strict=True):
            mine[rows] = other
