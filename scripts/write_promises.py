"""Writes docs/evidence/promises.md: what is promised, how many inputs of which kinds were tried, how, and when.

Counts of long runs are read from their logs (`tests.fuzz.long`, `check_laws.py`, `tests.app.server.siege` and
`tests.app.cli.interrupting`, each with `--log`), those of the tests from `tests/promises`. A second log of mutants or
laws is that of a run with other seeds, after all repairs and with the exceptions as they were: it is told apart. Its
line `{"note": TEXT}`, written by whoever looked at what was found, is told too.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import textwrap
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "evidence" / "promises.md"
PROMISES = {
    "no_traceback": "bad input is one line, exit code 2: never a traceback",
    "bounded": "what is refused takes below 20 s of CPU and 2 GiB",
    "nothing_lost": "no file is lost, half written, or written elsewhere",
    "no_silent_option": "an option that is not used is an error",
    "no_silent_zero": "no zero stands for something unknown",
    "same_answer": "the same question has the same answer",
    "physics": "answers obey physics",
    "server_answers": "the server answers whatever others send",
    "loopback_only": "the server is reached from this machine only",
    "written_tables": "what is written opens as what it is",
    "supply_chain": "what a prediction runs on is listed and hashed",
}
"""Promises by the file in tests/promises that holds them."""
_OFTEN = 5  # times that a law has an exception for which it is named


def main() -> int:
    """Writes the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("mutants", "laws", "siege", "interruptions"):
        parser.add_argument(f"--{name}", type=Path, required=True, metavar="LOG", nargs="+")
    args = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    logs = {name: read_lines(getattr(args, name)[0]) for name in ("mutants", "laws", "siege", "interruptions")}
    files, physics, *others = write_runs(logs)
    files += "".join(write_fresh_mutants(read_lines(path)) for path in args.mutants[1:])
    physics += "".join(write_fresh_laws(read_lines(path)) for path in args.laws[1:])
    parts = [HEAD, write_tests(), *map(_wrap, (files, physics, *others))]
    PAGE.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    return 0


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a log; of one seed the last counts."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return list({row.get("seed", number + 10**12): row for number, row in enumerate(rows)}.values())


HEAD = """# Promises

What is promised to whoever gives Traincast something odd, and how often it was tried. `scripts/write_promises.py`
writes this page from the logs of long runs; `tests/promises` has one file per promise with a seeded slice."""


def _wrap(text: str) -> str:
    title, _, body = text.partition("\n\n")
    return f"{title}\n\n" + textwrap.fill(body, 118, break_long_words=False, break_on_hyphens=False)


def write_tests() -> str:
    """The table of promises."""
    lines = ["| promise | inputs of the test | test |", "|---|---|---|"]
    for name, promise in PROMISES.items():
        module = importlib.import_module(f"tests.promises.test_{name}")
        lines.append(f"| {promise} | {module.TRIES} | `tests/promises/test_{name}.py` |")
    return "\n".join(lines)


def write_runs(logs: dict[str, list[dict[str, Any]]]) -> list[str]:
    """What the long runs tried."""
    mutants, laws, siege, ended = (logs[name] for name in ("mutants", "laws", "siege", "interruptions"))
    tried, answered, found = Counter[str](), Counter[str](), Counter[str]()
    for row in mutants:
        tried[row["format"]] += row["cases"]
        answered[row["format"]] += row["answered"]
        found[row["format"]] += row["found"]
    kinds = group_by_count(tried)
    broken = ", ".join(f"{name} {count}" for name, count in sorted(found.items()) if count) or "none"
    unexplained = Counter(one["law"] for row in laws for one in row["violations"] if not one["excused"])
    explained = Counter(
        one["law"].partition(":")[0].partition("=")[0] for row in laws for one in row["violations"] if one["excused"]
    )
    each = Counter[str]()
    for row in laws:
        each.update(row["tried"])
    times = Counter[str]()
    for row in ended:
        times[row["command"]] += row["times"]
    killed, places = times.pop("bench", 0), Counter[str]()
    for row in ended:
        places.update(row.get("places", {}))
    killed -= places.pop("ended", 0)  # before the signal came
    where = ", ".join(f"{place} {count}" for place, count in places.items())
    often = group_by_count(times)
    return [
        "## Changed files\n\n"
        f"`scripts/fuzz --cases 20000 --log LOG`, {mutants[-1]['date']}: **{tried.total():,} changed files** "
        f"and requests, {found.total()} broke a promise ({broken}; repaired since, and tried again by the seed), "
        f"{answered.total():,} were still answered: {kinds}.",
        "## Physics\n\n"
        f"`python scripts/check_laws.py --log LOG`, {laws[-1]['date']}: "
        f"**{sum(row['answered'] for row in laws):,} scenarios** of all models and platforms in "
        f"{sum(each.values()) - each['every answer']:,} pairs under {len(each) - 1} laws, "
        f"{sum(row['rejected'] for row in laws):,} more refused by name; what broke a law was tried again "
        "after repairs. Unexplained: "
        f"{', '.join(f'{law} {count}' for law, count in unexplained.items()) or 'none'}. Explained in "
        "`evaluation/src/traincast_evaluation/laws/exceptions.py`, once seen: "
        f"{', '.join(f'{law} {count}' for law, count in sorted(explained.items()) if count >= _OFTEN)}, others "
        f"{sum(count for count in explained.values() if count < _OFTEN)}.",
        write_siege(siege[-1]),
        "## Interruptions\n\n"
        f"`scripts/interrupt`, {ended[-1]['date']}: SIGKILL, SIGINT and a full disk each so often (SIGTERM a fifth): "
        f"{often}. `scripts/kill_bench`: a bench store killed {killed} times ({where}). "
        f"Broken: {sum(row['broken'] for row in ended)}. Copies were host to host, without a GPU.",
        "## Supply chain\n\n`scripts/write_sbom.py` agrees with the lock; its audit reached no database of weaknesses.",
    ]


def group_by_count(counts: Counter[str]) -> str:
    """Names that were tried as often as each other, together."""
    return "; ".join(
        f"{often:,} of {', '.join(name for name, count in sorted(counts.items()) if count == often)}"
        for often in sorted(set(counts.values()), reverse=True)
    )


def _take_notes(rows: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], str]:
    """The lines of what was tried, and what was noted on them."""
    noted = "".join(f" {row['note']}" for row in rows if "note" in row)
    return [row for row in rows if "note" not in row], noted


def write_fresh_mutants(rows: list[dict[str, Any]]) -> str:
    """What changed files of other seeds found."""
    rows, noted = _take_notes(rows)
    found = Counter[str]()
    for row in rows:
        found[row["format"]] += row["found"]
    broken = ", ".join(f"{name} {count}" for name, count in sorted(found.items()) if count)
    return (
        f" After the repairs, seed {rows[0]['first'] // 1_000_000}: "
        f"{sum(row['cases'] for row in rows):,} more, {found.total()} were found{broken and f' ({broken})'}.{noted}"
    )


def write_fresh_laws(rows: list[dict[str, Any]]) -> str:
    """What scenarios of other seeds broke, the exceptions being as they were."""
    rows, noted = _take_notes(rows)
    unexplained = Counter(one["law"] for row in rows for one in row["violations"] if not one["excused"])
    named = ", ".join(f"{law} {count}" for law, count in sorted(unexplained.items())) or "none"
    return (
        f" Seeds from {rows[0]['seed']:,} on, exceptions as they were: "
        f"{sum(row['answered'] for row in rows):,} more scenarios; unexplained: {named}.{noted}"
    )


def write_siege(last: dict[str, Any]) -> str:
    """What a server stood."""
    counts, quick, beside, held = last["counts"], last["quick"], last["quick_beside_eight"], last["server_mb"]
    done = ", ".join(
        f"{counts.get(key, 0)} {words}"
        for key, words in {
            "job finished": "searches finished", "job cancelled": "cancelled",
            "job failed": "told to have been ended twice",
            "half headers": "half headers", "slow bodies": "slow bodies", "POST uploads": "uploads",
        }.items()
    )  # fmt: skip
    return (
        f"## The server\n\n`scripts/siege`, {last['date']}, {last['minutes']:g} minutes: **{last['requests']:,} "
        f"requests**, {last['workers_killed']} workers killed, {done}; files at and above the limit, a disk that is "
        "smaller than it (507), a clock that jumps by 400 days. "
        f"{quick['n']:,} quick questions on two cores with a load of {last['load']:.0f} by others too: median "
        f"{quick['median_s']} s, 95 % below {quick['p95_s']} s, worst {quick['worst_s']} s, "
        f"{quick['within']:.1%} within a second; the {beside['n']} beside eight searches: {beside['p95_s']}, "
        f"{beside['worst_s']} s, {beside['within']:.1%}. "
        f"Memory of the server: {held['second_third']} MB in the second third of the time, {held['last_third']} in the "
        "last. No process and no file was left."
    )


if __name__ == "__main__":
    sys.exit(main())
