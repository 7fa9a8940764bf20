"""The built-in platforms as a list, with the figures that predictions use."""

from __future__ import annotations

from typing import Any

from traincast.costs.kernels.evidence import list_measured_families
from traincast.hardware.catalog import list_platform_keys
from traincast.hardware.platform import Platform, load_platform
from traincast.utils.results import Records, ResultList, drop_nested_values


class PlatformList(ResultList[Platform]):
    """Built-in GPUs and nodes."""

    __slots__ = ()

    def to_dict(self) -> list[dict[str, Any]]:
        """One row per platform; keys say their units."""
        return [_make_platform_row(platform) for platform in self]

    def headline(self) -> str:
        """How many there are, and their names."""
        return f"{len(self)} built-in platforms\n" + ", ".join(platform.key for platform in self)

    def select(self, text: str) -> PlatformList:
        """The platforms with a text in their key or in the name of their device, whatever its case."""
        wanted = text.lower()
        return PlatformList([one for one in self if wanted in f"{one.key} {one.device.name}".lower()])

    def records(self) -> Records:
        """Table "platforms": one row per platform, with a column per peak rate (TFLOPS)."""
        peaks = [{f"{name}_tflops": rate for name, rate in row["peak_tflops"].items()} for row in self.to_dict()]
        return {"platforms": [drop_nested_values(row) | peak for row, peak in zip(self.to_dict(), peaks, strict=True)]}


def list_built_in_platforms() -> PlatformList:
    """Every built-in GPU and node."""
    return PlatformList([load_platform(key) for key in list_platform_keys()])


def _make_platform_row(platform: Platform) -> dict[str, Any]:
    device = platform.device
    return {
        "platform": platform.key,
        "device": device.name,
        "arch": device.arch,
        "gpus_per_node": platform.gpus_per_node,
        "memory_gb": device.memory_bytes / 1e9,
        "dram_bandwidth_gbs": device.dram_bandwidth / 1e9,
        "peak_tflops": {name: rate / 1e12 for name, rate in device.peak_flops.items()},
        "num_sms": device.num_sms,
        "boost_clock_mhz": device.boost_clock_mhz,
        "sustained_clock_mhz": device.sustained_clock_mhz,
        "l2_mb": device.l2_bytes / 1e6,
        "source": device.source,
        "measured": list_measured_families(device.key),
    }
