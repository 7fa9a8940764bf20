"""The lists of what is built in, as tables: models, how their ops are lowered, platforms."""

from __future__ import annotations

from traincast.simulator.scenario.catalog import CoverageList, ModelList, PlatformList
from traincast.utils.display.text import format_count, format_table


def format_models(models: ModelList) -> str:
    """One line per model, by group."""
    header = ("model", "parameters", "batch", "tokens", "what it is")
    rows: list[tuple[str, ...]] = []
    for model, row in zip(models, models.to_dict(), strict=True):
        rows += [(model.group,)] if (model.group,) not in rows else []
        size = str(row["batch_size"] or "-"), str(row["seq_len"] or "-")
        rows.append((row["model"], format_count(row["parameters"]), *size, row["description"]))
    return format_table(header, rows, right=(1, 2, 3))


def format_coverage(ops: CoverageList) -> str:
    """One line per model and op."""
    rows = [
        (model, op.name, str(op.count), str(op.launches), "yes" if op.lowered else "estimated") for model, op in ops
    ]
    return format_table(("model", "op", "count", "kernels", "lowered"), rows, right=(2, 3))


def format_platforms(platforms: PlatformList) -> str:
    """One line per platform; the last column says what was measured on its GPU."""
    header = ("platform", "device", "GPUs", "GB", "GB/s", "TFLOPS fp32", "TFLOPS bf16", "measured")
    rows = [
        (
            row["platform"],
            row["device"].removeprefix("NVIDIA "),
            str(row["gpus_per_node"]),
            f"{row['memory_gb']:.0f}",
            f"{row['dram_bandwidth_gbs']:,.0f}",
            f"{row['peak_tflops']['fp32']:.1f}",
            f"{row['peak_tflops']['bf16']:,.0f}" if "bf16" in row["peak_tflops"] else "-",
            ", ".join(row["measured"]) or "data sheet only",
        )
        for row in platforms.to_dict()
    ]
    return format_table(header, rows, right=(2, 3, 4, 5, 6))
