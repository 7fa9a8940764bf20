"""What an evaluation on this machine stands on: its profile, and gloo between its ranks, measured once and kept."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from traincast.calibration.profile import Profile
from traincast.errors import TraincastError
from traincast.evaluation.here_predictor import HerePredictor
from traincast.files.reading import parse_json, read_text, shown_path
from traincast.files.writing import write_json
from traincast.questions.here import find_profile
from traincast.trials.gloo import gloo_curves, gloo_jobs
from traincast.trials.ranks import run_ranks

_RANKS = 2


@dataclass(frozen=True, slots=True)
class HereSetting:
    """The predictor, what its answers follow from as text, the seconds of its reference kernel by its clock, what to
    say."""

    predictor: HerePredictor
    basis: str
    nominal: float
    clock: str
    notes: tuple[str, ...]


def setting(folder: Path, on: str, *, gloo: bool) -> HereSetting:
    """The profile `on`, and with `gloo` the curves of collectives, which are measured into `folder` if they are not
    there."""
    profile = find_profile(on)
    if not folder.is_dir():
        raise TraincastError(f"'{shown_path(folder)}' is no folder; measure this machine with 'traincast bench' first")
    rows = _gloo_rows(folder, profile) if gloo else []
    curves = gloo_curves(rows, profile.reference) if gloo else None
    basis = json.dumps([dict(profile.identity), profile.reference, profile.clock, profile.samples, rows])
    said = f"seconds of a machine whose reference kernel takes {1e3 * profile.reference:.3f} ms ({profile.clock} time)"
    return HereSetting(HerePredictor(profile, curves), basis, profile.reference, profile.clock, (said,))


def _gloo_rows(folder: Path, profile: Profile) -> list[dict[str, Any]]:
    """What ranks measured of gloo, now or before."""
    path = folder / f"gloo-{_RANKS}-ranks.json"
    if path.exists():
        content = parse_json(read_text(path), shown_path(path))
        if isinstance(content, dict) and content.get("identity") == dict(profile.identity):
            return list(content["rows"])
        raise TraincastError(f"'{shown_path(path)}' is of another machine or library; remove it to measure again")
    rows: list[dict[str, Any]] = []
    run_ranks(gloo_jobs(), _RANKS, each=rows.append)
    write_json(path, {"identity": dict(profile.identity), "rows": rows})
    return rows
