"""A long run over all formats: `python -m tests.fuzz.long --minutes 10`; exit code 1 when anything is found."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

from tests.fuzz.formats import FORMATS
from tests.fuzz.running import Finding, run_cases

_ROUND = 120  # cases of a format before the next one has its turn


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--cases", type=int, default=0, help="stop after this many (0: by time only)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--format", choices=[form.name for form in FORMATS])
    args = parser.parse_args()
    forms = [form for form in FORMATS if args.format in (None, form.name)]
    end, kinds, tried = time.monotonic() + 60 * args.minutes, Counter[str](), Counter[str]()
    first = args.seed * 1_000_000
    while time.monotonic() < end and (not args.cases or tried.total() < args.cases):
        for form in forms:
            count = min(_ROUND, args.cases - tried.total()) if args.cases else _ROUND
            for finding in run_cases(form, range(first, first + count)):
                report(finding, kinds)
            tried[form.name] += count
        first += _ROUND
        print(", ".join(f"{name} {count}" for name, count in tried.items()), flush=True)
    print(f"{tried.total()} cases, {kinds.total()} findings of {len(kinds)} kinds")
    return int(bool(kinds))


def report(finding: Finding, kinds: Counter[str]) -> None:
    """Prints the first finding of a kind."""
    kind = finding.format + finding.problem.partition(": ")[0]
    kinds[kind] += 1
    if kinds[kind] == 1:
        print(finding, flush=True)


if __name__ == "__main__":
    sys.exit(main())
