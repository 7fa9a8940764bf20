"""How long gloo's collectives take between the ranks of one host, and how much of their cores: measured curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from traincast.arrays import FloatArray
from traincast.collectives.curve import Curve
from traincast.errors import TraincastError
from traincast.trials.together import Cost, Exchange

KINDS = ("all_reduce", "all_to_all", "all_gather", "reduce_scatter")
SIZES = tuple(1 << power for power in range(10, 26, 2))
"""Message sizes that are measured: 1 KiB to 16 MiB, beyond which time goes with the bytes."""
SECONDS = 1.0
"""Spent on each kind and size."""


@dataclass(frozen=True, slots=True)
class GlooCurves:
    """By kind of collective: seconds against message size, processor seconds of a rank against the same."""

    seconds: Mapping[str, Curve]
    busy: Mapping[str, Curve]

    def cost(self, exchanges: Sequence[Exchange]) -> Cost:
        """A collective from what its ranks call. Uneven all-to-alls take as long as even ones that move as much."""
        kind, message = _message(exchanges)
        if kind not in self.seconds:
            raise TraincastError(f"gloo's {kind} was not measured here; those measured are {', '.join(self.seconds)}")
        size = np.array([float(message)])
        seconds = float(self.seconds[kind].at(size)[0])
        return Cost(seconds, min(seconds, float(self.busy[kind].at(size)[0])))

    def sigma(self, exchanges: Sequence[Exchange]) -> float:
        """Spread of the logarithm of a collective's time."""
        kind, message = _message(exchanges)
        return float(self.seconds[kind].sigma_at(np.array([float(message)]))[0])


def _message(exchanges: Sequence[Exchange]) -> tuple[str, float]:
    kind = exchanges[0].kind
    if kind != "all_to_all_v":
        return kind, float(max(exchange.message_bytes for exchange in exchanges))
    moved = sum(
        sent for rank, exchange in enumerate(exchanges) for other, sent in enumerate(exchange.sent) if other != rank
    )
    ranks = len(exchanges)
    return "all_to_all", moved / (ranks - 1) if ranks > 1 else 0.0


def gloo_jobs(sizes: Sequence[int] = SIZES, seconds: float = SECONDS) -> list[dict[str, Any]]:
    """What ranks are asked to measure, see `traincast.trials.rank`."""
    return [{"collective": kind, "bytes": size, "seconds": seconds} for size in sizes for kind in KINDS]


def gloo_curves(results: Sequence[Mapping[str, Any]], nominal: float) -> GlooCurves:
    """Curves from what ranks measured, for a reference that takes `nominal` seconds."""
    seconds, busy = {}, {}
    for kind in KINDS:
        rows = sorted((row for row in results if row.get("collective") == kind), key=lambda row: int(row["bytes"]))
        if len(rows) < 2:
            raise TraincastError(f"gloo's {kind} was measured at {len(rows)} sizes; a curve needs two")
        sizes = np.array([float(row["bytes"]) for row in rows])
        ratios = [np.array(row["step"]) / np.array(row["reference"]) for row in rows]
        spread = [_deviation(ratio) for ratio in ratios]
        seconds[kind] = _curve(sizes, nominal * np.array([np.median(ratio) for ratio in ratios]), spread)
        used = [float(np.median(np.array(row["busy"]) / np.array(row["reference"]))) for row in rows]
        busy[kind] = _curve(sizes, nominal * np.array(used), spread)
    return GlooCurves(seconds, busy)


def _curve(sizes: FloatArray, seconds: FloatArray, spread: Sequence[float]) -> Curve:
    """Never falling: a larger message takes no less time."""
    sigma = float(np.median(spread))
    return Curve(
        bytes=sizes,
        seconds=np.maximum.accumulate(seconds),
        sigma=(max(spread[: max(1, len(spread) // 2)]), sigma),
        measured=(float(sizes[0]), float(sizes[-1])),
    )


def _deviation(ratios: FloatArray) -> float:
    """A robust deviation of the logarithm."""
    logs = np.log(ratios)
    return 1.4826 * float(np.median(np.abs(logs - np.median(logs))))
