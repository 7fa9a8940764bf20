"""Processor time of captures, as ratios to running the same step plainly in the same run.

    .venv/bin/python benchmarks/capture.py               # a language model, a recommender, sharded training
    .venv/bin/python benchmarks/capture.py --quick       # one repetition, for a smoke test
    .venv/bin/python benchmarks/capture.py --only FSDP   # those whose name has the word
    .venv/bin/python benchmarks/capture.py --large       # a Llama of 8 billion parameters as well: a minute

*Plain* builds the step and runs it twice on meta tensors, under a mode that counts its ops and does nothing
else; a capture at one size builds it and runs it twice as well, on every rank. *Resizable* is the capture at all sizes
that it takes to resize the workload, against as many captures at one size. A ratio of at most 1 keeps the promise: the
limits are what was measured, and a tenth. Least of several repetitions, taken in turn; imports are not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # set before numpy and torch are imported
sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from tests.corpus.loops import GPT
from tests.corpus.running import load
from tests.corpus.setups import Setup, tokens, trained
from torch.utils._python_dispatch import TorchDispatchMode

from traincast.capturing import capture_distributed, capture_step
from traincast.ir.generalise import capture_sizes

LIMITS = {
    "nanoGPT": 1.05, "DeepFM": 2.6, "FSDP2": 3.1,
}  # fmt: skip
"""Times that a capture at one size may take of the plain step."""
RESIZABLE = 1.1
LARGE_SECONDS, LARGE_BYTES = 60, 1e9


class Count(TorchDispatchMode):
    """Counts ops, as the least that any recording must do."""

    ops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops += 1
        return func(*args, **(kwargs or {}))


def _gpt(batch: int, length: int, device: str) -> Any:
    model = GPT().to(device)
    ids = tokens(batch, length, 512, device)
    return trained(model, lambda: model(ids, ids))


ON_ONE = {"FSDP2": _gpt}  # the same models without their ranks


def plain(setup: Setup) -> None:
    """The step as it is, on meta tensors; of every rank."""
    sizes = (setup.batch,) if setup.seq_len is None else (setup.batch, setup.seq_len)
    for _ in range(max(1, setup.gpus)):
        with Count():
            step = ON_ONE.get(setup.name, setup.build)(*sizes, device="meta")
            step()
            step()


def capture(setup: Setup, *, rebatch: bool) -> None:
    how = {"batch_size": setup.batch, "seq_len": setup.seq_len, "name": setup.name, "rebatch": rebatch}
    if setup.gpus:
        capture_distributed(setup.build, world_size=setup.gpus, **how)
    else:
        capture_step(setup.build, **how)


def least(works: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Processor seconds of each, taken in turn so that a busy machine slows all of them; the first time not counted."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for repeat in range(repeats + 1):
        for name, work in works.items():
            start = time.process_time()
            work()
            if repeat:
                times[name].append(time.process_time() - start)
    return {name: min(taken) for name, taken in times.items()}


def measure(setup: Setup, repeats: int) -> list[dict[str, object]]:
    limit = LIMITS[setup.name]
    seconds = least(
        {
            "plain": lambda: plain(setup),
            "one": lambda: capture(setup, rebatch=False),
            "all": lambda: capture(setup, rebatch=True),
        },
        repeats,
    )
    others = len(capture_sizes(setup.batch, setup.seq_len or 0)) - 1
    captures = 1 + others / max(1, setup.gpus)  # ranks with the same program are captured once at the other sizes
    return [
        result(f"{setup.name}, one size", seconds["one"], f"{limit:g} x plain", limit * seconds["plain"]),
        result(
            f"{setup.name}, resizable", seconds["all"], f"{RESIZABLE * captures:.3g} x one size",
            RESIZABLE * captures * seconds["one"],
        ),
    ]  # fmt: skip


def result(what: str, seconds: float, against: str, limit: float) -> dict[str, object]:
    return {"what": what, "against": against, "seconds": round(seconds, 3), "ratio": round(seconds / limit, 3)}


def _llama(batch: int, length: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
        vocab_size=128256, max_position_embeddings=8192, rope_theta=500000.0,
    )  # fmt: skip
    with torch.device("cuda"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    ids = tokens(batch, length, 128256, "cuda")
    return trained(model, lambda: model(input_ids=ids, labels=ids).loss)


def large() -> list[dict[str, object]]:
    """A resizable capture of Llama 8B, against what was promised: a minute, and a gigabyte alongside the imports."""
    import transformers.models.llama.modeling_llama  # noqa: F401 - what it brings in is no part of the capture

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.process_time()
    capture_step(_llama, batch_size=2, seq_len=2048, name="Llama 8B")
    seconds = time.process_time() - start
    held = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    return [
        result("Llama 8B, resizable", seconds, f"{LARGE_SECONDS} s", LARGE_SECONDS),
        {"what": "Llama 8B, memory", "against": "1 GB", "bytes": held, "ratio": round(held / LARGE_BYTES, 3)},
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one repetition")
    parser.add_argument("--only", default="", help="set-ups whose name has this word")
    parser.add_argument("--large", action="store_true", help="also a Llama of 8 billion parameters")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    setups = load()
    chosen = [setups[name] for name in LIMITS if arguments.only in name]
    rows = large() if arguments.large else []
    for setup in chosen:
        if all(find_spec(name) is not None for name in setup.needs):
            rows += measure(setup, 1 if arguments.quick else 3)
    if arguments.json:
        print(json.dumps(rows, indent=2))
    else:
        for row in rows:
            taken = f"{row['seconds']} s" if "seconds" in row else f"{row['bytes']:,} bytes"
            print(f"{row['ratio']:6.2f}  of {row['against']:<20} {row['what']} ({taken})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
