#!/usr/bin/env python
"""Puts what the suites give today into README and the pages of evidence.

`python scripts/write_figures.py --data DIR` runs every suite that a page shows, `--only SUITE ...` some of them.

A row of a table is known by its first cell; its other cells follow from the titles of their columns. Columns that no
suite gives (what others score) stay. Read the difference before you keep it: sentences around a table may quote it.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
ROWS: dict[str, dict[str, dict[str, str]]] = {
    "README.md": {
        "dlrm": {"DLRM training steps, V100": "all: step"},
        "cnn": {"CNN training steps, V100 (the worst point is one its source doubts)": "all: step"},
        "transformers": {"Transformer steps, 5 GPUs, fp32, eager and four compiled": "all: step"},
        "multi-gpu": {
            "Steps on several GPUs, PyTorch (DLRM, MLPerf, GPT-2)": "all PyTorch: step",
            "Eight traced V100 ranks of a DLRM, replayed": "replay, each rank",
        },
        "llm": {"Large Transformers, 2 to 11,616 GPUs (the held-out half of 907 steps)": "all: held-out half"},
        "distributed-embeddings": {"NVIDIA distributed-embeddings, 1 to 128 A100": "all: step"},
    },
    "docs/evidence/dlrm.md": {
        "dlrm": {
            **{f"{name} {batch}": f"{name} {batch}" for name in ("DLRM_default", "DLRM_MLPerf", "DLRM_DDP")
               for batch in (512, 1024, 2048, 4096)},
            "step (MAPE of the reference 11.0, kernels only 41.9)": "all: step",
            "device active": "all: device active",
        },
        "multi-gpu": {
            "NVIDIA DeepLearningExamples, PyTorch, from 2021: 1 to 16 V100, 1 A100": "DeepLearningExamples, PyTorch",
            "the same before 2021 (older code)": "DeepLearningExamples, PyTorch before 2021 (older code)",
            "MLPerf DLRM, PyTorch, 8 A100": "MLPerf DLRM, PyTorch",
            "all PyTorch, with GPT-2 on four A100": "all PyTorch: step",
            "TensorFlow 2, predicted as if it were the PyTorch code":
                "DeepLearningExamples, TensorFlow 2 (as if it were the PyTorch code)",
            **{
                f"HugeCTR {model}, {where}: {kind}": f"MLPerf {model}, HugeCTR, {group}: rows {kind}"
                for model, where, group in (
                    ("DLRM", "one NVLink node", "one NVLink node"),
                    ("DLRM", "several nodes", "several nodes"),
                    ("DLRM", "PCIe", "PCIe without NVLink"),
                    ("DCNv2", "one NVLink node", "one NVLink node"),
                    ("DCNv2", "several nodes", "several nodes"),
                )
                for kind in ("looked at", "held back")
            },
        },
        "distributed-embeddings": {"distributed-embeddings, TensorFlow, 1 to 128 A100": "all: step"},
    },
    "docs/evidence/one-gpu.md": {
        "cnn": {
            **{f"{name} {batch}": f"{name} {batch}" for name in ("ResNet50", "Inception-V3") for batch in (16, 32, 64)},
            "all six": "all: step",
        },
        "transformers": {
            "all": "all: step",
            "A100-PCIE-40GB": "NVIDIA A100-PCIE-40GB",
            "P100": "Tesla P100-PCIE-16GB",
            "P4": "Tesla P4",
            "T4": "Tesla T4",
            "V100-PCIE-32GB": "Tesla V100-PCIE-32GB",
        },
    },
    "docs/evidence/many-gpus.md": {
        "multi-gpu": {
            "samples (data parallel)": "gpt2_large dp 4, batch 4",
            "layers, one micro-batch (pipeline)": "gpt2_large pp 4, batch 4",
            "columns and rows of layers (tensor parallel)": "gpt2_large tp 4, batch 4",
        },
        "llm": {
            "held-out half": "all: held-out half",
            "half that constants were fitted on": "all: half that constants were fitted on",
            **{
                f"held out: {what}": f"{source}: held-out half"
                for what, source in {
                    "LLM Foundry MPT": "llm_foundry_mpt",
                    "Megatron-Bridge, dense": "megatron_bridge_perf dense",
                    "Megatron-Bridge, mixtures of experts": "megatron_bridge_perf mixtures",
                    "Megatron-LM CI": "megatron_lm_ci_golden",
                    "MLPerf v3.1 to v5.1": "mlperf_training_v31_v51",
                    "SimuMax on B200": "simumax_b200",
                    "torchtitan, torchao": "torchtitan_torchao",
                    "vTrain, one node": "vtrain_one_node",
                }.items()
            },
            "memory: all": "memory: all",
            "memory: SimuMax on B200": "memory: simumax_b200",
        },
    },
    "docs/evidence/capturing.md": {
        "captured": {
            "all": "all: step",
            "held back at first": "rows held back",
            "BERT-large": "BERT-large",
            "Mask R-CNN": "Mask R-CNN R50-FPN",
            "Transformer-XL": "Transformer-XL base",
            "EfficientNet-B0": "efficientnet-b0",
            "EfficientNet-B0, wide SE": "efficientnet-widese-b0",
            "ResNet-50": "resnet50",
            "ResNeXt-101": "resnext101-32x4d",
            "SE-ResNeXt-101": "se-resnext101-32x4d",
        },
    },
}  # fmt: skip
"""Page, suite, first cell of a row, and the group or case of the suite that it shows."""
CELLS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "n": lambda row: f"{row['n']}",
    "GMAE": lambda row: f"{row['gmae']:.2f}",
    "MAPE": lambda row: f"{row['mape']:.2f}",
    "median": lambda row: f"{row['median']:.2f}",
    "worst": lambda row: f"{row['worst']:+.1f}",
    "bias": lambda row: f"{row['bias']:+.1f}",
    "in 90 %": lambda row: "" if row["covered"] is None else f"{row['covered']:.0f}",
    "half-width": lambda row: "" if row.get("half_width") is None else f"{row['half_width']:.0f}",
    "measured ms": lambda row: f"{row['measured_ms']:.2f}",
    "predicted ms": lambda row: f"{row['predicted_ms']:.2f}",
    "90 % interval": lambda row: "{:.2f} - {:.2f}".format(*row["interval_ms"]),
    "error": lambda row: f"{row['error_percent']:+.1f}",
}
"""Columns that follow from a suite, by their titles: errors in percent, times in milliseconds."""


def page_with_figures(text: str, wanted: Mapping[str, str], result: Mapping[str, Any]) -> str:
    """The page with the figures of one suite in the rows that show it (`wanted`: first cell to group or case)."""
    found = {row["group"]: row for row in result["summary"]} | {row["case"]: row for row in result.get("cases", ())}
    lines, titles = text.split("\n"), [""]
    missing = dict(wanted)
    for at, line in enumerate(lines):
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if at + 1 < len(lines) and re.fullmatch(r"\|(-+\|)+", lines[at + 1]):
            titles = cells
        elif line.startswith("| ") and cells[0] in wanted:
            row = found[wanted[cells[0]]]
            if all(name in row for name in _keys(titles)):
                filled = [
                    CELLS[title](row) if title in CELLS else cell for title, cell in zip(titles, cells, strict=True)
                ]
                lines[at] = re.sub(r"  +", " ", f"| {' | '.join(filled)} |")
                missing.pop(cells[0], None)
    if missing:
        raise SystemExit(f"no row of the page begins with {sorted(missing)}")
    return "\n".join(lines)


def _keys(titles: list[str]) -> tuple[str, ...]:
    """What a row of a suite has to have for a table with these titles."""
    return ("gmae",) if "GMAE" in titles else ("predicted_ms",)


def main() -> None:
    """Runs suites and writes their figures into the pages."""
    from traincast_evaluation.suites.registry import evaluate

    known = sorted({suite for suites in ROWS.values() for suite in suites})
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--only", nargs="+", choices=known, default=known, metavar="SUITE")
    options = parser.parse_args()
    for suite in options.only:
        result = evaluate(suite, options.data).to_dict()
        for page, wanted in [(ROOT / name, suites[suite]) for name, suites in ROWS.items() if suite in suites]:
            page.write_text(page_with_figures(page.read_text(encoding="utf-8"), wanted, result), encoding="utf-8")


if __name__ == "__main__":
    main()
