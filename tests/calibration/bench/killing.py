"""`traincast bench` killed at random moments: `python -m tests.calibration.bench.killing --times 50 --seed 1`.

After every SIGKILL the store must be readable, hold every sample that had been put into it, and at most the one that
was under way may be missing; ranks that were launched must end by themselves. The next run goes on in the same store.
Moments are counted from when a run has imported everything, so that they fall into its work: the host's overheads,
collectives between two ranks, single ops and merging alike. `--part copies` (or another) has runs do that part alone,
and counts from its first sample. A CPU has no copies of its own: they go from host memory to host memory there.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from traincast.app.api import bench
from traincast.calibration import here as questions
from traincast.calibration.bench import collectives
from traincast.calibration.bench import store as stores
from traincast.calibration.bench.store import Store, open_device

READY = b"ready\n"
BUDGET = "16s"
LONGEST_SECONDS = 19.0
"""The latest moment of a kill: a run that has ended by then has merged its files."""
PARTS = ("host", "copies", "collectives", "single ops")
_LOOKS = 200  # a tenth of a second apart, within which ranks must have ended


class Log:
    """What a run said it put into the store; a line stays when the process is killed."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def watch(self) -> None:
        """Writes down when a sample is about to be put there, and when it is."""
        file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        append = Store.append

        def watched(store, key, sample):
            os.write(file, f"begin {key}\n".encode())
            append(store, key, sample)
            os.write(file, f"end {key}\n".encode())

        Store.append = watched  # type: ignore[method-assign]

    def keys(self, what: str) -> list[str]:
        """Keys in the order of their lines."""
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        return [line.partition(" ")[2] for line in lines if line.startswith(what)]


def run_and_kill(folder: Path, moment: float, part: str = "") -> str:
    """One run, killed after this many seconds (of a `part`, once it has begun); where it was. Raises AssertionError for
    what may not be."""
    log = Log(folder.parent / "log.txt")
    log.path.unlink(missing_ok=True)
    before = set(Store(folder)._rows)
    command = [sys.executable, "-m", "tests.calibration.bench.killing", "--into", str(folder), str(log.path)]
    command += ["--part", part] if part else []
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as child:
        assert child.stdout is not None and child.stdout.readline() == READY
        while part and child.poll() is None and _place(log.keys("begin")) != part:
            time.sleep(0.05)
        time.sleep(moment)
        ended = child.poll()
        child.send_signal(signal.SIGKILL)
    assert not ended, f"the run ended with {ended}"
    held = set(Store(folder)._rows)  # readable, whatever happened
    begun, done = log.keys("begin"), log.keys("end")
    assert before | set(done) <= held, f"{len((before | set(done)) - held)} samples are gone"
    assert len(set(begun) - held) <= 1, f"{len(set(begun) - held)} samples are lost"
    _no_rank_is_left(child.pid)
    return _place(begun) if ended is None else "ended"


def measure_into(folder: Path, log: Log, part: str = "") -> None:
    """The run that is killed, of this part alone where one is named."""
    log.watch()
    collectives.list_copy_ways = lambda _: (("to device", "pageable"), ("to host", "pageable"))
    stores._MERGE_FROM = 8  # so that merging is met too
    questions._SHARES["host"], questions._SHARES["together"] = 0.05, 0.05
    if part:
        shares = {"copies": "copies", "collectives": "exchanges", "host": "host"}
        questions._SHARES.update(dict.fromkeys(questions._SHARES, 0.0))
        questions._SHARES.update({shares[part]: 0.9} if part in shares else {})
    open_device("cpu")  # imports torch
    sys.stdout.buffer.write(READY)
    sys.stdout.flush()
    bench(budget=BUDGET, store=folder, seed=random.randrange(1 << 20))


def _place(begun: list[str]) -> str:
    if not begun:
        return "before the first sample"
    kinds = {"small-step": "host", "exchange": "collectives", "copy-": "copies"}
    return next((place for start, place in kinds.items() if begun[-1].startswith(start)), "single ops")


def _no_rank_is_left(session: int) -> None:
    """Ranks are of the session of the run that launched them."""
    for _ in range(_LOOKS):  # counted, not timed: a machine that stands still for a while stops ranks as well
        if not _of_session(session):
            return
        time.sleep(0.1)
    raise AssertionError(f"ranks {_of_session(session)} go on without their launcher")


def _of_session(session: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[3]) == session and fields[0] != "Z":
                found.append(int(entry.name))
    return found


def main() -> int:
    """Kills as often as asked; 1 when anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--longest", type=float, default=LONGEST_SECONDS, help="the latest moment of a kill, in seconds"
    )
    parser.add_argument("--log", type=Path, help="where the result is added as a line, as `scripts/interrupt` does")
    parser.add_argument("--part", choices=PARTS, default="", help="kill in this part alone")
    parser.add_argument("--into", nargs=2, type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.into:
        measure_into(args.into[0], Log(args.into[1]), args.part)
        return 0
    draw, places, failures = random.Random(args.seed), Counter[str](), list[str]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "store"
        for number in range(1, args.times + 1):
            moment = draw.uniform(0.0, args.longest)
            try:
                place = run_and_kill(folder, moment, args.part)
                places[place] += 1
            except AssertionError as error:
                place = f"wrong: {error}"
                failures.append(f"killed after {moment:.2f} s: {error}")
            print(f"{number}: killed after {moment:.2f} s, {place}", flush=True)
        total = len(Store(folder))
    print(f"{args.times} kills, {total} samples in the end; killed {dict(places)}")
    if args.log:
        row = {"command": "bench", "times": args.times, "broken": len(failures), "places": dict(places),
               "date": time.strftime("%Y-%m-%d")}  # fmt: skip
        with args.log.open("a") as file:
            file.write(json.dumps(row) + "\n")
    print("\n".join(failures) or "nothing was lost but what was under way")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
