"""What an evaluation on this machine stands on: its profile."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from traincast.costs.cpu.profile import find_profile
from traincast.utils.errors import TraincastError
from traincast.utils.files.reading import format_path
from traincast_evaluation.suites.here_predictor import HerePredictor


@dataclass(frozen=True, slots=True)
class HereSetting:
    """The predictor, what its answers follow from as text, the seconds of its reference kernel by its clock, what to
    say."""

    predictor: HerePredictor
    basis: str
    nominal: float
    clock: str
    notes: tuple[str, ...]


def load_here_setting(folder: Path, on: str, *, ranks: bool) -> HereSetting:
    """The profile `on`; with `ranks` it must know collectives."""
    profile = find_profile(on)
    if not folder.is_dir():
        raise TraincastError(f"'{format_path(folder)}' is no folder; measure this machine with 'traincast bench' first")
    if ranks and not profile.exchanges.seconds:
        raise TraincastError(
            f"the profile '{on}' has no collectives, and steps of two ranks need them; measure with 'traincast bench' "
            "on two cores, then fit again"
        )
    basis = json.dumps(
        [dict(profile.identity), profile.reference, profile.clock, profile.samples, list(map(dict, profile.errors))]
    )
    said = f"seconds of a machine whose reference kernel takes {1e3 * profile.reference:.3f} ms ({profile.clock} time)"
    return HereSetting(HerePredictor(profile), basis, profile.reference, profile.clock, (said,))
