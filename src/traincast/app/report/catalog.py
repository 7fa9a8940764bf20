"""The lists of what is built in, as tables: models, how their ops are lowered, platforms."""

from __future__ import annotations

from traincast.simulator.scenario.models import CoverageList, ModelList
from traincast.simulator.scenario.platforms import PlatformList
from traincast.utils.display.text import format_count, format_table


def format_models(models: ModelList) -> str:
    """One line per model, by group."""
    header = ("model", "parameters", "batch", "tokens", "what it is")
    rows = [
        (
            row["model"], format_count(row["parameters"]), str(row["batch_size"] or "-"), str(row["seq_len"] or "-"),
            row["description"],
        )
        for row in models.to_dict()
    ]  # fmt: skip
    first, rule, *lines = format_table(header, rows, right=(1, 2, 3)).splitlines()
    shown, group = [first, rule], ""
    for model, line in zip(models, lines, strict=True):
        shown += ["", model.group] if model.group != group else []
        group = model.group
        shown.append(line)
    return "\n".join(shown)


def format_coverage(ops: CoverageList) -> str:
    """One line per model and op."""
    rows = [
        (model, op.name, str(op.count), str(op.launches), "yes" if op.lowered else "estimated") for model, op in ops
    ]
    return format_table(("model", "op", "count", "kernels", "lowered"), rows, right=(2, 3))


def format_platforms(platforms: PlatformList) -> str:
    """One line per platform; the last column says what was measured on its GPU."""
    header = ("platform", "device", "GPUs", "memory GB", "DRAM GB/s", "fp32 TFLOPS", "bf16 TFLOPS", "measured")
    rows = [
        (
            row["platform"],
            row["device"],
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
