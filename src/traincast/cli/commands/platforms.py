"""The built-in GPUs and nodes, with the figures predictions use.

Your own GPU is a TOML file of the same form (docs/how-it-works/platform.md): 'traincast predict ... --on my-gpu.toml'.
"""

from __future__ import annotations

import argparse
from typing import Any

from traincast.cli.output import print_json, print_text
from traincast.display.text import table
from traincast.platform.catalog import platform_keys
from traincast.platform.platform import Platform, load_platform


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """No arguments of its own."""


def run(args: argparse.Namespace) -> int:
    """Lists the platforms."""
    rows = [_row(load_platform(key)) for key in platform_keys()]
    if args.json:
        print_json(rows)
    else:
        header = (
            "platform",
            "device",
            "GPUs",
            "memory GB",
            "DRAM GB/s",
            "fp32 TFLOPS",
            "bf16 TFLOPS",
            "SM MHz",
        )
        print_text(table(header, [_cells(row) for row in rows], right=(2, 3, 4, 5, 6, 7)))
    return 0


def _row(platform: Platform) -> dict[str, Any]:
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
    }


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    peaks = row["peak_tflops"]
    return (
        row["platform"],
        row["device"],
        str(row["gpus_per_node"]),
        f"{row['memory_gb']:.0f}",
        f"{row['dram_bandwidth_gbs']:,.0f}",
        f"{peaks['fp32']:.1f}",
        f"{peaks['bf16']:,.0f}" if "bf16" in peaks else "-",
        f"{row['boost_clock_mhz']:.0f}",
    )
