"""What ops lose when every core runs a step of its own: caches and memory are shared.

Each op of a small step is timed twice, the step alone on the machine and the same step on all cores at once; the
factor of a kind is what its ops take together over what they take alone. No model is in between.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from traincast.costs.cpu.features import get_family, get_kind
from traincast.costs.cpu.samples import Sample, format_signature

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
