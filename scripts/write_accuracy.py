"""The page of every evaluated case, from the measurements: `python scripts/write_accuracy.py --data DIR`.

It prints the page. `scripts/site_hooks.py` puts it into the site where TRAINCAST_DATA names the measurements.
"""

from __future__ import annotations

from pathlib import Path

from data_option import run_on_data
from traincast_evaluation.report import format_cases, format_summary
from traincast_evaluation.suites.registry import evaluate

INTRODUCTION = """# Every case

Written by `scripts/write_accuracy.py` from the suites of `traincast evaluate`. Errors are percent of the measured
value: n, GMAE (geometric mean of absolute errors), MAPE, median, worst with its sign, and bias (signed mean). No
measured point of these tables was used to fit a parameter, unless a row says so. Some constants and model forms were
chosen with some of them in view; the pages of [evidence](index.md) say which.
"""

NOTES = {
    "dlrm": """\
V100 with its SM clock locked at 1297 MHz. `reference` is the signed error of the study's own model, which
took its host overheads from these very runs; ours come from other tables
([host overheads](host-overheads.md)). Device active time was measured under a profiler and the step without
one. Host time is too long for the two models with eight layers, +5 to +20 % where the step is bound by its
host: the same overheads serve all models, and the two, which run the same ops, differ by 10 % as measured
([why](host-overheads.md#mlperf-at-batch-512)).""",
    "cnn": """\
V100 at 1297 MHz; cuDNN ran in deterministic mode in that study, which rules out some of its algorithms. Its
clock stops before gradients are zeroed; so does ours here. The Inception-v3 point at
batch 64 does not fit the other two; the data's own notes suspect a slip.""",
    "transformers": """\
fp32, eager unless the case says compiled ([one GPU](one-gpu.md)). `train` is forward and backward without
optimizer. P100 ran about 10 % slower inside the models than in the GEMM measurements of the same card, T4 and
P4 vary with their temperature. NeuSight's and the roofline's predictions are those in the published file (no
figures for Switch at 2048 tokens).""",
    "multi-gpu": """\
Every row from its published configuration; [DLRM](dlrm.md#several-gpus) says which programs stand behind them and what
was corrected after their errors had been seen. `replay` simulates the eight traced ranks of a DLRM together.""",
    "distributed-embeddings": """\
TensorFlow with Horovod on DGX A100, Adagrad, from published table specifications ([DLRM](dlrm.md#several-gpus)).""",
    "captured": """\
Programs in the style of NVIDIA's DeepLearningExamples, captured when the suite runs (needs torch). Rows marked as held
back took no part while programs were first changed; [capturing](capturing.md) says which were corrected later, and
which rows are worst and why.""",
}
TABLES = ("kernels", "collectives", "embedding-access", "llm")
"""Suites without a list of cases, which speak for themselves."""


def page_text(folder: Path) -> str:
    """The page, from the measurements in a folder. Runs every suite: some minutes."""
    parts = [INTRODUCTION]
    for suite, note in NOTES.items():
        result = evaluate(suite, folder)
        table = f"{format_cases(result.outcomes)}\n\n{format_summary(result.summary)}"
        parts.append(f"## `evaluate {suite}`\n\n{note}\n\n```\n{table}\n```\n")
    for suite in TABLES:
        parts.append(f"## `evaluate {suite}`\n\n```\n{format_summary(evaluate(suite, folder).summary)}\n```\n")
    return "\n".join(parts)


def main(folder: Path) -> None:
    """Prints the page."""
    print(page_text(folder))


if __name__ == "__main__":
    run_on_data(main, __doc__)
