"""The lists of what is built in, as tables: models, how their ops are lowered, platforms."""

from __future__ import annotations

from traincast.simulator.scenario.models import CoverageList, ModelList
from traincast.simulator.scenario.platforms import PlatformList
from traincast.utils.display.text import format_count, format_table


def format_models(models: ModelList) -> str:
    """One line per model."""
    rows = [
        (
            row["model"],
            format_count(row["parameters"]),
            str(row["batch_size"]),
            str(row["seq_len"] or "-"),
            str(row["ops"]),
            str(row["kernels"]),
            row["description"],
        )
        for row in models.to_dict()
    ]
    header = ("model", "parameters", "batch", "tokens", "ops", "kernels", "what it is")
    return format_table(header, rows, right=(1, 2, 3, 4, 5))


def format_coverage(ops: CoverageList) -> str:
    """One line per model and op."""
    rows = [
        (model, op.name, str(op.count), str(op.launches), "yes" if op.lowered else "estimated") for model, op in ops
    ]
    return format_table(("model", "op", "count", "kernels", "lowered"), rows, right=(2, 3))


def format_platforms(platforms: PlatformList) -> str:
    """One line per platform."""
    header = ("platform", "device", "GPUs", "memory GB", "DRAM GB/s", "fp32 TFLOPS", "bf16 TFLOPS", "SM MHz")
    rows = [
        (
            row["platform"],
            row["device"],
            str(row["gpus_per_node"]),
            f"{row['memory_gb']:.0f}",
            f"{row['dram_bandwidth_gbs']:,.0f}",
            f"{row['peak_tflops']['fp32']:.1f}",
            f"{row['peak_tflops']['bf16']:,.0f}" if "bf16" in row["peak_tflops"] else "-",
            f"{row['boost_clock_mhz']:.0f}",
        )
        for row in platforms.to_dict()
    ]
    return format_table(header, rows, right=(2, 3, 4, 5, 6, 7))
