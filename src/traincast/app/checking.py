"""A gate on performance without a GPU: scenarios predicted again and compared with a stored baseline."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape, quoteattr

from traincast.app.predicting import predict
from traincast.simulator.scenario.resolved import make_scenario, read_scenario
from traincast.simulator.scenario.scenario import list_scenario_fields
from traincast.utils.display.text import count_of
from traincast.utils.errors import TraincastError, shorten_value
from traincast.utils.files.reading import format_path, read_document
from traincast.utils.files.writing import lock_folder, write_bytes
from traincast.utils.results import Records, Result
from traincast.utils.version import __version__

MEASURES = {"step": "iteration_ms", "memory": "memory_gb", "kernels": "kernels", "communication": "exposed_comm_ms"}
"""What can be gated, and the figure that it is."""
DEFAULT_GATE = "step:+3%,memory:+2%,kernels:+5%"
_UNITS = {"step": "ms", "memory": "GB", "kernels": "", "communication": "ms"}
_MOST_NAMED = 3  # ops and modules that explain a change
_LEAST_MS = 1e-3
_MOST_SCENARIOS = 1000


@dataclass(frozen=True, kw_only=True)
class Checked:
    """One scenario: its figures `then` (None: new in the baseline) and `now`, the limits it broke, in words."""

    name: str
    then: Mapping[str, Any] | None
    now: Mapping[str, Any]
    broken: tuple[str, ...]

    @property
    def change(self) -> str:
        """The step then and now: `12.4 ms, was 12.1 (+2.5%)`."""
        now = self.now["iteration_ms"]
        if self.then is None:
            return f"{now:.4g} ms, not in the baseline"
        then = self.then["iteration_ms"]
        return f"{now:.4g} ms, was {then:.4g} ({now / then - 1:+.1%})"

    @property
    def why(self) -> list[str]:
        """The ops and modules that changed most, in milliseconds of kernel time."""
        if self.then is None or not self.broken:
            return []
        lines = []
        for kind in ("op", "module"):
            before, after = self.then[f"by_{kind}"], self.now[f"by_{kind}"]
            moved = {name: after.get(name, 0.0) - before.get(name, 0.0) for name in {**before, **after}}
            largest = sorted(moved, key=lambda name: (-abs(moved[name]), name))[:_MOST_NAMED]
            named = [f"{name} {moved[name]:+.3g} ms" for name in largest if abs(moved[name]) >= _LEAST_MS]
            lines += [f"by {kind}: {', '.join(named)}"] if named else []
        return lines


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class CheckResult(Result):
    """Every scenario against the baseline under a gate (shares by measure); `notes` say what else to know."""

    baseline: Path
    gate: Mapping[str, float]
    rows: tuple[Checked, ...]
    notes: tuple[str, ...] = ()
    updated: str = ""

    @property
    def passed(self) -> bool:
        """Whether no scenario broke a limit."""
        return not any(row.broken for row in self.rows)

    def headline(self) -> str:
        """Passed or not, and a line per scenario."""
        if self.updated:
            first = f"{count_of(len(self.rows), 'scenario')} written to {format_path(self.baseline)}: {self.updated}"
        elif self.passed:
            first = f"passed: {count_of(len(self.rows), 'scenario')} within {format_gate(self.gate)}"
        else:
            failed = sum(bool(row.broken) for row in self.rows)
            first = f"failed: {failed} of {count_of(len(self.rows), 'scenario')} beyond {format_gate(self.gate)}"
        lines = [first]
        for row in self.rows:
            lines.append(f"  {'FAIL' if row.broken else 'ok  '} {row.name}: {row.change}")
            lines += [f"       {text}" for text in (*row.broken, *row.why)]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "baseline": str(self.baseline), "passed": self.passed, "updated": self.updated, "gate": dict(self.gate),
            "scenarios": [
                {"name": row.name, "passed": not row.broken, "then": row.then, "now": row.now,
                 "broken": list(row.broken), "why": row.why}
                for row in self.rows
            ],
            "notes": list(self.notes),
        }  # fmt: skip

    def records(self) -> Records:
        """Table "scenarios": the figures of each, then and now."""
        return {"scenarios": [
            {"scenario": row.name, "passed": not row.broken}
            | {f"{figure}_then": row.then and row.then[figure] for figure in MEASURES.values()}
            | {figure: row.now[figure] for figure in MEASURES.values()}
            for row in self.rows
        ]}  # fmt: skip

    def to_markdown(self) -> str:
        """A table for a summary of a CI run."""
        word = "passed" if self.passed else "failed"
        lines = [f"### Traincast: {word}", "", "| scenario | step, ms | memory, GB | |", "|---|---|---|---|"]
        for row in self.rows:
            why = "; ".join((*row.broken, *row.why)).replace("|", "\\|")
            lines.append(f"| {row.name} | {row.change} | {row.now['memory_gb']:.2f} | {why or 'ok'} |")
        return "\n".join([*lines, *(f"\n{note}" for note in self.notes), ""])

    def to_junit(self) -> str:
        """The same as JUnit XML, which CI systems show."""
        cases = []
        for row in self.rows:
            text = "\n".join((*row.broken, *row.why))
            inner = f"<failure message={quoteattr(row.broken[0])}>{escape(text)}</failure>" if row.broken else ""
            seconds = 1e-3 * row.now["iteration_ms"]
            head = f'<testcase classname="traincast" name={quoteattr(row.name)} time="{seconds:.6f}">'
            cases.append(f"{head}{inner}</testcase>")
        failures = sum(bool(row.broken) for row in self.rows)
        head = f'<testsuite name="traincast" tests="{len(cases)}" failures="{failures}">'
        return f'<?xml version="1.0" encoding="utf-8"?>\n{head}{"".join(cases)}</testsuite>\n'


def parse_gate(text: str) -> dict[str, float]:
    """Shares by measure of `step:+3%,memory:+2%`.

    >>> parse_gate("step:+3%, memory:2.5%")
    {'step': 0.03, 'memory': 0.025}
    """
    gate = {}
    for part in text.split(","):
        name, _, limit = (word.strip() for word in part.partition(":"))
        try:
            share = float(limit.removesuffix("%")) / 100
        except ValueError:
            share = -1.0
        if name not in MEASURES or not 0 <= share < 100 or not limit.endswith("%"):
            raise TraincastError(f"`gate` {shorten_value(part)}: write MEASURE:+N%, of {', '.join(MEASURES)}")
        gate[name] = share
    return gate


def format_gate(gate: Mapping[str, float]) -> str:
    """A gate as it is written: `step +3%, memory +2%`."""
    return ", ".join(f"{name} +{100 * share:g}%" for name, share in gate.items())


def check(
    scenarios: Sequence[str | Path],
    *,
    baseline: str | Path,
    gate: str = DEFAULT_GATE,
    update: str = "",
    progress: Callable[[float], None] = lambda _: None,
) -> CheckResult:
    """Predicts scenarios (YAML files with the fields of `Scenario`; none: all of the baseline) and compares them with
    the baseline, a JSON file. `update` is a reason to write the baseline anew: nothing is compared then."""
    path, limits = Path(baseline), parse_gate(gate)
    stored = _read_baseline(path, missing_is_empty=bool(update))
    asked = _read_scenarios(scenarios) if scenarios else {name: row["scenario"] for name, row in stored.items()}
    if not asked:
        raise TraincastError(f"{format_path(path)} has no scenarios; name YAML files with fields of a scenario")
    rows = []
    for number, (name, fields) in enumerate(asked.items()):
        now = _measure(fields)
        then = None if update else stored.get(name)
        rows.append(Checked(name=name, then=then, now=now, broken=_find_broken(then, now, limits, strict=not update)))
        progress((number + 1) / len(asked))
    if update:
        with lock_folder(path.parent):
            stored = _read_baseline(path, missing_is_empty=True)  # another process may have written meanwhile
            kept = {**stored, **{row.name: {**row.now, "reason": update} for row in rows}}
            document = {"traincast_baseline": 1, "scenarios": dict(sorted(kept.items()))}
            write_bytes(path, (json.dumps(document, indent=1) + "\n").encode())
    return CheckResult(
        baseline=path, gate=limits, rows=tuple(rows), notes=_note_versions(stored, rows) if not update else (),
        updated=update,
    )  # fmt: skip


def _measure(fields: dict[str, Any]) -> dict[str, Any]:
    """The figures of a scenario that a baseline keeps."""
    result = predict(make_scenario(fields))
    return {
        "scenario": fields,
        "traincast": __version__,
        "iteration_ms": 1e3 * result.iteration,
        "memory_gb": result.needed_bytes / 1e9,
        "kernels": len(result.timeline.launches),
        "exposed_comm_ms": 1e3 * result.exposed_comm,
        "by_op": {name: round(1e3 * seconds, 6) for name, seconds in result.by_op.items()},
        "by_module": {name: round(1e3 * seconds, 6) for name, seconds in result.by_module.items()},
    }


def _find_broken(
    then: Mapping[str, Any] | None, now: Mapping[str, Any], gate: Mapping[str, float], *, strict: bool
) -> tuple[str, ...]:
    """The limits that a scenario breaks; one without a baseline breaks all."""
    if then is None:
        return ("not in the baseline; write it with `update` and a `reason`",) if strict else ()
    broken = []
    for name, share in gate.items():
        before, after = float(then[MEASURES[name]]), float(now[MEASURES[name]])
        if after > before * (1 + share) + 1e-9:
            by = f"{after / before - 1:+.1%}" if before else "from nothing"
            what = f"{name} {after:.4g} {_UNITS[name]}".rstrip()
            broken.append(f"{what}, was {before:.4g}: {by}, allowed +{100 * share:g}%")
    return tuple(broken)


def _note_versions(stored: Mapping[str, Any], rows: Sequence[Checked]) -> tuple[str, ...]:
    """That a baseline of another version may differ by what was learned since."""
    others = sorted({str(stored[row.name].get("traincast", "?")) for row in rows if row.name in stored} - {__version__})
    return (f"the baseline was written by traincast {', '.join(others)}, this is {__version__}",) if others else ()


def _read_scenarios(sources: Sequence[str | Path]) -> dict[str, dict[str, Any]]:
    """The fields of scenarios by the names of their files."""
    found: dict[str, dict[str, Any]] = {}
    for source in sources:
        name = Path(source).stem
        if name in found:
            raise TraincastError(f"two scenarios are called '{name}'; rename a file")
        found[name] = read_scenario(str(source))
    if len(found) > _MOST_SCENARIOS:
        raise TraincastError(f"{len(found)} scenarios; give at most {_MOST_SCENARIOS}")
    return found


def _read_baseline(path: Path, *, missing_is_empty: bool) -> dict[str, Any]:
    """The rows of a baseline by name; what is none is rejected."""
    if not path.is_file():
        if missing_is_empty:
            return {}
        raise TraincastError(f"there is no baseline '{format_path(path)}'; write it with `update` and a `reason`")
    document = read_document(path)
    rows = document.get("scenarios") if isinstance(document, dict) and "traincast_baseline" in document else None
    numbers = [*MEASURES.values()]
    if not isinstance(rows, dict) or not all(
        isinstance(row, dict) and _is_scenario(row.get("scenario"))
        and all(_is_number(row.get(name)) and row[name] >= 0 for name in numbers) and row["iteration_ms"] > 0
        and all(isinstance(row.get(name), dict) and all(map(_is_number, row[name].values()))
                for name in ("by_op", "by_module"))
        for row in rows.values()
    ):  # fmt: skip
        raise TraincastError(f"'{format_path(path)}' is no baseline of 'traincast check'; write it with `update`")
    return rows


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_scenario(value: Any) -> bool:
    """Whether these are fields as a file has them: text, numbers and truth values."""
    return isinstance(value, dict) and all(
        isinstance(field, str) if list_scenario_fields()[name].kind == "text" else isinstance(field, str | int | float)
        for name, field in value.items()
        if name in list_scenario_fields()
    )
