"""A GPU from its data sheet: every field is known, in its unit, and agrees with the others, or is rejected by name."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from traincast.hardware.device import ADA, AMPERE, BLACKWELL, HOPPER, PASCAL, TURING, VOLTA, Device
from traincast.utils.errors import TraincastError, make_unknown_error, shorten_value
from traincast.utils.files.reading import format_path, parse_toml, parse_yaml, read_text

USER_FILES = (".toml", ".yaml", ".yml")
_MAX_FILE_BYTES = 1 << 20  # a limit against damaged files; real ones have a few hundred bytes
_LARGEST = 1e18  # a limit against damaged files: no figure of a sheet comes near


def read_table(path: Traversable) -> dict[str, Any]:
    """The table in a TOML or YAML file."""
    where = f"platform file '{format_path(path.name)}'"
    on_disk = isinstance(path, Path)  # else a file of ours inside a zipped package
    text = read_text(str(path), most=_MAX_FILE_BYTES) if on_disk else path.read_text(encoding="utf-8")
    if path.name.endswith(".toml"):
        return parse_toml(text, where)
    table = parse_yaml(text, where)
    if not isinstance(table, dict):
        raise TraincastError(f"{where} must be a table of 'key: value' lines")
    return table


def read_positive_number(
    key: str, table: dict[str, Any], field: str, *, integer: bool = False, zero: bool = False
) -> Any:
    """A positive number of the table (`zero` also admits 0), or an error that names it."""
    value = table.get(field)
    if isinstance(value, bool) or not isinstance(value, int | float) or not (value > 0 or (zero and value == 0)):
        raise TraincastError(f"platform '{key}' needs a positive number for '{field}', not {shorten_value(value)}")
    if value > _LARGEST or (integer and int(value) != value):
        kind = "an integer" if integer and value <= _LARGEST else "a finite number"
        raise TraincastError(f"platform '{key}' needs {kind} for '{field}', not {shorten_value(value)}")
    return int(value) if integer else float(value)


def read_number_in_range(
    key: str,
    table: dict[str, Any],
    field: str,
    ranges: Mapping[str, tuple[float, float]],
    owner: str,
    *,
    integer: bool = False,
    default: float | None = None,
) -> float:
    """A number of the table within the least and most that any `owner` (GPU, node) has: beyond, its unit is wrong."""
    if default is not None and field not in table:
        return default
    least, most = ranges[field]
    value = float(read_positive_number(key, table, field, integer=integer, zero=least == 0.0))
    if not least <= value <= most:
        raise TraincastError(
            f"platform '{key}': '{field}' is {value:g}, which no {owner} has ({least:g} to {most:g}); check its unit"
        )
    return value


def check_known_fields(key: str, table: dict[str, Any], known: Collection[str]) -> None:
    """Rejects a field that nothing reads: it is misspelt, or its effect is only imagined."""
    for field in table:
        if field not in known:
            raise make_unknown_error("field", str(field), known, f"Platform '{key}' may have {', '.join(known)}.")


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
    **dict.fromkeys(("cdna", "cdna2", "cdna3", "cdna4"), ("amd", 0.0)),
}
_VENDORS = ("nvidia", "amd")
_PEAKS = ("fp32", "fp32_matrix", "tf32", "fp16", "bf16", "fp8", "fp4", "fp64")
_FP16_ACCUMULATION = "fp16_accumulate_fp16"  # advertised for graphics cards; PyTorch's kernels accumulate in fp32
# least and most that any GPU has, several times over: outside, a figure is in another unit
_RANGES = {
    "memory_gb": (0.5, 4096.0),
    "dram_bandwidth_gbs": (20.0, 100_000.0),
    "num_sms": (1.0, 4096.0),
    "cores_per_sm": (8.0, 1024.0),
    "boost_clock_mhz": (200.0, 6000.0),
    "sustained_clock_mhz": (100.0, 6000.0),
    "loaded_clock_mhz": (100.0, 6000.0),
    "l2_mb": (0.1, 4096.0),
    "smem_kb_per_sm": (8.0, 4096.0),
    "nvlink_gbs": (0.0, 20_000.0),
    "pcie_gen": (1.0, 8.0),
    "host_link_gbs": (1.0, 2000.0),
    "kernel_gap_us": (0.01, 100.0),
    "compute_capability": (5.0, 30.0),
    "power_limit_watts": (5.0, 10_000.0),
}
_TEXTS = ("name", "vendor", "arch", "host", "node", "source", "notes")
_FLAGS = ("inline_ecc",)
_MOST_TFLOPS = 1e5  # ten times the fp4 peak of the largest GPU sold
_DISAGREE = 4.0  # an fp32 peak this far from two flop per core and clock; dual issue is a factor of 2

# least and most of a peak for one flop/s of fp32, twice what any GPU has: matrix units are 1 (L40) to 60 (B200, fp8)
# times as fast (fp4: 190 on GB300), fp64 is 1/64 (graphics) to 2 (MI250); a type done by plain cores far slower is
# better left out
_PEAK_RATIOS = {
    "fp32_matrix": (0.5, 16.0),
    "tf32": (0.5, 32.0),
    "fp16": (0.5, 64.0),
    "bf16": (0.5, 64.0),
    "fp8": (0.5, 128.0),
    "fp4": (0.5, 400.0),
    "fp64": (1 / 128, 4.0),
}


def make_device(key: str, table: dict[str, Any]) -> Device:
    """The device that a table describes; raises a message that names the field that is wrong."""
    peaks = table.get("peak_tflops")
    if not isinstance(peaks, dict) or "fp32" not in peaks:
        raise TraincastError(f"platform '{key}' lacks [peak_tflops] with an fp32 entry")
    check_known_fields(key, table, (*_RANGES, *_TEXTS, *_FLAGS, "also_named", "peak_tflops"))
    check_known_fields(key, peaks, (*_PEAKS, _FP16_ACCUMULATION))
    boost = _read_number(key, table, "boost_clock_mhz")
    arch, vendor, capability = _read_architecture(key, table)
    device = Device(
        key=key,
        name=str(table.get("name", key)),
        vendor=vendor,
        arch=arch,
        compute_capability=capability,
        memory_bytes=1e9 * _read_number(key, table, "memory_gb"),
        dram_bandwidth=1e9 * _read_number(key, table, "dram_bandwidth_gbs"),
        num_sms=int(_read_number(key, table, "num_sms", integer=True)),
        cores_per_sm=int(_read_number(key, table, "cores_per_sm", integer=True)),
        boost_clock_mhz=boost,
        sustained_clock_mhz=_read_number(key, table, "sustained_clock_mhz", default=boost),
        peak_flops={name: 1e12 * _read_peak(key, peaks, name) for name in peaks if name != _FP16_ACCUMULATION},
        l2_bytes=1e6 * _read_number(key, table, "l2_mb"),
        smem_per_sm_bytes=1e3 * _read_number(key, table, "smem_kb_per_sm"),
        nvlink_bandwidth=1e9 * _read_number(key, table, "nvlink_gbs", default=0.0),
        pcie_gen=int(_read_number(key, table, "pcie_gen", integer=True)),
        host_link_bandwidth=1e9 * (_read_optional_number(key, table, "host_link_gbs") or 0.0),
        source=str(table.get("source", "user")),
        host=str(table.get("host", _DEFAULT_HOST)),
        node=str(table.get("node", "")),
        kernel_gap=1e-6 * _read_number(key, table, "kernel_gap_us", default=_DEFAULT_KERNEL_GAP_US),
        loaded_clock_mhz=_read_optional_number(key, table, "loaded_clock_mhz"),
        power_limit_watts=_read_optional_number(key, table, "power_limit_watts"),
        inline_ecc=_read_flag(key, table, "inline_ecc"),
        fp16_accumulation_flops=_read_fp16_accumulation(key, peaks),
    )
    _check_together(key, device)
    return device


def _read_number(
    key: str, table: dict[str, Any], field: str, *, integer: bool = False, default: float | None = None
) -> float:
    return read_number_in_range(key, table, field, _RANGES, "GPU", integer=integer, default=default)


def _read_optional_number(key: str, table: dict[str, Any], field: str) -> float | None:
    return _read_number(key, table, field) if field in table else None


def _read_flag(key: str, table: dict[str, Any], field: str) -> bool:
    value = table.get(field, False)
    if not isinstance(value, bool):
        raise TraincastError(f"platform '{key}': '{field}' is {value!r}; give true or false")
    return value


def _read_peak(key: str, peaks: dict[str, Any], name: str) -> float:
    value = float(read_positive_number(key, peaks, name))
    if value > _MOST_TFLOPS:
        raise TraincastError(f"platform '{key}': peak '{name}' is {value:g} TFLOPS, which no GPU has; check its unit")
    return value


def _read_fp16_accumulation(key: str, peaks: dict[str, Any]) -> float | None:
    """Flop/s of fp16 that accumulates in fp16, where the sheet has it; "fp16" is the rate with fp32."""
    if _FP16_ACCUMULATION not in peaks:
        return None
    plain = _read_peak(key, peaks, "fp16") if "fp16" in peaks else 0.0
    fast = _read_peak(key, peaks, _FP16_ACCUMULATION)
    if not plain <= fast <= 4 * plain:
        raise TraincastError(
            f"platform '{key}': '{_FP16_ACCUMULATION}' is {fast:g} and 'fp16' {plain:g} TFLOPS; 'fp16' "
            "accumulates in fp32, at the same rate or half of it"
        )
    return 1e12 * fast


def _read_architecture(key: str, table: dict[str, Any]) -> tuple[str, str, float]:
    """Architecture, vendor and compute capability. A sheet of an architecture that is not known states the others."""
    arch, known = table.get("arch"), ", ".join(ARCHITECTURES)
    if not isinstance(arch, str):
        raise TraincastError(f"platform '{key}' lacks 'arch'; give the name of one, such as {known}")
    if arch not in ARCHITECTURES and "vendor" not in table:
        remedy = f"Platform '{key}' has one of {known}, or a newer one with its 'vendor' and 'compute_capability'."
        raise make_unknown_error("arch", arch, ARCHITECTURES, remedy)
    usual_vendor, usual = ARCHITECTURES.get(arch, (table.get("vendor"), None))
    vendor = table.get("vendor", usual_vendor)
    if vendor not in _VENDORS:
        raise make_unknown_error("vendor", str(vendor), _VENDORS, f"Platform '{key}' has one of {', '.join(_VENDORS)}.")
    if vendor != usual_vendor:
        raise TraincastError(f"platform '{key}': 'vendor' is {vendor!r}, but arch '{arch}' is {usual_vendor}'s")
    capability = _read_number(key, table, "compute_capability", default=usual) if vendor == "nvidia" else 0.0
    return arch, vendor, capability


def _check_together(key: str, device: Device) -> None:
    """Figures that are plausible alone and impossible together."""
    clocks = {"sustained_clock_mhz": device.sustained_clock_mhz, "loaded_clock_mhz": device.loaded_clock_mhz or 0.0}
    for field, clock in clocks.items():
        if clock > device.boost_clock_mhz:
            raise TraincastError(
                f"platform '{key}': '{field}' is {clock:g}, above 'boost_clock_mhz' {device.boost_clock_mhz:g}"
            )
    cores = 2e6 * device.num_sms * device.cores_per_sm * device.boost_clock_mhz
    if not 1 / _DISAGREE < device.peak_flops["fp32"] / cores < _DISAGREE:
        raise TraincastError(
            f"platform '{key}': peak 'fp32' is {device.peak_flops['fp32'] / 1e12:g} TFLOPS, but 'num_sms', "
            f"'cores_per_sm' and 'boost_clock_mhz' make {cores / 1e12:.3g}; check their units"
        )
    _check_peaks(key, device)


def _check_peaks(key: str, device: Device) -> None:
    """Peaks in another unit than fp32's: alone they may be those of some GPU."""
    plain = device.peak_flops["fp32"]
    half, brain = (device.peak_flops.get(name, plain) for name in ("fp16", "bf16"))
    if device.vendor == "nvidia" and half > 1.5 * brain > 1.5 * plain:
        raise TraincastError(
            f"platform '{key}': peak 'fp16' is {half / 1e12:g}, far above 'bf16': it accumulates in fp16, which "
            f"PyTorch does not; give the rate with fp32 accumulation, and this one as '{_FP16_ACCUMULATION}'"
        )
    for name, (least, most) in _PEAK_RATIOS.items():
        ratio = device.peak_flops.get(name, plain * least) / plain
        if not least <= ratio * (1 + 1e-9) <= most:
            raise TraincastError(
                f"platform '{key}': peak '{name}' is {ratio * plain / 1e12:g} TFLOPS, {ratio:.3g} times that of fp32 "
                f"({least:.3g} to {most:g} are known); give peaks in TFLOPS, and leave out a type without units"
            )
