"""A GPU from its data sheet: every field is known, in its unit, and agrees with the others, or is refused by name."""

from __future__ import annotations

from typing import Any

from traincast.errors import TraincastError, unknown
from traincast.platform.device import ADA, AMPERE, BLACKWELL, HOPPER, PASCAL, TURING, VOLTA, Device
from traincast.platform.files import known_fields, number

_DEFAULT_HOST = "server-2022"  # the newest host profile that is shipped
_DEFAULT_KERNEL_GAP_US = 1.5  # between the 0.8 to 2.2 us of the architectures that traces show
# who makes an architecture, and NVIDIA's compute capability; a newer one states both in its sheet
ARCHITECTURES = {
    "maxwell": ("nvidia", 5.2),
    "pascal": ("nvidia", PASCAL),
    "volta": ("nvidia", VOLTA),
    "turing": ("nvidia", TURING),
    "ampere": ("nvidia", AMPERE),
    "ada": ("nvidia", ADA),
    "hopper": ("nvidia", HOPPER),
    "blackwell": ("nvidia", BLACKWELL),
    **dict.fromkeys(("cdna", "cdna2", "cdna3"), ("amd", 0.0)),
}
_VENDORS = ("nvidia", "amd")
_PEAKS = ("fp32", "fp32_matrix", "tf32", "fp16", "bf16", "fp8", "fp64")
# least and most that any GPU has, several times over: outside, a figure is in another unit
_RANGES = {
    "memory_gb": (0.5, 4096.0),
    "dram_bandwidth_gbs": (20.0, 100_000.0),
    "num_sms": (1.0, 4096.0),
    "cores_per_sm": (8.0, 1024.0),
    "boost_clock_mhz": (200.0, 6000.0),
    "sustained_clock_mhz": (100.0, 6000.0),
    "l2_mb": (0.1, 4096.0),
    "smem_kb_per_sm": (8.0, 4096.0),
    "nvlink_gbs": (0.0, 20_000.0),
    "pcie_gen": (1.0, 8.0),
    "kernel_gap_us": (0.01, 100.0),
    "compute_capability": (5.0, 30.0),
}
_TEXTS = ("name", "vendor", "arch", "host", "node", "source", "notes")
_MOST_TFLOPS = 1e5  # ten times the fp4 peak of the largest GPU sold
_DISAGREE = 4.0  # an fp32 peak this far from two flop a core and clock; dual issue is a factor of 2


def device_from(key: str, table: dict[str, Any]) -> Device:
    """The device that a table describes; raises a message that names the field that is wrong."""
    peaks = table.get("peak_tflops")
    if not isinstance(peaks, dict) or "fp32" not in peaks:
        raise TraincastError(f"platform '{key}' lacks [peak_tflops] with an fp32 entry")
    known_fields(key, table, (*_RANGES, *_TEXTS, "peak_tflops"))
    known_fields(key, peaks, _PEAKS)
    boost = _figure(key, table, "boost_clock_mhz")
    arch, vendor, capability = _architecture(key, table)
    device = Device(
        key=key,
        name=str(table.get("name", key)),
        vendor=vendor,
        arch=arch,
        compute_capability=capability,
        memory_bytes=1e9 * _figure(key, table, "memory_gb"),
        dram_bandwidth=1e9 * _figure(key, table, "dram_bandwidth_gbs"),
        num_sms=int(_figure(key, table, "num_sms", integer=True)),
        cores_per_sm=int(_figure(key, table, "cores_per_sm", integer=True)),
        boost_clock_mhz=boost,
        sustained_clock_mhz=_figure(key, table, "sustained_clock_mhz", default=boost),
        peak_flops={name: 1e12 * _peak(key, peaks, name) for name in peaks},
        l2_bytes=1e6 * _figure(key, table, "l2_mb"),
        smem_per_sm_bytes=1e3 * _figure(key, table, "smem_kb_per_sm"),
        nvlink_bandwidth=1e9 * _figure(key, table, "nvlink_gbs"),
        pcie_gen=int(_figure(key, table, "pcie_gen", integer=True)),
        source=str(table.get("source", "user")),
        host=str(table.get("host", _DEFAULT_HOST)),
        node=str(table.get("node", "")),
        kernel_gap=1e-6 * _figure(key, table, "kernel_gap_us", default=_DEFAULT_KERNEL_GAP_US),
    )
    _check_together(key, device)
    return device


def _figure(
    key: str, table: dict[str, Any], field: str, *, integer: bool = False, default: float | None = None
) -> float:
    if default is not None and field not in table:
        return default
    least, most = _RANGES[field]
    value = float(number(key, table, field, integer=integer, zero=least == 0.0))
    if not least <= value <= most:
        raise TraincastError(
            f"platform '{key}': '{field}' is {value:g}, which no GPU has ({least:g} to {most:g}); check its unit"
        )
    return value


def _peak(key: str, peaks: dict[str, Any], name: str) -> float:
    value = float(number(key, peaks, name))
    if value > _MOST_TFLOPS:
        raise TraincastError(f"platform '{key}': peak '{name}' is {value:g} TFLOPS, which no GPU has; check its unit")
    return value


def _architecture(key: str, table: dict[str, Any]) -> tuple[str, str, float]:
    """Architecture, vendor and compute capability. A sheet of an architecture that is not known states the others."""
    arch, known = table.get("arch"), ", ".join(ARCHITECTURES)
    if not isinstance(arch, str):
        raise TraincastError(f"platform '{key}' lacks 'arch'; give the name of one, such as {known}")
    if arch not in ARCHITECTURES and "vendor" not in table:
        remedy = f"Platform '{key}' has one of {known}, or a newer one with its 'vendor' and 'compute_capability'."
        raise unknown("arch", arch, ARCHITECTURES, remedy)
    usual_vendor, usual = ARCHITECTURES.get(arch, (table.get("vendor"), None))
    vendor = table.get("vendor", usual_vendor)
    if vendor not in _VENDORS:
        raise unknown("vendor", str(vendor), _VENDORS, f"Platform '{key}' has one of {', '.join(_VENDORS)}.")
    if vendor != usual_vendor:
        raise TraincastError(f"platform '{key}': 'vendor' is {vendor!r}, but arch '{arch}' is {usual_vendor}'s")
    capability = _figure(key, table, "compute_capability", default=usual) if vendor == "nvidia" else 0.0
    return arch, vendor, capability


def _check_together(key: str, device: Device) -> None:
    """Figures that are plausible alone and impossible together."""
    if device.sustained_clock_mhz > device.boost_clock_mhz:
        raise TraincastError(
            f"platform '{key}': 'sustained_clock_mhz' is {device.sustained_clock_mhz:g}, above 'boost_clock_mhz' "
            f"{device.boost_clock_mhz:g}"
        )
    cores = 2e6 * device.num_sms * device.cores_per_sm * device.boost_clock_mhz
    if not 1 / _DISAGREE < device.peak_flops["fp32"] / cores < _DISAGREE:
        raise TraincastError(
            f"platform '{key}': peak 'fp32' is {device.peak_flops['fp32'] / 1e12:g} TFLOPS, but 'num_sms', "
            f"'cores_per_sm' and 'boost_clock_mhz' make {cores / 1e12:.3g}; check their units"
        )
