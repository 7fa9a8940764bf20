"""Writes docs/evidence/promises.md: what is promised, how many inputs of which kinds were tried, on which tree, and
when.

Counts of the tests are read from `tests/promises`, those of long runs from `tests/promises/runs.json`. A log of such a
run (`tests.fuzz.long`, `check_laws.py`, `tests.app.server.siege`, `tests.app.cli.interrupting` with `killing`, each
with `--log`) is added there first: `--laws LOG --tree HASH`, HASH being the commit that the run had checked out.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "evidence" / "promises.md"
RUNS = ROOT / "tests" / "promises" / "runs.json"
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
    """Adds the logs that are given, and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in SUMMARIES:
        parser.add_argument(f"--{name}", type=Path, metavar="LOG", action="append", default=[])
    parser.add_argument("--tree", default="", help="the commit that the logs are of")
    args = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    runs = json.loads(RUNS.read_text(encoding="utf-8"))
    for name, summarise in SUMMARIES.items():
        for log in getattr(args, name):
            run = {"kind": name, "tree": args.tree, **summarise(read_lines(log))}
            same = ("kind", "tree", "seed")
            runs = [one for one in runs if any(one.get(key) != run.get(key) for key in same)] + [run]
    RUNS.write_text("[\n" + ",\n".join(json.dumps(run) for run in runs) + "\n]\n", encoding="utf-8")
    PAGE.write_text(write_page(runs), encoding="utf-8")
    return 0


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a log; of one seed the last counts."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return list({row.get("seed", number + 10**12): row for number, row in enumerate(rows)}.values())


def _summarise_mutants(rows: list[dict[str, Any]]) -> dict[str, Any]:
    tried, found = Counter[str](), Counter[str]()
    for row in rows:
        tried[row["format"]] += row["cases"]
        found[row["format"]] += row["found"]
    return {
        "date": rows[-1]["date"], "seed": rows[0]["first"] // 1_000_000, "tried": tried, "found": +found,
        "answered": sum(row["answered"] for row in rows),
    }  # fmt: skip


def _summarise_laws(rows: list[dict[str, Any]]) -> dict[str, Any]:
    each, broken = Counter[str](), [one for row in rows for one in row["violations"]]
    for row in rows:
        each.update(row["tried"])
    scenarios = each.pop("every answer")
    return {
        "date": rows[-1]["date"], "seed": rows[0]["seed"], "scenarios": scenarios, "pairs": each.total(),
        "laws": len(each), "refused": sum(row["rejected"] for row in rows),
        "unexplained": Counter(one["law"] for one in broken if not one["excused"]),
        "explained": Counter(one["law"].partition(":")[0].partition("=")[0] for one in broken if one["excused"]),
    }  # fmt: skip


def _summarise_interruptions(rows: list[dict[str, Any]]) -> dict[str, Any]:
    times, places = Counter[str](), Counter[str]()
    for row in rows:
        if row["command"] != "bench":
            times[row["command"]] += row["times"]
        places.update(row.get("places", {}))
    places.pop("ended", None)  # before the signal came
    return {"date": rows[-1]["date"], "times": times, "places": places, "broken": sum(row["broken"] for row in rows)}


SUMMARIES: dict[str, Callable[[list[dict[str, Any]]], dict[str, Any]]] = {
    "mutants": _summarise_mutants,
    "laws": _summarise_laws,
    "siege": lambda rows: rows[-1],
    "interruptions": _summarise_interruptions,
}
"""What is kept of a log, by the kind of its run."""


def write_page(runs: list[dict[str, Any]]) -> str:
    """The page of these runs."""
    kinds = {name: [run for run in runs if run["kind"] == name and run["tree"]] for name in SUMMARIES}
    kinds["interruptions"] = [run for run in runs if run["kind"] == "interruptions"]
    parts = [
        HEAD, write_tests(), MUTANTS, write_mutants(kinds["mutants"]), LAWS, write_laws(kinds["laws"]), SIEGES,
        write_sieges(kinds["siege"]), INTERRUPTIONS, write_ended(kinds["interruptions"]), SUPPLY,
    ]  # fmt: skip
    return "\n\n".join(part if part.startswith(("|", "#")) else _fill(part) for part in parts) + "\n"


HEAD = """# Promises

What is promised to whoever gives Traincast something odd, and how often it was tried. `tests/promises` has one file
per promise with a seeded slice, and `runs.json` there keeps what long runs tried (those on trees that were not kept are
only there): `scripts/prove --seed S --logs DIR` runs all of them for an hour and has `scripts/write_promises.py` write
this page. What a run found was repaired after it, on a later tree, but for the laws broken on cd5840f5."""
MUTANTS = """## Changed files

`scripts/fuzz --cases 20000 --seed S --log LOG`: files of every format, requests to the server and calls of agents,
changed in their structure and byte by byte. Found by hand: pipes that were waited for, 37 kB of
Parquet that took 3 GB, a view without an end in a database. Before 73d3783c saved predictions were given in the wrong
order: of 400 in the right one 7 broke a promise, of 800 after the repair none."""
LAWS = """## Physics

`python scripts/check_laws.py --seed S --log LOG`: random scenarios of all models and platforms, and pairs of them.
`evaluation/src/traincast_evaluation/laws/exceptions.py` has the exceptions of laws with their physics; those of a run
are as they were in its tree, before its seeds were drawn."""
SIEGES = """## The server

`scripts/siege`: searches, uploads at and above the limit, half headers, slow bodies, a full disk, a
clock that jumps by 400 days, workers killed, on two cores that others use too: `load` is the system's. A client waits
120 s; since b2a644d4 uploads are checked beside searches."""
INTERRUPTIONS = """## Interruptions

`scripts/interrupt`: SIGKILL, SIGINT and a full disk each so often (SIGTERM a fifth); `scripts/kill_bench` a bench."""
SUPPLY = """## Supply chain

`scripts/write_sbom.py` agrees with the lock; its audit reached no database of weaknesses."""


def _fill(text: str) -> str:
    return textwrap.fill(text, 118, break_long_words=False, break_on_hyphens=False)


def write_tests() -> str:
    """The table of promises."""
    lines = ["| promise | inputs of the test | test |", "|---|---|---|"]
    for name, promise in PROMISES.items():
        module = importlib.import_module(f"tests.promises.test_{name}")
        lines.append(f"| {promise} | {module.TRIES} | `tests/promises/test_{name}.py` |")
    return "\n".join(lines)


def _name_run(run: Mapping[str, Any]) -> str:
    return f"| {run['date']} | {run['tree']} | {run['seed']} |"


def write_mutants(runs: list[dict[str, Any]]) -> str:
    """The table of runs with changed files, and what was tried of each format in all."""
    lines = ["| when | tree | seed | changed | still answered | broke a promise |", "|---|---|---|---|---|---|"]
    tried = Counter[str]()
    for run in runs:
        tried.update(run["tried"])
        changed = sum(run["tried"].values())
        lines.append(
            f"{_name_run(run)} {changed:,} | {_format_kept(run.get('answered'))} | {_list_counts(run['found'])} |"
        )
    tried.pop("formats not kept", None)
    return "\n".join(lines) + "\n\n" + _fill(f"{len(tried)} formats, each {min(tried.values()):,} times or more.")


def write_laws(runs: list[dict[str, Any]]) -> str:
    """The table of runs over scenarios, and which laws had an exception in the last."""
    lines = ["| when | tree | seed from | scenarios | pairs | laws | refused | unexplained |", "|---" * 8 + "|"]
    lines += [
        f"{_name_run(run)} {run['scenarios']:,} | {_format_kept(run['pairs'])} | {run['laws']} | "
        f"{_format_kept(run['refused'])} | "
        f"{_list_counts(run['unexplained'])} |"
        for run in runs
    ]
    explained = runs[-1]["explained"]
    often = {law: count for law, count in explained.items() if count >= _OFTEN}
    rest = sum(explained.values()) - sum(often.values())
    return "\n".join(lines) + "\n\n" + _fill(f"Explained in the last: {_list_counts(often)}, others {rest}.")


def _format_kept(count: int | None) -> str:
    return "not kept" if count is None else f"{count:,}"


def _list_counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items())) or "none"


def group_by_count(counts: Mapping[str, int]) -> str:
    """Names that were tried as often as each other, together."""
    return "; ".join(
        f"{often:,} of {', '.join(name for name, count in sorted(counts.items()) if count == often)}"
        for often in sorted(set(counts.values()), reverse=True)
    )


def write_sieges(runs: list[dict[str, Any]]) -> str:
    """What a server stood."""
    lines = [
        "| when | tree | minutes | load | requests | workers killed | "
        "quick questions: n, median, 95 % below, worst (s) | "
        "beside eight searches: n, 95 % below, worst (s) | MB in the second and last third | broken promises |",
        "|---" * 10 + "|",
    ]
    for run in runs:
        quick, beside, held = run["quick"], run["quick_beside_eight"], run["server_mb"]
        broken = ", ".join(f"{count} x {what}" for what, count in run["problems"].items()) or "none"
        lines.append(
            f"| {run['date']} | {run['tree']} | {run['minutes']:g} | {run['load']:g} | "
            f"{run['requests']:,} | {run['workers_killed']} | "
            f"{quick['n']:,}, {quick['median_s']}, {quick['p95_s']}, {quick['worst_s']} | "
            f"{beside['n']}, {beside['p95_s']}, {beside['worst_s']} | "
            f"{held['second_third']}, {held['last_third']} | {broken} |"
        )
    return "\n".join(lines)


def write_ended(runs: list[dict[str, Any]]) -> str:
    """Which commands were ended, and how often."""
    lines = ["| when | tree | ended | broken |", "|---" * 4 + "|"]
    for run in runs:
        killed = f"; bench {sum(run['places'].values())} ({group_places(run)})" if run["places"] else ""
        ended = f"{group_by_count(run['times'])}{killed}"
        lines.append(f"| {run['date']} | {run['tree'] or 'not kept'} | {ended} | {run['broken']} |")
    return "\n".join(lines)


def group_places(run: dict[str, Any]) -> str:
    """Where a bench was when it was killed."""
    return ", ".join(f"{place} {count}" for place, count in run["places"].items())


if __name__ == "__main__":
    sys.exit(main())
