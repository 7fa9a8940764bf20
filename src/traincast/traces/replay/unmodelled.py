"""Kernels that nobody modelled, on another device: what a kernel takes there that takes as long on the traced one.

What such a kernel computed is not known, but what it ran against is told by what the trace shows: its family and the
type it computed in (its name), how many elements it had (its grid, of element-wise ones), and how long it took. A
kernel of known work with the same family and type is made as large as takes as long on the traced device, and priced on
the other one. So what both devices are known for (rates, caches, the least time of a kernel) is in it. Blocks of
products were tried too and told nothing more: libraries divide them anew on every device.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import msgspec
import numpy as np

from traincast.costs.kernels.call import Calls
from traincast.costs.kernels.cost import price_calls
from traincast.costs.kernels.gemm import GEMM
from traincast.costs.kernels.streaming import ELEMENTWISE
from traincast.hardware.device import Device
from traincast.traces.classify import OTHER
from traincast.traces.link import Linked
from traincast.utils.arrays import FloatArray, IntArray

_BOUND_BY_ARITHMETIC = frozenset({"gemm", "conv", "attention"})
_SIZES = np.exp2(np.arange(4.0, 33.0, 0.5))  # of the kernels compared with: elements of streams
# sides of matrices, which libraries load whole: multiples of eight
_SIDES = tuple(int(2**power * part) for power in range(4, 16) for part in (1.0, 1.25, 1.5, 1.75) if power > 4)
_LOG_SIZES = np.log(_SIZES)
SIGMA = {"arithmetic": 0.30, "memory": 0.22, "other": 0.45}
"""Log-sigma of a kernel's time carried to another device, by what bounds its family: see docs/evidence/traces.md."""
_OTHER_VENDOR = 0.25  # on top where libraries and compilers differ too: another vendor's
# the first that matches counts
_COMPUTE = (
    ("fp8", r"e4m3|e5m2|fp8|f8f"),
    ("tf32", r"tf32|s1688(?!16)|xf32"),
    ("bf16", r"bf16|bfloat"),
    ("fp16", r"fp16|f16|h884|h1688|hgemm|hmma|half|s884|s16816|HHS|_HB_|_B_H"),
    ("fp64", r"dgemm|f64|double"),
    ("int8", r"int8|i8|s8_"),
    ("fp32", r"sgemm|scudnn|ffma|simt|f32|float|_SB_|SGEMM"),
)  # fmt: skip
_TENSILE = re.compile(
    r"Cijk_[A-Z]+_[A-Z]+_(F8|B8|I8|[SHBDX])", re.IGNORECASE
)  # AMD's products: type of A, then of others
_TENSILE_TYPES = {
    "S": "fp32", "X": "tf32", "H": "fp16", "B": "bf16", "D": "fp64", "F8": "fp8", "B8": "fp8", "I8": "int8",
}  # fmt: skip
_TYPES = tuple((compute, re.compile(pattern, re.IGNORECASE)) for compute, pattern in _COMPUTE)


@cache
def find_compute_type(name: str) -> str:
    """The type that a kernel multiplies in, from its name; half precision, which most do, where that does not say."""
    tensile = _TENSILE.match(name)
    if tensile:
        return _TENSILE_TYPES[tensile[1].upper()]
    return next((compute for compute, pattern in _TYPES if pattern.search(name)), "fp16")


@dataclass(frozen=True, eq=False, slots=True)
class Carried:
    """Kernels on another device: seconds, and log-sigma of that."""

    seconds: FloatArray
    sigma: FloatArray


@dataclass(frozen=True, eq=False, slots=True)
class Grids:
    """Blocks of every kernel, and threads of a block; 0 where that was not recorded."""

    blocks: FloatArray
    threads: FloatArray


def read_grids(linked: Linked, rows: IntArray) -> Grids:
    """What was recorded of these kernels' grids."""
    numbers, place = np.unique(linked.events["details"][rows], return_inverse=True)
    found = np.array([_read_grid(linked.trace.details[number]) for number in numbers.tolist()], dtype=np.float64)
    counts = found.reshape(-1, 2)[place.reshape(-1)]
    return Grids(counts[:, 0], counts[:, 1])


def _read_grid(details: bytes) -> tuple[float, float]:
    try:
        document = msgspec.json.decode(details or b"{}")
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return 0.0, 0.0
    return (_count(document.get("grid")), _count(document.get("block"))) if isinstance(document, dict) else (0.0, 0.0)


def _count(sizes: Any) -> float:
    sound = isinstance(sizes, list) and bool(sizes) and all(isinstance(n, int) and 0 < n < 1 << 31 for n in sizes)
    return float(np.prod([float(n) for n in sizes])) if sound else 0.0


def carry_kernels(
    seconds: FloatArray, families: Sequence[str], names: Sequence[str], grids: Grids, source: Device, target: Device
) -> Carried:
    """Kernels measured on `source` as they would take on `target`."""
    if source.key == target.key or not len(seconds):
        return Carried(seconds.copy(), np.zeros(len(seconds)))
    curves = _Curves(source, target)
    # AMD's tools count threads where they say blocks, for some kernels
    threads = grids.blocks * grids.threads * (source.vendor == "nvidia")
    carried, sigma = seconds.copy(), np.zeros(len(seconds))
    for i, (family, name) in enumerate(zip(families, names, strict=True)):
        bound = "arithmetic" if family in _BOUND_BY_ARITHMETIC else "other" if family == OTHER else "memory"
        elements = _count_elements(name, float(threads[i]))
        found = [
            curves.carry_product(float(seconds[i]), find_compute_type(name)) if kind == "arithmetic"
            else curves.carry_stream(float(seconds[i]), elements)
            for kind in (("arithmetic", "memory") if bound == "other" else (bound,))
        ]  # fmt: skip
        carried[i] = float(np.exp(np.mean(np.log(found))))
        sigma[i] = SIGMA[bound]
    if source.vendor != target.vendor:
        sigma = np.hypot(sigma, _OTHER_VENDOR)
    return Carried(carried, sigma)


def _count_elements(name: str, threads: float) -> float:
    """Elements of an element-wise kernel, whose threads take four each; 0 for others and where it is not known."""
    return 4.0 * threads if "elementwise_kernel" in name else 0.0


class _Curves:
    """Times of kernels of growing size on two devices, by what bounds them."""

    def __init__(self, source: Device, target: Device) -> None:
        self.source, self.target = source, target
        self._made: dict[tuple[str, str], tuple[FloatArray, FloatArray]] = {}

    def carry_product(self, seconds: float, compute: str) -> float:
        """Seconds on the target of a product that takes `seconds` on the source."""
        here, there = self._find_times("product", compute)
        return _read_across(seconds, here, there)

    def carry_stream(self, seconds: float, elements: float) -> float:
        """Likewise of a kernel that streams memory, of so many elements (0: not known)."""
        here, there = self._find_times("stream", "")
        if elements:  # what as many elements take on both
            at = np.log(elements)
            return seconds * float(np.exp(np.interp(at, _LOG_SIZES, there) - np.interp(at, _LOG_SIZES, here)))
        return _read_across(seconds, here, there)

    def _find_times(self, kind: str, compute: str) -> tuple[FloatArray, FloatArray]:
        """Logarithms of seconds on source and target, by size."""
        key = kind, compute
        if key not in self._made:
            calls = _make_products(compute) if kind == "product" else _make_streams()
            here, there = (price_calls(calls, device)[0].seconds for device in (self.source, self.target))
            self._made[key] = np.log(np.maximum.accumulate(here)), np.log(np.maximum.accumulate(there))
        return self._made[key]


def _read_across(seconds: float, here: FloatArray, there: FloatArray) -> float:
    at = float(np.log(max(seconds, 1e-9)))
    inside = min(max(at, float(here[0])), float(here[-1]))
    return float(np.exp(np.interp(inside, here, there) + at - inside))


def _make_products(compute: str) -> Calls:
    """Products of square matrices of growing size."""
    return Calls.of(GEMM, [
        GEMM.call("mm", compute, batch=1, m=size, n=size, k=size, trans_a=0, trans_b=0, bias=0)
        for size in _SIDES
    ])  # fmt: skip


def _make_streams() -> Calls:
    """Sums of two tensors of growing size."""
    return Calls.of(ELEMENTWISE, [
        ELEMENTWISE.call("add", "fp32", elements=size, bytes_read=8 * size, bytes_written=4 * size, tensors=3)
        for size in _SIZES.tolist()
    ])  # fmt: skip
