"""How fast Traincast is, as ratios to a named peer or limit, measured in this run.

    .venv/bin/python benchmarks/speed.py            # all
    .venv/bin/python benchmarks/speed.py --quick    # few repetitions, for a smoke test

A ratio of at most 1 keeps the promise. Cold starts are compared with `import numpy` run alternately in the same
minutes; the others with their limit on one core. Medians are reported.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

QUICK, FULL = 3, 15
os.environ.setdefault("OMP_NUM_THREADS", "1")  # limits are for one core; set before numpy is imported
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def seconds(function: Callable[[], object]) -> float:
    """Processor seconds of this process: other work on a shared machine does not count."""
    start = time.process_time()
    function()
    return time.process_time() - start


def process_seconds(*arguments: str) -> float:
    """Wall seconds of a process, which a user waits for."""
    start = time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def cold_predict(repeats: int) -> dict[str, object]:
    numpy_s, traincast_s = [], []
    for _ in range(repeats):
        numpy_s.append(process_seconds("-c", "import numpy"))
        traincast_s.append(process_seconds("-m", "traincast", "predict", "dlrm-mlperf", "--on", "v100"))
    limit = 4 * statistics.median(numpy_s) + 0.3
    return result("cold predict dlrm-mlperf", "4 x `import numpy` + 0.3 s", statistics.median(traincast_s), limit)


def warm_predict(repeats: int) -> dict[str, object]:
    import traincast
    from traincast.hardware import load_platform

    workload = traincast.load("bert-large", mode="training", optimizer="none")
    platform = load_platform("v100")
    traincast.predict(workload, on=platform)
    ops = workload.programs[0].num_ops
    median = statistics.median(seconds(lambda: traincast.predict(workload, on=platform)) for _ in range(repeats))
    return result(f"warm predict, {ops} ops", "5 ms per 1,700 ops", median, 0.005 * ops / 1700)


def rebatch(repeats: int) -> dict[str, object]:
    import traincast
    from traincast.hardware import load_platform

    workload = traincast.load("gpt3-xl")
    platform = load_platform("a100-80gb")
    traincast.predict(workload, on=platform)
    batches = iter(range(3, 3 + repeats))
    median = statistics.median(
        seconds(lambda: traincast.predict(workload, on=platform, batch_size=next(batches))) for _ in range(repeats)
    )
    return result("re-batch and predict gpt3-xl", "100 ms", median, 0.1)


def memory(repeats: int) -> dict[str, object]:
    """Whether a step fits, beside its prediction: both as commands."""
    step = ("bert-large", "--on", "a100-80gb")
    took = [[process_seconds("-m", "traincast", name, *step) for name in ("fits", "predict")] for _ in range(repeats)]
    fits, predict = (statistics.median(column) for column in zip(*took, strict=True))
    return result("fits bert-large", "1.5 x predict", fits, 1.5 * predict)


def layers(_: int) -> dict[str, object]:
    from dataclasses import replace

    import traincast
    from traincast.models.transformers.reading import load_transformer

    deep = replace(load_transformer("llama3-8b"), layers=1000, name="1,000 layers")
    layout = {"on": "dgx-h100", "gpus": 64, "tp": 8, "fsdp": 2, "micro_batch": 1}
    median = seconds(lambda: traincast.predict(deep, **layout).memory.to_dict())
    return result("1,000 layers, time and memory", "10 s", median, 10.0)


def capture(repeats: int) -> dict[str, object]:
    from traincast.capturing import capture_step
    from traincast_evaluation.zoo.build.recipes import RECIPES

    recipe = RECIPES["dlrm-mlperf"]
    make = recipe.make(recipe.settings()[0])

    def once() -> object:
        return capture_step(lambda batch_size: make(batch_size, 0), batch_size=2048, name="dlrm", rebatch=False)

    once()
    median = statistics.median(seconds(once) for _ in range(min(repeats, 5)))
    return result("capture a 26-table DLRM", "1 s", median, 1.0)


def price(repeats: int) -> dict[str, object]:
    """100,000 mixed kernel calls of the built-in models at once; the slowest family against its own limit."""
    import numpy as np

    import traincast
    from traincast.costs.kernels.cost import price_calls
    from traincast.costs.kernels.lower import lower_program
    from traincast.costs.kernels.registry import make_lowering_context
    from traincast.hardware import load_device

    learned = {"gemm", "conv", "softmax"}
    device = load_device("a100-80gb")
    worst, slowest = 0.0, ""
    for name in ("dlrm-mlperf", "bert-large", "resnet50"):
        workload = traincast.load(name)
        for _, calls in lower_program(workload.programs[0], make_lowering_context(workload)).by_family():
            many = calls.take(np.resize(np.arange(len(calls)), 100_000))
            price_calls(many, device)
            median = statistics.median(seconds(lambda many=many: price_calls(many, device)) for _ in range(repeats))
            ratio = median / 100_000 * (2e5 if calls.family.name in learned else 1e6)
            worst, slowest = max((worst, slowest), (ratio, calls.family.name))
    what = f"price 100,000 calls ({slowest})"
    return {"what": what, "against": "1 M calls/s (learned 200 k)", "ratio": round(worst, 3)}


def result(what: str, against: str, measured_s: float, limit_s: float) -> dict[str, object]:
    return {"what": what, "against": against, "ratio": round(measured_s / limit_s, 3)}


BENCHMARKS = {
    "cold": cold_predict, "warm": warm_predict, "rebatch": rebatch, "memory": memory, "layers": layers,
    "capture": capture, "price": price,
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"which: {', '.join(BENCHMARKS)} (default: all)")
    parser.add_argument("--quick", action="store_true", help="few repetitions")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    names = arguments.names or list(BENCHMARKS)
    rows = [BENCHMARKS[name](QUICK if arguments.quick else FULL) for name in names]
    if arguments.json:
        print(json.dumps(rows, indent=2))
    else:
        for row in rows:
            print(f"{row['ratio']:6.2f}  of {row['against']:<28} {row['what']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
