"""A long run over all formats: `python -m tests.fuzz.long --cases 20000`; exit code 1 when anything is found.

With `--log FILE` every 40 cases are a line there: a run that is interrupted goes on, and `scripts/write_promises.py`
reads what was tried.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

from tests.fuzz.formats import FORMATS
from tests.fuzz.running import Finding, format_named, judged, run_cases

_WARMED = ("workload", "kineto", "dlrm yaml", "platform", "hugging face", "costs", "machine profile", "scenario file",
           "launch file", "sweep result", "sweep journal", "baseline", "server request")  # fmt: skip
_ROUND = 40  # cases of a format before the next one has its turn
_COSTLY = {"dense yaml": 10, "machine profile": 10, "tables": 20, "parquet": 20}  # cases of a round of slow ones


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0, help="stop after so long by the clock")
    parser.add_argument("--cases", type=int, default=0, help="stop after this many (0: by time only)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--format", choices=[form.name for form in FORMATS])
    parser.add_argument("--log", type=Path, help="lines of what was tried, to go on from")
    args = parser.parse_args()
    warm_up()
    forms = [form for form in FORMATS if args.format in (None, form.name)]
    end, kinds, tried = time.monotonic() + 60 * args.minutes, Counter[str](), Counter[str]()
    done = _read_log(args.log)
    for (name, _), count in done.items():
        tried[name] += count
    first = args.seed * 1_000_000
    while time.monotonic() < end and (not args.cases or tried.total() < args.cases):
        for form in forms:
            if (form.name, first) in done:
                continue
            start, codes, found = os.times().children_user, Counter[int](), 0
            count = _COSTLY.get(form.name, _ROUND)
            for finding in run_cases(form, range(first, first + count), codes):
                report(finding, kinds)
                found += 1
            tried[form.name] += count
            _write_log(args.log, form.name, range(first, first + count), codes, found, os.times().children_user - start)
        first += _ROUND
        print(", ".join(f"{name} {count}" for name, count in tried.items()), flush=True)
    print(f"{tried.total()} cases, {kinds.total()} findings of {len(kinds)} kinds")
    return int(bool(kinds))


def warm_up() -> None:
    """Imports and reads in this process what its forks need; not what starts threads, which forks do not have."""
    for name in _WARMED:
        with tempfile.TemporaryDirectory() as folder:
            judged([*format_named(name).make(random.Random(1), Path(folder)), "--json"])


def _read_log(path: Path | None) -> dict[tuple[str, int], int]:
    """How many cases were tried, by format and first seed."""
    if path is None or not path.exists():
        return {}
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return {(row["format"], row["first"]): row["cases"] for row in rows}


def _write_log(path: Path | None, name: str, seeds: range, codes: Counter[int], found: int, seconds: float) -> None:
    if path is None:
        return
    row = {
        "format": name, "first": seeds.start, "cases": len(seeds), "answered": codes[0] + codes[1], "refused": codes[2],
        "found": found, "cpu_seconds": round(seconds, 2), "date": f"{datetime.now(UTC):%Y-%m-%d}",
    }  # fmt: skip
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")


def report(finding: Finding, kinds: Counter[str]) -> None:
    """Prints the first finding of a kind."""
    kind = finding.format + finding.problem.partition(": ")[0]
    kinds[kind] += 1
    if kinds[kind] == 1:
        print(finding, flush=True)


if __name__ == "__main__":
    sys.exit(main())
