"""A sweep on a real local Ray, with a worker killed in the middle: the rows must be those of a sweep without.

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


def main() -> int:
    """Prints what happened; exit code 1 when rows differ."""
    plain = traincast.sweep("dlrm-ddp", on="v100", vary=VARY, workers=1)
    killed: list[int] = []
    fractions: list[float] = []

    def kill() -> None:
        for _ in range(6000):
            time.sleep(0.01)
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
    same = swept.rows == plain.rows
    print(f"{len(swept.rows)} points on Ray in {seconds:.1f} s, {len(killed)} worker killed, same rows: {same}, "
          f"failed: {len(swept.failed)}")  # fmt: skip
    return 0 if same and killed and not swept.failed else 1


if __name__ == "__main__":
    sys.exit(main())
