"""Parts that pages share: the number at the top, shares of a step, tables of records, and what stands behind the
numbers."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from traincast.app.pages.page import (
    Html,
    Section,
    Tile,
    escape_html,
    fold_block,
    join_blocks,
    make_bar,
    make_facts,
    make_list,
    make_paragraph,
    make_stack,
    make_table,
)
from traincast.costs.host.profile import load_host_profile
from traincast.costs.kernels.families import BY_NAME, describe_profile, list_measured_devices
from traincast.hardware.platform import Platform
from traincast.planner.what_if.money import Prices, compute_cost
from traincast.simulator.prediction.rank_results import Note, Trust
from traincast.simulator.prediction.result import Prediction, rank_bounds, state_memory
from traincast.traces.formats import SUFFIXES
from traincast.traces.scan import ByteSource
from traincast.utils.display.text import format_dollars, format_duration, format_interval, format_milliseconds
from traincast.utils.errors import TraincastError
from traincast.utils.version import __version__

_GIT_SECONDS = 2  # longer than any repository takes to name its commit


def make_provenance_section(families: Collection[str], platform: Platform, host_profile: str) -> Section:
    """Which rows, software and commit the kernel times, the host's and the links come from."""
    rows = [row for family in families for row in _list_family_rows(family, platform.device.key)]
    measured = make_table(
        ("kernels", "measured in", "on this device", "rows fitted", "held out", "error on those, %"), rows,
        right=(3, 4, 5), caption="Measurements that the kernel models were fitted on",
    )  # fmt: skip
    device, host = platform.device, load_host_profile(host_profile)
    known = [
        ("Device", f"{device.name}: {device.source}"),
        ("Host profile", f"{host.name}: {_describe_host_source(host.provenance)}"),
        ("Links", platform.assumed or ("of the node as described" if platform.topology else "one GPU, none used")),
        ("Software", f"traincast {__version__}{_format_commit()}"),
    ]
    return Section(
        key="provenance",
        title="Sources",
        html=join_blocks([make_facts(known), measured, _list_sources(families)]),
        wide=True,
    )


def make_software_section(pairs: Iterable[tuple[str, str]]) -> Section:
    """The same of a result without kernel models: what was read, and the code."""
    known = [*pairs, ("Software", f"traincast {__version__}{_format_commit()}")]
    return Section(key="provenance", title="Sources", html=make_facts(known), wide=True)


def _list_family_rows(family: str, device: str) -> list[tuple[str, ...]]:
    """The tables of one family; rows and errors are those of each, or of all together where only that is known."""
    if family not in BY_NAME:
        return []
    record = BY_NAME[family]
    if not record.profile:
        source = "collectives measured on nodes" if family == "collective" else "first principles"
        return [(family, source, "", "", "", "")]
    known = describe_profile(record.profile)
    files = known.get("files", {})
    entries = files if isinstance(files, dict) else {", ".join(files): known}
    devices = list_measured_devices(family)
    here = (", ".join(devices[device]) or "yes") if device in devices else "no"
    return [
        (family, name, here, _format_count(entry.get("rows_fitted")), _format_count(entry.get("rows_held_out")),
         _format_percent(entry.get("mean_error_percent_held_out")))
        for name, entry in entries.items() if isinstance(entry, dict)
    ]  # fmt: skip


def _list_sources(families: Iterable[str]) -> Html:
    """The repositories that measurements came from, with their commits and licences, each once."""
    profiles = dict.fromkeys(BY_NAME[family].profile for family in families if family in BY_NAME)
    named = dict.fromkeys(
        str(source) for name in profiles if name for source in describe_profile(name).get("sources", ())
    )
    return fold_block(f"sources ({len(named)})", make_list(named))


def _format_count(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else ""


def _format_percent(value: Any) -> str:
    return f"{value:.1f}" if isinstance(value, int | float) else ""


def _describe_host_source(provenance: Mapping[str, Any]) -> str:
    """The profile's own words on its host and date."""
    words = [str(provenance[name]) for name in ("host", "cpu", "date") if name in provenance]
    return ", ".join(words) or "see its file"


def _format_commit() -> str:
    commit = _read_commit()
    return f", commit {commit}" if commit else ""


@cache
def _read_commit() -> str:
    """The commit of a source checkout ("": installed from a wheel, or git is not there)."""
    root = Path(__file__).resolve().parents[4]
    if not (root / ".git").exists():
        return ""
    try:
        done = subprocess.run(
            ["git", "-C", str(root), "rev-parse", "HEAD"],
            capture_output=True, text=True, timeout=_GIT_SECONDS, check=False,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()[:12] if done.returncode == 0 else ""


_SNIFFED = 1 << 16  # bytes: a configuration of a model names itself in its first lines
_SWEEP = re.compile(rb'\s*\{\s*"workload"\s*:\s*"[^"]*",\s*"axes"\s*:')
_EVALUATION = re.compile(rb'\s*\{\s*"summary"\s*:\s*\[')
# configurations of Hugging Face, and what 'evaluate' and 'sweep' write
_OTHER = re.compile(
    rb'"(?:model_type|architectures|hidden_size|hidden_act)"|\A' + _EVALUATION.pattern + rb"|\A" + _SWEEP.pattern
)


def is_trace(source: str) -> bool:
    """Whether a name is that of a folder of traces or of a trace file; a `config.json` of a model is none."""
    with suppress(OSError, ValueError):
        path = Path(source)
        if source.strip() and path.is_dir():
            return True
        return source.endswith(SUFFIXES) and path.is_file() and not _OTHER.search(_read_start(path))
    return False


def is_evaluation(source: str) -> bool:
    """Whether a name is that of a file which 'evaluate' wrote as JSON."""
    return _matches_start(source, _EVALUATION)


def is_sweep(source: str) -> bool:
    """Whether a name is that of a file which 'sweep' wrote as JSON."""
    return _matches_start(source, _SWEEP)


def _matches_start(source: str, how: re.Pattern[bytes]) -> bool:
    with suppress(OSError, ValueError):
        return source.endswith(".json") and Path(source).is_file() and how.match(_read_start(Path(source))) is not None
    return False


def _read_start(path: Path) -> bytes:
    """The first bytes of a file, unpacked; what cannot be read has none, and its reader says what is wrong with it."""
    try:
        source = ByteSource(path)
        try:
            return source.read(_SNIFFED)
        finally:
            source.close()
    except TraincastError:
        return b""


_MOST_ROWS = 200  # of a table of records: a page is for reading; `records` has them all

_UNITS = {"ms": "ms", "us": "us", "gb": "GB", "gbs": "GB/s", "mb": "MB", "kwh": "kWh", "watts": "W", "%": "%"}
_COLUMNS = {"low_ms": "from, ms", "high_ms": "to, ms", "samples_per_s": "samples/s", "iteration_ms": "ms per step",
            "gpu_hours_per_million_samples": "GPU h per million samples",
            "dollars_per_million_samples": "$ per million samples"}  # fmt: skip
_CODE = re.compile(r"`([^`]+)`")

NO_PRICE = "No price of a GPU was given, so there are no dollars here."


def make_step_tile(p: Prediction, label: str = "One step") -> Tile:
    """The time of a step and its interval."""
    return Tile(label, format_duration(p.iteration), f"90 % interval {format_interval(p.interval)}")


def make_bound_tile(p: Prediction) -> Tile:
    """What takes most of the step, and what comes next."""
    (name, share), *rest = rank_bounds(p)
    after = "".join(f"then {other} {part:.0%}; " for other, part in rest)
    return Tile("Bound by", f"{name} {share:.0%}", f"{after}device active {p.device_active / (p.iteration or 1):.0%}")


def make_memory_tile(p: Prediction) -> Tile:
    """Whether it fits, and how full the fullest GPU is."""
    word, _, used = state_memory(p).partition(", ")
    kind = "poor" if "does not fit" in word else "good" if word == "fits" else ""
    return Tile("Memory", word.capitalize(), f"{used} {'needed' if kind == 'poor' else 'used'}" if used else "", kind)


def make_cost_tile(p: Prediction, price: float | None) -> Tile:
    """Dollars of a million samples or a billion tokens; without a price, hours of GPUs."""
    cost = compute_cost(p, Prices(per_gpu_hour=price or None))
    per, units = ("billion tokens", 1e9 / cost.tokens) if cost.tokens else ("million samples", 1e6 / cost.samples)
    if cost.dollars_per_step is None:
        spent = format_duration(units * cost.gpus * cost.seconds)
        return Tile("GPU time", spent, f"of one GPU per {per}; no price was given")
    return Tile("Cost", format_dollars(units * cost.dollars_per_step), f"per {per}, at ${price:g} per GPU and hour")


def make_step_tiles(p: Prediction, price: float | None) -> list[Tile]:
    """The four figures of a predicted step."""
    return [make_step_tile(p), make_bound_tile(p), make_memory_tile(p), make_cost_tile(p, price)]


def make_verdict_html(trust: Trust) -> Html:
    """What the number rests on, in a word and a line."""
    word, _, line = trust.sentence.partition(": ")
    kind = {"measured": "good", "partly extrapolated": "fair"}.get(trust.word, "poor")
    return join_blocks([make_paragraph(word, f"verdict {kind}"), make_paragraph(line[:1].upper() + line[1:], "note")])


def make_warnings_html(warnings: Iterable[str]) -> Html:
    """Warnings of a result and then its notes, or nothing; what stands between backticks is code."""
    remarks = list(warnings)
    notes = [remark for remark in remarks if isinstance(remark, Note)]
    serious = [remark for remark in remarks if not isinstance(remark, Note)]
    return join_blocks([make_list(map(_mark_code, serious), "warnings"), make_list(map(_mark_code, notes), "notes")])


def _mark_code(text: str) -> Html:
    return Html(_CODE.sub(r"<code>\1</code>", escape_html(str(text))))


def make_step_stack(
    parts: Sequence[tuple[str, float]], whole: float, label: str, longest: float | None = None
) -> Html:  # fmt: skip
    """Parts of a step (seconds) side by side; `longest` is what a full width stands for (default: this step)."""
    whole = whole or 1.0
    shown = [(name, seconds, f"{format_milliseconds(seconds)} ms, {seconds / whole:.0%}") for name, seconds in parts]
    return make_stack(shown, label, 1.0 if longest is None else whole / (longest or 1.0))


def make_seconds_table(what: str, seconds: Mapping[str, float], caption: str, most: int = 15) -> Html:
    """Names with their seconds, longest first, as milliseconds, shares and bars; the rest in one line."""
    ranked = sorted(seconds.items(), key=lambda item: -item[1])
    shown, rest = ranked[:most], ranked[most:]
    if rest:
        shown.append((f"{len(rest)} more", sum(length for _, length in rest)))
    whole = sum(seconds.values()) or 1.0
    longest = max((length for _, length in shown), default=0.0) or 1.0
    rows = [(name, format_milliseconds(s), f"{s / whole:.1%}", make_bar(s / longest)) for name, s in shown]
    return make_table((what, "ms", "share", ""), rows, right=(1, 2), caption=caption)


def make_records_table(rows: Sequence[Mapping[str, Any]], caption: str) -> Html:
    """Plain rows as a table: columns as they come, numbers in few digits; what is too long for a page is cut."""
    header = list(dict.fromkeys(column for row in rows for column in row))
    shown = rows[:_MOST_ROWS]
    numbers = [at for at, name in enumerate(header) if any(_is_number(row.get(name)) for row in shown)]
    cells = [[_format_cell(row.get(name)) for name in header] for row in shown]
    more = f" (the first {_MOST_ROWS} of {len(rows)})" if len(rows) > len(shown) else ""
    titles = [_name_column(name) for name in header]
    return make_table(titles, cells, right=numbers, caption=f"{caption}{more}")


def fold_records(records: Mapping[str, Sequence[Mapping[str, Any]]]) -> Html:
    """Tables of a result, each behind its name."""
    named = [(name.replace("_", " "), rows) for name, rows in records.items() if rows]
    return join_blocks(fold_block(f"{name} ({len(rows)})", make_records_table(rows, name)) for name, rows in named)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _format_cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return format_number(value) if _is_number(value) else str(value)


def format_number(value: float) -> str:
    """A number as people write it, four digits and never an exponent: `0.0123`, `12.35`, `1,234`, `< 0.001`.

    >>> [format_number(x) for x in (6.4512e-05, 0.01234, 12.345, 1234.5, 2287130, 0.0)]
    ['< 0.001', '0.0123', '12.35', '1,234', '2,287,130', '0']
    """
    size = abs(value)
    if isinstance(value, int) or size >= 1000:
        return f"{value:,.0f}"
    if 0 < size < 0.001:
        return "< 0.001"
    return f"{value:#.3g}" if 0 < size < 1 else f"{value:#.4g}".rstrip(".") if size else "0"


def _name_column(name: str) -> str:
    """A key of plain data as a heading: `memory_gb` is `memory, GB`."""
    whole = _COLUMNS.get(name)
    stem, _, unit = name.rpartition("_")
    return whole or (f"{stem}, {_UNITS[unit]}".lstrip(", ") if unit in _UNITS else name).replace("_", " ")
