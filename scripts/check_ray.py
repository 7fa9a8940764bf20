"""A sweep on a real local Ray, with a worker killed in the middle: the rows must be those of a sweep without. Then the
searches of `plan` and `shard` on Ray: the answers must be those of one process.

pip install ray; .venv/bin/python scripts/check_ray.py
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import traincast

VARY = {"on": ["v100", "h100"], "batch-size": ["200:700:1"]}


def _workers() -> list[int]:
    """Processes of Ray that run tasks of this sweep."""
    lines = subprocess.run(["ps", "-eo", "pid,args"], capture_output=True, text=True, check=True).stdout.splitlines()
    return [int(line.split()[0]) for line in lines if "ray::_chunk" in line]


def _swept() -> bool:
    """A sweep with a worker killed."""
    plain = traincast.sweep("dlrm-ddp", on="v100", vary=VARY, workers=1)
    killed: list[int] = []
    fractions: list[float] = []

    over = threading.Event()

    def kill() -> None:
        while not over.wait(0.01):
            found = _workers() if fractions and fractions[-1] > 0.1 else []
            if found:
                os.kill(found[0], signal.SIGKILL)
                killed.append(found[0])
                return

    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    start = time.perf_counter()
    swept = traincast.sweep("dlrm-ddp", on="v100", vary=VARY, ray="local", progress=fractions.append)
    seconds = time.perf_counter() - start
    over.set()
    same = swept.rows == plain.rows
    print(f"{len(swept.rows)} points on Ray in {seconds:.1f} s, {len(killed)} worker killed, same rows: {same}, "
          f"failed: {len(swept.failed)}", flush=True)  # fmt: skip
    return bool(same and killed and not swept.failed)


def _planned() -> bool:
    """The search for a layout."""
    asked = {"on": "dgx-h100", "gpus": 64, "global_batch": 128}
    alone, on_ray = (traincast.plan("llama3-8b", **asked, **where) for where in ({"workers": 1}, {"ray": "local"}))
    same = alone.to_dict() == on_ray.to_dict()
    print(f"plan: {on_ray.scored} layouts on Ray, same answer: {same}", flush=True)
    return same


def _sharded() -> bool:
    """The search for a plan of tables."""
    asked = {"on": "dgx-h100", "gpus": 8, "torchrec": False}
    alone, on_ray = (
        traincast.shard("mlperf-dlrm-v2", **asked, **where) for where in ({"workers": 1}, {"ray": "local"})
    )
    same = alone.best.plan == on_ray.best.plan and alone.best.seconds == on_ray.best.seconds
    print(f"shard: {on_ray.scored} plans scored, full walks on Ray, same plan: {same}", flush=True)
    return same


def main() -> int:
    """Prints what happened; exit code 1 when an answer differs."""
    return 0 if all([_swept(), _planned(), _sharded()]) else 1


if __name__ == "__main__":
    sys.exit(main())
