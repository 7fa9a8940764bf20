"""The profile of a machine that was measured: a model per kind of op, host overheads, caches, and what cores lose to
each other.

Each op of a small step is timed twice, the step alone on the machine and the same step on all cores at once; the factor
of a kind is what its ops take together over what they take alone. No model is in between.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from traincast.costs.cpu.collectives import CollectiveModels
from traincast.costs.cpu.estimator import KindModel
from traincast.costs.cpu.features import OTHER, Caches, Features, get_family, get_kind
from traincast.costs.cpu.samples import Sample, format_signature
from traincast.hardware.device import cpu_device
from traincast.hardware.platform import Platform
from traincast.utils.errors import TraincastError
from traincast.utils.files.reading import format_path, parse_toml, read_text
from traincast.utils.files.writing import write_bytes

_PRIOR = 12.0  # ops that weigh as much as their family, or as no loss at all
_LIMITS = (1.0, 3.0)  # of a factor: nobody gains by neighbours, and beyond, something else was measured


@dataclass(frozen=True, slots=True)
class Contention:
    """How many times as long ops take: by number of ranks and kind or family ("2 add", "2 elementwise")."""

    factors: Mapping[str, float] = field(default_factory=dict)

    def factor(self, ranks: int, kind: str) -> float:
        """The factor of a kind; of its family where it was not measured, 1 where nothing was."""
        family = self.factors.get(f"{ranks} {get_family(kind)}", 1.0)
        return self.factors.get(f"{ranks} {kind}", family)


def fit_crowding(samples: Iterable[Sample], clock: str) -> Contention:
    """Factors from ops that were timed in steps both alone and together."""
    alone: dict[tuple[str, str], list[float]] = {}
    together: dict[int, list[Sample]] = {}
    for sample in samples:
        if sample.found and sample.ranks == 1:
            alone.setdefault(_name_what(sample), []).append(sample.ratio(clock))
        elif sample.found:
            together.setdefault(sample.ranks, []).append(sample)
    factors: dict[str, float] = {}
    for ranks, some in together.items():
        pairs: dict[str, list[tuple[float, float]]] = {}
        for sample in some:
            if _name_what(sample) in alone:
                assert sample.signature is not None
                before = float(np.median(alone[_name_what(sample)]))
                pairs.setdefault(get_kind(sample.signature), []).append((before, sample.ratio(clock)))
        factors |= {f"{ranks} {name}": round(value, 4) for name, value in _measure_factors(pairs).items()}
    return Contention(factors)


def _name_what(sample: Sample) -> tuple[str, str]:
    """What is equal of an op timed alone and together."""
    assert sample.signature is not None
    return format_signature(sample.signature), sample.access


def _measure_factors(pairs: Mapping[str, Sequence[tuple[float, float]]]) -> dict[str, float]:
    """Of families towards 1 and of kinds towards their family, the more so the fewer ops there are."""
    families: dict[str, list[tuple[float, float]]] = {}
    for kind, some in pairs.items():
        families.setdefault(get_family(kind), []).extend(some)
    found = {family: _shrink_factor(some, 1.0) for family, some in families.items()}
    return found | {kind: _shrink_factor(some, found[get_family(kind)]) for kind, some in pairs.items()}


def _shrink_factor(pairs: Sequence[tuple[float, float]], towards: float) -> float:
    """Time together over time alone, long ops counting more."""
    alone, together = (sum(column) for column in zip(*pairs, strict=True))
    trust = len(pairs) / (len(pairs) + _PRIOR)
    factor = np.exp(trust * np.log(together / alone) + (1.0 - trust) * np.log(towards))
    return float(np.clip(factor, *_LIMITS))


KIND = "calibrated"
"""What `kind` says in the file of such a profile."""
_LONGEST_LINE = 200  # of the first four, in which a profile says what it is
_MOST_BYTES = 32 << 20
_MOST, _MOST_COUNT = 10.0, 1e15  # of seconds, of deviations of logarithms, of factors; of bytes and samples
_SHORTEST = -0.5  # of `longer`: ops of a step take a little less time than alone, never half of it
_FORM = 4  # of the features that models are fitted to; those of another form mean something else


@dataclass(frozen=True, eq=False, kw_only=True)
class Profile:
    """Seconds on one machine. `reference` is how long its reference kernel took, by `clock`; `host` are seconds per
    event of the host (`HOST_EVENTS`); `identity` is what was measured, `errors` what was held out said. `exchanges` are
    between ranks, `crowding` is what ops lose while all ranks compute, `jitter` the relative deviation of what a rank
    computes from step to step; `longer` is by how much the ops of a step take longer than the medians of their times
    add up to (0.03: three percent)."""

    identity: Mapping[str, Any]
    clock: str
    reference: float
    caches: Caches
    models: Mapping[str, KindModel]
    host: Mapping[str, float]
    host_spread: float
    errors: tuple[Mapping[str, Any], ...]
    samples: int
    exchanges: CollectiveModels = field(default_factory=CollectiveModels)
    crowding: Contention = field(default_factory=Contention)
    jitter: float = 0.0
    longer: float = 0.0

    def seconds(self, features: Features) -> tuple[float, float, bool]:
        """Seconds of an op, the deviation of their logarithm, and whether its kind was measured."""
        model = self.models.get(features.kind)
        if model is not None and len(model.coefficients) == len(features.terms):
            return (*model.predict(features.terms, features.place), True)
        other = self.models[OTHER]
        return (*other.predict(features.terms[:4], features.place[:0]), False)


def save_profile(profile: Profile, path: str | Path) -> None:
    """Writes the profile as TOML."""
    tables = {
        "": {
            "kind": KIND, "form": _FORM, "clock": profile.clock, "reference_seconds": profile.reference,
            "l2_bytes": profile.caches.l2, "l3_bytes": profile.caches.l3, "host_spread": profile.host_spread,
            "samples": profile.samples, "jitter": profile.jitter, "longer": profile.longer,
            "exchanges_widened": profile.exchanges.widened, "exchanges_late": profile.exchanges.late,
        },
        "identity": dict(profile.identity),
        "host_seconds": dict(profile.host),
        "crowding": {json.dumps(name): factor for name, factor in profile.crowding.factors.items()},
        **_write_tables("models", profile.models),
        **_write_tables("exchanges", profile.exchanges.seconds),
    }  # fmt: skip
    lines = ["# Fitted from microbenchmarks of one machine by 'traincast fit'; see identity."]
    for name, table in tables.items():
        lines += [f"\n[{name}]"] if name else []
        lines += [f"{key} = {json.dumps(value)}" for key, value in table.items()]
    for row in profile.errors:
        lines += ["\n[[errors]]", *(f"{key} = {json.dumps(value)}" for key, value in row.items() if value is not None)]
    write_bytes(path, ("\n".join(lines) + "\n").encode())


def _write_tables(title: str, models: Mapping[str, KindModel]) -> dict[str, dict[str, Any]]:
    return {f"{title}.{json.dumps(name)}": model.to_dict() for name, model in models.items()}


def _read_models(table: Mapping[str, Any], title: str) -> dict[str, KindModel]:
    """Models of a part that profiles of earlier versions do not have."""
    return {name: KindModel.from_dict(data) for name, data in table.get(title, {}).items()}


def _read_number(table: Mapping[str, Any], name: str, *, above: float | None = None, most: float = _MOST) -> float:
    """A number that is not negative, or larger than `above`, and at most `most`; a damaged one is named."""
    value = float(table[name])
    if not value <= most or (value < 0 if above is None else value <= above):
        least = "a number from 0" if above is None else f"a number above {above:g}"
        raise ValueError(f"{name} is {value:g}, give {least} to {most:g}")
    return value


def is_profile(path: str | Path) -> bool:
    """Whether this file begins as a fitted profile does."""
    try:
        if not Path(path).is_file():  # a pipe or a device is never waited for
            return False
        with Path(path).open(encoding="utf-8", errors="replace") as file:
            lines = [file.readline(_LONGEST_LINE) for _ in range(4)]
    except (OSError, ValueError):
        return False
    return any(line.replace(" ", "").startswith(f'kind="{KIND}"') for line in lines)


def load_profile(path: str | Path) -> Profile:
    """Reads a profile; a damaged one is named with what is wrong in it."""
    where = f"profile '{format_path(path)}'"
    table = parse_toml(read_text(str(path), most=_MOST_BYTES), where)
    if table.get("kind") == KIND and table.get("form", 1) != _FORM:
        raise TraincastError(
            f"{where} was fitted by another version of traincast; fit its store again: 'traincast fit'"
        )
    crowding = table.get("crowding", {})
    try:
        return Profile(
            identity=table["identity"],
            clock=str(table["clock"]),
            reference=_read_number(table, "reference_seconds", above=0.0),
            caches=Caches(*(_read_number(table, f"l{n}_bytes", above=0.0, most=_MOST_COUNT) for n in (2, 3))),
            models=_read_models({"models": table["models"]}, "models"),
            host={name: _read_number(table["host_seconds"], name) for name in table["host_seconds"]},
            host_spread=_read_number(table, "host_spread"),
            errors=tuple(table.get("errors", ())),
            samples=int(_read_number(table, "samples", most=_MOST_COUNT)),
            exchanges=CollectiveModels(
                _read_models(table, "exchanges"),
                widened=_read_number({"exchanges_widened": 1.0} | table, "exchanges_widened", above=0.0),
                late=_read_number({"exchanges_late": 0.0} | table, "exchanges_late"),
            ),
            crowding=Contention({name: _read_number(crowding, name, above=0.0) for name in crowding}),
            jitter=_read_number({"jitter": 0.0} | table, "jitter"),
            longer=_read_number({"longer": 0.0} | table, "longer", above=_SHORTEST),
        )
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise TraincastError(f"{where} is damaged ({error!r}); fit it again with 'traincast fit'") from None


HERE = "here"
"""The name of the machine at hand."""


@dataclass(frozen=True, kw_only=True)
class Machine(Platform):
    """The platform of a profile: one core for each rank, joined by gloo."""

    profile: Profile


def make_machine_platform(profile: Profile, key: str = "here") -> Machine:
    """The platform of a profile that `traincast fit` wrote."""
    identity = profile.identity
    device = cpu_device(
        key, str(identity.get("name", key)), memory_bytes=float(identity.get("memory_bytes") or 0.0),
        l2_bytes=profile.caches.l2,
    )  # fmt: skip
    return Machine(key=key, device=device, profile=profile)


def get_profile_home() -> Path:
    """Where stores and profiles of this machine are kept: $TRAINCAST_HOME, else the user's data folder."""
    named = os.environ.get("TRAINCAST_HOME")
    if named:
        return Path(named)
    data = os.environ.get("XDG_DATA_HOME")
    return (Path(data) if data else Path.home() / ".local" / "share") / "traincast"


def get_profile_file() -> Path:
    """The profile that `here` means."""
    return get_profile_home() / "here.toml"


def is_here(on: str) -> bool:
    """Whether a platform's name means a machine that was measured: `here`, or the file of a fitted profile."""
    return on == HERE or (on.endswith(".toml") and is_profile(on))


def find_profile(on: str | Profile) -> Profile:
    """The profile of `here`, or of a file."""
    if isinstance(on, Profile):
        return on
    path = get_profile_file() if on == HERE else Path(on)
    if not path.is_file():
        raise TraincastError(
            f"no profile '{format_path(path)}'; measure this machine with 'traincast bench', then fit its `store` with "
            "'traincast fit'"
        )
    return load_profile(path)


def load_machine(on: str | Profile = HERE) -> Machine:
    """The platform of `here`, of a profile's file, or of a profile: what `predict_step` takes."""
    key = HERE if isinstance(on, Profile) or on == HERE else Path(on).stem
    return make_machine_platform(find_profile(on), key)
