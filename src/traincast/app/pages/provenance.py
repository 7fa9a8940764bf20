"""Where numbers of a page come from: device, host, software, and the measurements behind the kernel models."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from traincast.app.pages.elements import Html, fold_block, join_blocks, make_facts, make_list, make_table
from traincast.app.pages.page import Section
from traincast.costs.host.profile import load_host_profile
from traincast.costs.kernels.evidence import describe_profile, list_measured_devices
from traincast.costs.kernels.families import BY_NAME
from traincast.hardware.platform import Platform
from traincast.traces.formats import SUFFIXES
from traincast.traces.scan import ByteSource
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
