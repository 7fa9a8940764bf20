"""Holds random scenarios of all models and platforms to physics: `python scripts/check_laws.py --scenarios 20000`.

Every line of `--log` is one drawn scenario with its pairs; a run that is interrupted goes on from there. Exit code 1:
a law was broken and no exception of `traincast_evaluation.laws.exceptions` explains it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from traincast_evaluation.laws.trial import read_trials, run_trial


def main() -> int:
    """Runs and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenarios", type=int, default=20_000, help="stop after so many were answered")
    parser.add_argument("--seed", type=int, default=0, help="of the first one")
    parser.add_argument("--again", action="store_true", help="run those again that broke a law, and nothing else")
    parser.add_argument("--log", type=Path, required=True, help="what was tried, a line each")
    args = parser.parse_args()
    done = {seed: row for seed, row in read_trials(args.log).items() if seed >= args.seed}
    if args.again:
        _run_again(done, args.log)
        return summarize(list(done.values()))
    answered, seed = sum(row["answered"] for row in done.values()), args.seed
    with args.log.open("a", encoding="utf-8") as file:
        while answered < args.scenarios:
            if seed not in done:
                done[seed] = row = _run(seed)
                file.write(json.dumps(row) + "\n")
                file.flush()
                answered += row["answered"]
            seed += 1
    return summarize(list(done.values()))


def _run(seed: int) -> dict[str, Any]:
    """One line of the log."""
    try:
        row = run_trial(seed).to_dict()
    except Exception as error:  # a mistake of ours: to be seen, and no reason to stop
        row = {"seed": seed, "answered": 0, "rejected": 0, "tried": {}, "seconds": 0.0, "violations": [
            {"law": "no internal error", "command": f"seed {seed}", "factor": 1.0, "excused": "",
             "shown": f"{type(error).__name__}: {error}"}]}  # fmt: skip
    return {**row, "date": f"{datetime.now(UTC):%Y-%m-%d}"}


def _run_again(done: dict[int, dict[str, Any]], log: Path) -> None:
    """Tries the scenarios anew that broke a law without an explanation; their new lines stand behind the old ones."""
    with log.open("a", encoding="utf-8") as file:
        for seed, row in done.items():
            if any(not violation["excused"] for violation in row["violations"]):
                done[seed] = _run(seed)
                file.write(json.dumps(done[seed]) + "\n")


def summarize(rows: list[dict[str, Any]]) -> int:
    """Prints what was tried and what was broken; 1 where something is unexplained."""
    tried, broken, worst = Counter[str](), Counter[str](), dict[str, dict[str, Any]]()
    for row in rows:
        tried.update(row["tried"])
        for violation in row["violations"]:
            law = violation["law"] + (" (explained)" if violation["excused"] else "")
            broken[law] += 1
            if law not in worst or violation["factor"] > worst[law]["factor"]:
                worst[law] = violation
    print(f"{sum(row['answered'] for row in rows)} scenarios answered, {sum(row['rejected'] for row in rows)} rejected")
    print("; ".join(f"{law} {count}" for law, count in sorted(tried.items())))
    for law, count in broken.most_common():
        print(f"{count} x {law}; worst {worst[law]['factor']:.3f}: {worst[law]['shown']}\n    {worst[law]['command']}")
    return int(any(not violation["excused"] for row in rows for violation in row["violations"]))


if __name__ == "__main__":
    sys.exit(main())
