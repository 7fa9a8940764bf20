#!/usr/bin/env python
"""Twenty tasks of six kinds of people, as README and --help tell them, with the seconds that each took.

    .venv/bin/python scripts/try_tasks.py

Every command has to end with the code that its row names (0 done, 1 a check failed, 2 bad input).
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TRACE = Path(__file__).resolve().parent.parent / "docs" / "tutorial" / "example-trace.json"
FILES = {
    "train.py": "import torch\n\ndef make_step(batch_size):\n    model = torch.nn.Linear(512, 512)\n"
    "    data = torch.randn(batch_size, 512)\n    return lambda: model(data).sum().backward()\n",
    "tables.yaml": "tables:\n" + "".join(f"- {{name: t{n}, rows: 1000000, dim: 64, pooling: 4}}\n" for n in range(6)),
    "step.yaml": "workload: resnet50\non: v100\nbatch_size: 32\n",
    "config.json": json.dumps({"model_type": "llama", "hidden_size": 1024, "num_hidden_layers": 8, "vocab_size": 32000,
                               "intermediate_size": 2816, "num_attention_heads": 16, "num_key_value_heads": 8}),
    "ds.json": json.dumps({"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3}}),
}  # fmt: skip
TASKS = (
    ("recommender", "how long is a DLRM step", "predict dlrm-default --on v100 --batch-size 2048", 0),
    ("recommender", "where tables go", "shard tables.yaml --on dgx-a100 --gpus 8 --batch-size 4096 --time-limit 2", 0),
    ("recommender", "what H100 brings", "whatif dlrm-default --on v100 --set on=h100", 0),
    ("language", "does a model fit on eight GPUs", "predict llama3-8b --on dgx-h100 --gpus 8 --fsdp", 0),
    ("language", "which layout", "plan config.json --on dgx-h100 --gpus 8 --global-batch 16", 0),
    ("language", "a file for torchtitan",
     "plan config.json --on dgx-h100 --gpus 2 --global-batch 4 --write torchtitan -o job.sh", 0),
    ("language", "my DeepSpeed file", "predict config.json --on dgx-h100 --gpus 8 --from ds.json", 0),
    ("language", "which models are there", "models llama", 0),
    ("performance", "why is this trace slow", f"trace {TRACE}", 0),
    ("performance", "a page to mail", f"report {TRACE} -o trace.html", 0),
    ("performance", "the timeline in Perfetto", "predict resnet50 --on v100 --trace-out step.json", 0),
    ("buyer", "which GPU", "compare resnet50 --on v100,a100-80gb,h100 --batch-size 128", 0),
    ("buyer", "at my prices", "compare llama3-8b --on dgx-a100-80gb,dgx-h100 --gpus 8 --fsdp --checkpoint full "
     "--price h100=2,a100-80gb=1 --tokens 1T", 0),
    ("buyer", "what is known of a card", "platforms 5090", 0),
    ("researcher", "my own step", "predict train.py:make_step --on h100 --batch-size 64", 0),
    ("researcher", "capture it for later", "capture train.py:make_step -o step.tc", 0),
    ("researcher", "a sweep", "sweep resnet50 --vary on=v100,h100 --vary batch-size=32,64 --out sweep.csv", 0),
    ("engineer in CI", "a baseline", "check --baseline perf.json step.yaml --update --reason first", 0),
    ("engineer in CI", "the gate", "check --baseline perf.json --junit junit.xml", 0),
    ("engineer in CI", "a typing error", "predict resnet50 --on A100", 2),
)  # fmt: skip


def main() -> int:
    """Runs all tasks in an empty folder; 1 where one ended otherwise than it should."""
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        for name, text in FILES.items():
            (Path(folder) / name).write_text(text, encoding="utf-8")
        for person, what, command, code in TASKS:
            began = time.monotonic()
            words = [sys.executable, "-m", "traincast", *command.split()]
            done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)
            fine = done.returncode == code
            failed += not fine
            print(f"{time.monotonic() - began:6.2f} s  {'ok  ' if fine else 'FAIL'}  {person}: {what}", flush=True)
            if not fine:
                print(done.stderr.strip()[-300:])
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
