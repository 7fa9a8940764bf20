"""What ranks exchange: how long a collective takes, fitted to what was measured.

The time of a collective is a call and bytes, with the same smooth correction as every other kind of op. A model is for
one number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import log2

import numpy as np

from traincast.costs.cpu.estimator import KindModel, fit_kind
from traincast.costs.cpu.samples import FIFTHS, Sample, select_calm_samples
from traincast.ir.collectives import COLLECTIVES, UNEVEN_FORM
from traincast.ir.ops import Scalar, Signature, TensorSpec
from traincast.utils.arrays import FloatArray
from traincast.utils.errors import TraincastError
from traincast.utils.metrics import Z90, ErrorRow, compute_error_row, is_within_interval

NAMESPACE = "c10d::"
FAMILY = "collectives"
"""Under which their held-out error is reported."""
_ITEM = 4  # bytes of fp32
_FEWEST = 4  # samples of a kind
_DISTURBED = 1.0  # relative spread beyond which a sample says too little: ranks that wait for each other spread widely
_NEAR_BYTES = 1 << 20  # what is beyond leaves the caches on its way


@dataclass(frozen=True, slots=True)
class CpuCollective:
    """A collective as one rank calls it: its kind, the bytes of its message, and what this rank sends to each."""

    kind: str
    message_bytes: int
    sent: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False, slots=True)
class CollectiveModels:
    """By number of ranks and kind ("2 all_reduce"): seconds of a collective from the moment the last rank calls it.
    `widened` is by how much held-out samples lay further off than their models' own spread says, `late` the seconds by
    which a collective takes longer inside a step (`waits`)."""

    seconds: Mapping[str, KindModel] = field(default_factory=dict)
    widened: float = 1.0
    late: float = 0.0

    def cost(self, exchanges: Sequence[CpuCollective]) -> float:
        """Seconds of a collective from what its ranks call."""
        return self.seconds[self._key(exchanges)].predict(*_describe_collective(exchanges))[0]

    def knows(self, exchanges: Sequence[CpuCollective]) -> bool:
        """Whether this collective, or what stands for it, was measured."""
        return self._found(exchanges) is not None

    def in_step(self, exchanges: Sequence[CpuCollective]) -> float:
        """Seconds of a collective inside a step."""
        return self.cost(exchanges) + self.late

    def sigma(self, exchanges: Sequence[CpuCollective]) -> float:
        """Spread of the logarithm of a collective's time."""
        return self.widened * self.seconds[self._key(exchanges)].predict(*_describe_collective(exchanges))[1]

    def _key(self, exchanges: Sequence[CpuCollective]) -> str:
        """The model of these collectives, or of what stands for them."""
        found = self._found(exchanges)
        if found is not None:
            return found
        kind, ranks = exchanges[0].kind, len(exchanges)
        measured = ", ".join(self.seconds) or "none"
        raise TraincastError(
            f"{kind} between {ranks} ranks was not measured (measured: {measured}); measure with 'traincast bench', "
            "then fit again"
        )

    def _found(self, exchanges: Sequence[CpuCollective]) -> str | None:
        kind, ranks = exchanges[0].kind, len(exchanges)
        for candidate in (kind, COLLECTIVES[kind].like if kind in COLLECTIVES else "", UNEVEN_FORM.get(kind, "")):
            if f"{ranks} {candidate}" in self.seconds:
                return f"{ranks} {candidate}"
        return None


def _describe_collective(exchanges: Sequence[CpuCollective]) -> tuple[FloatArray, FloatArray]:
    """Terms and place of a collective; an uneven one counts as an even one that moves as many bytes between ranks."""
    size, uneven = _count_bytes(exchanges)
    return np.array([1.0, size, max(size - _NEAR_BYTES, 0.0)]), np.array([log2(max(size, 1.0)), uneven])


def _count_bytes(exchanges: Sequence[CpuCollective]) -> tuple[float, float]:
    """Bytes of the message, and how unevenly ranks send (0: all alike, to 1)."""
    if not exchanges[0].sent:
        return float(max(exchange.message_bytes for exchange in exchanges)), 0.0
    leaving = [
        sum(sent for other, sent in enumerate(exchange.sent) if other != rank)
        for rank, exchange in enumerate(exchanges)
    ]
    total, ranks = float(sum(leaving)), len(exchanges)
    if total == 0.0 or ranks == 1:
        return 0.0, 0.0
    return total / (ranks - 1), (max(leaving) - min(leaving)) / max(leaving)


def make_collective_signature(exchanges: Sequence[CpuCollective]) -> Signature:
    """A collective of this many ranks as the signature of a sample."""
    first = exchanges[0]
    record = COLLECTIVES[first.kind]
    name = (record.ops or COLLECTIVES[record.uneven_form_of].ops)[0]
    scalars: list[tuple[str, Scalar]] = [("collective", first.kind), ("bytes", first.message_bytes)]
    if first.sent:
        scalars.append(("sent", tuple(exchange.sent for exchange in exchanges)))
    length = first.message_bytes // _ITEM
    return Signature(NAMESPACE + name, (TensorSpec((length,), (1,), "float32"),), (), tuple(scalars), (("tensors", 1),))


def is_collective(signature: Signature | None) -> bool:
    """Whether a sample is of a collective."""
    return signature is not None and signature.name.startswith(NAMESPACE)


def list_collectives(signature: Signature, ranks: int) -> list[CpuCollective]:
    """What every rank called, out of the signature of a sample."""
    kind, size, sent = (signature.scalar(name) for name in ("collective", "bytes", "sent"))
    if not isinstance(kind, str) or not isinstance(size, int) or ranks < 1:
        raise TraincastError("a sample of a collective in the store is damaged; measure it again")
    rows: list[tuple[int, ...]] = [()] * ranks
    if isinstance(sent, tuple) and len(sent) == ranks:
        rows = [tuple(part for part in row if isinstance(part, int)) if isinstance(row, tuple) else () for row in sent]
    return [CpuCollective(kind, size, row) for row in rows]


def fit_collectives(samples: Sequence[Sample], reference: float) -> tuple[CollectiveModels, list[ErrorRow]]:
    """Models of all samples, with the errors that fits on four fifths of them make on the others, each fifth in turn:
    a store has some ten of each kind. Ranks wait, so that the wall's clock counts."""
    steady = [sample for sample in select_calm_samples(samples) if sample.spread < _DISTURBED]
    points = [
        point
        for fifth in range(FIFTHS)
        for point in _measure_held_out(
            [s for s in steady if s.fifth != fifth], [s for s in steady if s.fifth == fifth], reference
        )
    ]
    models = _fit_models(steady, reference)
    if not points:
        return models, []
    guessed, measured, sigmas, fifths = (np.array(column) for column in list(zip(*points, strict=True))[:4])
    off = np.abs(np.log(guessed / measured)) / sigmas
    others = np.array([_widen_sigma(off[fifths != fifth]) for fifth in fifths])
    inside = is_within_interval(guessed, measured, others * sigmas)
    row = compute_error_row("held out", FAMILY, guessed, measured, [point[4] for point in points], inside=inside)
    return replace(models, widened=_widen_sigma(off)), [row]


def _measure_held_out(
    kept: Sequence[Sample], held: Sequence[Sample], reference: float
) -> Iterator[tuple[float, float, float, int, str]]:
    """Predicted and measured seconds, spread, fifth and name of samples that took no part."""
    models = _fit_models(kept, reference).seconds
    for sample in held:
        met = list_collectives(_make_signature(sample), sample.ranks)
        key = f"{sample.ranks} {met[0].kind}"
        if key in models:
            predicted, sigma = models[key].predict(*_describe_collective(met))
            name = f"{met[0].kind} of {met[0].message_bytes:,} bytes"
            yield predicted, reference * sample.ratio("wall"), sigma, sample.fifth, name


def _widen_sigma(off: FloatArray) -> float:
    """By which factor deviations must be larger for 90 % of what is off by this many of them to be inside."""
    return max(1.0, float(f"{np.quantile(off, 0.9) / Z90:.4g}")) if len(off) else 1.0


def _fit_models(samples: Sequence[Sample], reference: float) -> CollectiveModels:
    kinds: dict[str, list[tuple[FloatArray, FloatArray, float]]] = {}
    for sample in samples:
        met = list_collectives(_make_signature(sample), sample.ranks)
        point = (*_describe_collective(met), reference * sample.ratio("wall"))
        kinds.setdefault(f"{sample.ranks} {met[0].kind}", []).append(point)
    return CollectiveModels(
        {
            key: fit_kind(*(np.array(column) for column in zip(*points, strict=True)))
            for key, points in kinds.items()
            if len(points) >= _FEWEST
        }
    )


def _make_signature(sample: Sample) -> Signature:
    assert sample.signature is not None
    return sample.signature
