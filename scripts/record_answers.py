"""Records what a few hundred commands answer, to see what a change of the code does to them.

    python scripts/record_answers.py before.json           # on the old code
    python scripts/record_answers.py after.json            # on the new code
    python scripts/record_answers.py --compare before.json after.json

A result is the exit code and everything on stdout (JSON where the command has it). Traces and evaluation suites are
asked for where the public measurements are present ($TRAINCAST_DATA or ../shared/data). `--only WORD` keeps the
commands that contain a word. Commands run in this process, one after another.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import os
import sys
import tempfile
from pathlib import Path

SCALABLE = ("bert-large", "gpt2-large", "resnet50", "vgg13", "transformer")
DLRMS = ("dlrm-default", "dlrm-mlperf", "dlrm-ddp", "dlrm-v2")
NODES = ("dgx-a100", "dgx-h100", "dgx1-v100", "pcie-l40s")
TABLE_SETS = ("mlperf-dlrm", "mlperf-dlrm-v2")
SUITES = ("dlrm", "cnn", "transformers", "multi-gpu", "distributed-embeddings", "collectives", "kernels")

DLRM_YAML = """\
bottom_mlp: [13, 256, 64]
top_mlp: [512, 256, 1]
batch_size: 1024
embedding_dim: 64
rows_per_table: [100000, 2000000, 5000]
lookups_per_table: [10, 1, 4]
access: [uniform, "zipf:1.05", uniform]
"""
TABLES_YAML = """\
tables:
  - {name: clicks, rows: 4000000, dim: 64, pooling: 20}
  - {name: items, rows: 9000000, dim: 128, pooling: 5}
  - {name: small, rows: 2000, dim: 32, pooling: 1}
  - {name: wide, rows: 100000, dim: 256, pooling: 12}
"""


def commands(data: Path | None, scratch: Path) -> list[list[str]]:
    """Every command that is recorded, in order."""
    from traincast.hardware.platform import list_platform_keys
    from traincast.models.catalog import list_models

    models = [info.name for info in list_models()]
    asked: list[list[str]] = [["models"], ["models", "--coverage"], ["platforms"]]
    asked += [["predict", model, "--on", "a100-80gb"] for model in models]
    asked += [
        ["predict", model, "--on", key] for model in ("dlrm-default", "bert-large") for key in list_platform_keys()
    ]
    asked += [
        ["predict", model, "--on", key, "--mode", mode]
        for model, key, mode in itertools.product(models, ("v100", "h100"), ("training", "inference"))
    ]
    asked += [
        ["predict", model, "--on", "h100", "--dtype", dtype]
        for model, dtype in itertools.product(models, ("tf32", "fp16", "bf16"))
    ]
    asked += [
        ["predict", model, "--on", "v100", "--optimizer", optimizer, "--batch-size", "640"]
        for model, optimizer in itertools.product(DLRMS, ("none", "sgd", "adagrad", "adam"))
    ]
    asked += [
        ["predict", model, "--on", "a100-40gb", "--embedding", kind, "--batch-size", "512"]
        for model, kind in itertools.product(DLRMS, ("batched", "bag", "fbgemm"))
    ]
    asked += [
        ["predict", model, "--on", "h100", "--attention", "sdpa", "--dtype", "bf16", "--seq-len", "256"]
        for model in ("bert-large", "gpt2-large", "opt-1.3b")
    ]
    asked += [
        ["predict", model, "--on", "a100-80gb", "--mode", "inference", "--compiled"]
        for model in ("bert-large", "gpt2-large", "resnet50", "dlrm-default")
    ]
    asked += [
        ["predict", model, "--on", node, "--gpus", str(gpus)]
        for model, node, gpus in itertools.product((*DLRMS, *SCALABLE[:3]), NODES, (1, 4, 8, 16))
    ]
    asked += [["predict", model, "--on", "dgx-a100", "--gpus", "1,2,8"] for model in (*DLRMS, *SCALABLE)]
    asked += [
        ["predict", model, "--on", "dgx-a100", "--gpus", "2,4", "--scaling", "strong", "--batch-size", "4096"]
        for model in DLRMS
    ]
    asked += [
        ["predict", model, "--on", "dgx-h100", "--gpus", "8", "--dtype", "bf16", "--optimizer", "adagrad"]
        for model in DLRMS
    ]
    asked += [
        ["predict", "dlrm-mlperf", "--on", "v100", "--batch-size", "2048", "--clock-mhz", "1297"],
        ["predict", "dlrm-default", "--on", "dgx-a100", "--gpus", "8", "--skew-ms", "1", "--jitter", "0.02"],
        ["predict", "gpt2-large", "--on", "dgx-a100", "--gpus", "8", "--skew-ms", "2", "--seed", "3"],
        ["predict", "dlrm-default", "--on", "v100", "--host", "server-2022"],
    ]
    dlrm, tables = scratch / "mine.yaml", scratch / "tables.yaml"
    dlrm.write_text(DLRM_YAML, encoding="utf-8")
    tables.write_text(TABLES_YAML, encoding="utf-8")
    asked += [["predict", str(dlrm), "--on", "a100-40gb", "--batch-size", str(size)] for size in (256, 4096)]
    asked += [["predict", str(dlrm), "--on", "dgx-a100", "--gpus", "4"]]
    asked += [
        ["shard", tables_of, "--on", node, "--gpus", gpus, "--no-torchrec", "--batch-size", "1024"]
        for tables_of, node, gpus in itertools.product((str(tables), *TABLE_SETS), NODES[:3], ("2", "8"))
    ]
    asked += [
        ["export", model, "-o", str(scratch / f"{model}.{to}"), "--to", to]
        for model, to in itertools.product(("dlrm-default", "resnet50"), ("pytorch", "chakra"))
    ]
    asked += _mistakes(scratch)
    if data is not None:
        asked += _measured(data, scratch)
    return [[*command, "--json"] for command in asked]


def _mistakes(scratch: Path) -> list[list[str]]:
    return [
        ["predict", "no-such-model", "--on", "v100"],
        ["predict", "dlrm-default", "--on", "v1000"],
        ["predict", "dlrm-default", "--on", "v100", "--batch-size", "0"],
        ["predict", "resnet50", "--on", "v100", "--seq-len", "4"],
        ["predict", str(scratch / "absent.tc"), "--on", "v100"],
        ["predict", "dlrm-default", "--on", "here"],
        ["shard", "no-such-tables", "--on", "dgx-a100", "--gpus", "8"],
        ["predict", "bert-large", "--on", "dgx-a100", "--gpus", "2,3", "--scaling", "strong", "--batch-size", "5"],
    ]


def _measured(data: Path, scratch: Path) -> list[list[str]]:
    traces = data / "traces"
    runs = [
        ("kineto_resnet50_v100/num_workers_0.json.gz", "v100"),
        ("kineto_resnet50_v100/num_workers_4.json.gz", "a100-40gb"),
        ("hta_critical_path/alexnet.json.gz", "v100"),
        ("hta_recsys_a100_rank3of8/kineto_rank3.json.gz", "a100-40gb"),
        ("hta_cuda_graph_a100/kineto_rank0of16.json.gz", "a100-80gb"),
        ("tracelens_h100/qwen_0.5b.json.gz", "h100"),
        ("tracelens_h100/bert_small.json.gz", "t4"),
        ("triosim_vgg13_h100", "h100"),
        ("param_dlrm_8xv100", "dgx1-v100"),
    ]
    asked = [["trace", str(traces / name)] for name, _ in runs]
    asked += [["trace", str(traces / name), "--on", key] for name, key in runs]
    name, key = runs[-1]
    asked += [
        ["trace", str(traces / name), "--on", key, "--host", "platform", "--twice", "host", "--twice", "gemm"],
        ["trace", str(traces / name), "--workload-out", str(scratch / "traced.tc")],
        ["predict", str(scratch / "traced.tc"), "--on", "dgx-a100"],
    ]
    return asked + [["evaluate", suite, "--data", str(data)] for suite in SUITES]


def answer(command: list[str]) -> dict[str, object]:
    """What one command answers."""
    from traincast.app.cli.main import main

    stdout, stderr = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
        try:
            code: object = main(command)
        except SystemExit as stop:
            code = stop.code
    return {"code": code, "stdout": stdout.getvalue(), "stderr": stderr.getvalue()}


def record(out: Path, only: str) -> int:
    """Runs the commands and writes their results."""
    given = Path(os.environ.get("TRAINCAST_DATA", Path(__file__).resolve().parents[2] / "shared" / "data"))
    data = given if given.is_dir() else None
    answers = {}
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        for command in commands(data, scratch):
            shown = " ".join(command).replace(folder, "SCRATCH").replace(str(given), "DATA")
            if only in shown:
                text = json.dumps(answer(command)).replace(folder, "SCRATCH").replace(str(given), "DATA")
                answers[shown] = json.loads(text)
    out.write_text(json.dumps(answers, indent=1), encoding="utf-8")
    print(f"{out}: {len(answers)} answers")
    return 0


def compare(before: Path, after: Path) -> int:
    """Prints what differs; 1 when anything does."""
    old, new = (json.loads(path.read_text(encoding="utf-8")) for path in (before, after))
    different = 0
    for command in new:
        if command not in old:
            print(f"only in {after}: {command}")
            different += 1
        elif old[command] != new[command]:
            different += 1
            print(f"differs: {command}")
            for part in ("code", "stdout", "stderr"):
                if old[command][part] != new[command][part]:
                    print(f"  {part}: {_first_difference(str(old[command][part]), str(new[command][part]))}")
    print(f"{len(new)} answers, {different} differ, {len(set(old) - set(new))} were not asked for again")
    return int(different > 0)


def _first_difference(old: str, new: str) -> str:
    for before, after in itertools.zip_longest(old.splitlines(), new.splitlines(), fillvalue="(end)"):
        if before != after:
            return f"{before.strip()[:160]}  ->  {after.strip()[:160]}"
    return "white space"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--compare", action="store_true")
    parser.add_argument("--only", default="", metavar="WORD")
    args = parser.parse_args()
    if args.compare:
        return compare(*args.files)
    return record(args.files[0], args.only)


if __name__ == "__main__":
    sys.exit(main())
