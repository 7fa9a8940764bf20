"""Kernels that nobody modelled, carried from the device that a trace was recorded on to another.

What such a kernel computed is not known, but what it ran against is told by what the trace shows: its family and the
type it computed in (its name), how many elements it had (its grid, of element-wise ones), and how long it took. A
kernel of known work with the same family and type is made as large as takes as long on the traced device, and priced on
the other one. So what both devices are known for (rates, caches, the least time of a kernel) is in it. Blocks of
products were tried too and told nothing more: libraries divide them anew on every device.

Whether the inputs of a kernel lay in the L2 is told by its duration where its number of elements is known and the
traced device's L2 could hold them. Else both may be: the mean is taken, and its interval is as much wider.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import msgspec
import numpy as np

from traincast.costs.kernels.contract import Calls
from traincast.costs.kernels.cost import price_calls
from traincast.costs.kernels.gemm import GEMM
from traincast.costs.kernels.streaming import ELEMENTWISE
from traincast.hardware.device import Device
from traincast.traces.classify import BARE_TRITON, OTHER
from traincast.traces.link import Linked
from traincast.utils.arrays import BoolArray, FloatArray, IntArray

BOUND_BY_ARITHMETIC = frozenset({"gemm", "conv", "attention"})
"""Families whose kernels mostly multiply; nearly all others stream memory."""
_SIZES = np.exp2(np.arange(4.0, 33.0, 0.5))  # of the kernels compared with: elements of streams
# sides of matrices, which libraries load whole: multiples of eight
_SIDES = tuple(int(2**power * part) for power in range(4, 16) for part in (1.0, 1.25, 1.5, 1.75) if power > 4)
_LOG_SIZES = np.log(_SIZES)
_TOLD = 0.3  # logarithm of how much longer a kernel takes without its inputs in the L2, from which on it tells
SIGMA = {"arithmetic": 0.30, "memory": 0.22, "other": 0.45}
"""Log-sigma of a kernel's time carried to another device, by what bounds its family: see docs/evidence/traces.md."""
# threads of a block -> elements, of the two configurations that Inductor tries for point-wise kernels, and the blocks
# up to which it makes these smaller
_POINTWISE, _MOST_SMALL = {128.0: 1024.0, 256.0: 512.0}, 128.0
_USUAL_EACH = 4.0
PER_THREAD = re.compile(r"(?<![a-z_])elementwise_kernel<\d+, (\d+)")
"""Elements of a thread of PyTorch's element-wise kernels that do not load vectors."""
_TILES = 16384.0  # bytes of shared memory of a block; reductions use up to 4 KiB
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
    """Blocks of every kernel, threads of a block, and bytes of shared memory; 0 where that was not recorded."""

    blocks: FloatArray
    threads: FloatArray
    shared: FloatArray

    def take(self, places: IntArray | BoolArray) -> Grids:
        """Those of these kernels."""
        return Grids(self.blocks[places], self.threads[places], self.shared[places])


def read_grids(linked: Linked, rows: IntArray) -> Grids:
    """What was recorded of these kernels' grids."""
    numbers, place = np.unique(linked.events["details"][rows], return_inverse=True)
    found = np.array([_read_grid(linked.trace.details[number]) for number in numbers.tolist()], dtype=np.float64)
    counts = found.reshape(-1, 3)[place.reshape(-1)]
    return Grids(counts[:, 0], counts[:, 1], counts[:, 2])


def _read_grid(details: bytes) -> tuple[float, float, float]:
    try:
        document = msgspec.json.decode(details or b"{}")
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return 0.0, 0.0, 0.0
    if not isinstance(document, dict):
        return 0.0, 0.0, 0.0
    return _count(document.get("grid")), _count(document.get("block")), _count([document.get("shared")])


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
    # AMD's tools count threads where they say blocks, for some kernels: then it is no more than that
    exact = source.vendor == "nvidia"
    carried, sigma = seconds.copy(), np.zeros(len(seconds))
    for i, (family, name) in enumerate(zip(families, names, strict=True)):
        bound = _find_bound(family, name, float(grids.shared[i]))
        elements = count_elements(name, float(grids.blocks[i]), float(grids.threads[i]))
        found = [
            curves.carry_product(float(seconds[i]), find_compute_type(name)) if kind == "arithmetic"
            else curves.carry_stream(float(seconds[i]), elements, exact=exact)
            for kind in (("arithmetic", "memory") if bound == "other" else (bound,))
        ]  # fmt: skip
        carried[i] = float(np.exp(np.mean([middle for middle, _ in found])))
        sigma[i] = np.hypot(SIGMA[bound], max(apart for _, apart in found))
    if source.vendor != target.vendor:
        sigma = np.hypot(sigma, _OTHER_VENDOR)
    return Carried(carried, sigma)


def _find_bound(family: str, name: str, shared: float) -> str:
    """What bounds a kernel: "arithmetic", "memory", or "other" where nobody knows. Of Triton's that are only numbered
    those that multiply matrices keep tiles of both in shared memory."""
    if family == OTHER and BARE_TRITON.match(name):
        return "arithmetic" if shared >= _TILES else "memory"
    return "arithmetic" if family in BOUND_BY_ARITHMETIC else "other" if family == OTHER else "memory"


def count_elements(name: str, blocks: float, threads: float) -> float:
    """Elements of an element-wise kernel, whose threads take as many as its name says (four, where it does not), or as
    many as Inductor gives to the blocks of its point-wise ones; 0 for others and where it is not known."""
    if name.startswith("triton_poi_"):
        return blocks * _POINTWISE.get(threads, 0.0) if blocks > _MOST_SMALL else 0.0
    if "elementwise_kernel" not in name:
        return 0.0
    each = PER_THREAD.search(name)
    return (float(each[1]) if each else _USUAL_EACH) * blocks * threads


class _Curves:
    """Times of kernels of growing size on two devices, by what bounds them."""

    def __init__(self, source: Device, target: Device) -> None:
        self._devices = source, target
        self._products: dict[str, tuple[FloatArray, FloatArray]] = {}
        self._streams: tuple[tuple[FloatArray, FloatArray], ...] = ()

    def carry_product(self, seconds: float, compute: str) -> tuple[float, float]:
        """Logarithm of the seconds on the target of a product that takes `seconds` on the source, and log-sigma of what
        is not known of it."""
        here, there = self._find_products(compute)
        return _read_across(seconds, here, there), 0.0

    def carry_stream(self, seconds: float, elements: float, *, exact: bool) -> tuple[float, float]:
        """Likewise of a kernel that streams memory, of so many elements or, unless `exact`, at most as many (0: not
        known)."""
        here, there = self._find_streams()
        at = float(np.log(max(elements, 1.0)))
        if not elements or not exact:
            found = [_read_across(seconds, a, b) for a, b in zip(here, there, strict=True)]
            if elements:
                found = [min(one, float(np.interp(at, _LOG_SIZES, b))) for one, b in zip(found, there, strict=True)]
            return float(np.mean(found)), 0.5 * abs(found[1] - found[0])
        cached, loaded = (float(np.interp(at, _LOG_SIZES, curve)) for curve in here)
        near, far = (float(np.interp(at, _LOG_SIZES, curve)) for curve in there)
        measured = float(np.log(max(seconds, 1e-9)))
        if loaded - cached > _TOLD:  # its duration tells how much was in the L2
            share = min(max((measured - cached) / (loaded - cached), 0.0), 1.0)
            return measured + (1 - share) * (near - cached) + share * (far - loaded), 0.0
        found = [measured + near - cached, measured + far - loaded]
        return float(np.mean(found)), 0.5 * abs(found[1] - found[0])

    def _find_products(self, compute: str) -> tuple[FloatArray, FloatArray]:
        """Logarithms of seconds of products on source and target, by size."""
        if compute not in self._products:
            here, there = (price_calls(_make_products(compute), device)[0].seconds for device in self._devices)
            self._products[compute] = np.log(np.maximum.accumulate(here)), np.log(np.maximum.accumulate(there))
        return self._products[compute]

    def _find_streams(self) -> tuple[tuple[FloatArray, FloatArray], ...]:
        """Likewise of streams on source and target: as small ones that find their inputs in the L2, and as if all came
        from memory."""
        if not self._streams:
            self._streams = tuple(map(_price_streams, self._devices))
        return self._streams


def _price_streams(device: Device) -> tuple[FloatArray, FloatArray]:
    seconds = np.maximum.accumulate(price_calls(_make_streams(), device)[0].seconds)
    each = (seconds[-1] - seconds[-2]) / (_SIZES[-1] - _SIZES[-2])
    return np.log(seconds), np.log(np.maximum(seconds, seconds[0] + each * _SIZES))


def _read_across(seconds: float, here: FloatArray, there: FloatArray) -> float:
    at = float(np.log(max(seconds, 1e-9)))
    inside = min(max(at, float(here[0])), float(here[-1]))
    return float(np.interp(inside, here, there)) + at - inside


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
