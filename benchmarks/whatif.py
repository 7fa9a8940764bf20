"""How fast what-ifs and sweeps are, as ratios to their limits, measured in this run. A ratio of at most 1 keeps the
promise; run it on a quiet machine.

    .venv/bin/python benchmarks/whatif.py
    .venv/bin/python benchmarks/whatif.py --quick
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # workers share the cores; set before numpy is imported
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

_FIRST = """
import sys, time
import traincast
start = time.perf_counter()
traincast.predict(sys.argv[1], on="v100")
first = time.perf_counter() - start
start = time.perf_counter()
traincast.whatif(sys.argv[1], on="v100", edits=["batch-size=4096", "cuda-graph"])
print(first, time.perf_counter() - start)
"""


def what_if(repeats: int) -> dict[str, object]:
    """A what-if on a saved DLRM (both its predictions) against the first prediction of the process."""
    import traincast
    from traincast.ir.file import save_workload

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "dlrm.tc"
        save_workload(traincast.load("dlrm-mlperf"), path)
        ratios = []
        for _ in range(repeats):
            done = subprocess.run(
                [sys.executable, "-c", _FIRST, str(path)], check=True, capture_output=True, text=True
            )  # fmt: skip
            first, second = map(float, done.stdout.split())
            ratios.append(second / first)
    median = statistics.median(ratios)
    return {
        "name": "what-if over first prediction, in-process",
        "measured": median,
        "limit": 0.5,
        "ratio": median / 0.5,
    }


def sweep_seconds(points: int, workers: int) -> float:
    """Seconds of a sweep over batch sizes and four platforms, files included."""
    import traincast

    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        answer = traincast.sweep(
            "dlrm-default", on="v100", out=Path(folder) / "s.csv", workers=workers,
            vary={"on": ["v100", "p100", "a100-80gb", "h100"], "batch-size": [f"256:{255 + points // 4}:1"]},
        )  # fmt: skip
        seconds = time.perf_counter() - start
    assert len(answer.rows) == points and not answer.failed
    return seconds


def efficiency(repeats: int) -> dict[str, object]:
    """1,000 points on two processes against one."""
    sweep_seconds(64, 1)
    pairs = [(sweep_seconds(1000, 1), sweep_seconds(1000, 2)) for _ in range(repeats)]
    median = statistics.median(one / (2 * two) for one, two in pairs)
    return {"name": "parallel efficiency, 1,000 points, 2 processes", "measured": median, "limit": 0.9,
            "ratio": 0.9 / median}  # fmt: skip


def rate(points: int) -> dict[str, object]:
    """Points a minute of a one-GPU DLRM over batch sizes and platforms, on two processes."""
    per_minute = 60 * points / sweep_seconds(points, 2)
    return {"name": f"points a minute ({points:,} points, 2 processes)", "measured": per_minute, "limit": 20_000.0,
            "ratio": 20_000.0 / per_minute}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    results = [what_if(2 if quick else 7), efficiency(1 if quick else 3), rate(2_000 if quick else 20_000)]
    for one in results:
        print(json.dumps(one))
    print(json.dumps({"worst_ratio": max(float(str(one["ratio"])) for one in results)}))


if __name__ == "__main__":
    main()
