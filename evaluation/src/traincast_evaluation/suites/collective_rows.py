"""Rows of the tables on collectives: points grouped, predicted, and compared."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from traincast.costs.collectives.model import SMALL_BYTES, CollectiveModel
from traincast.costs.kernels.collective import COLLECTIVE
from traincast.costs.kernels.contract import Calls, Estimate
from traincast.hardware.platform import load_topology
from traincast.hardware.topology import Topology
from traincast.utils.arrays import FloatArray
from traincast.utils.metrics import Z90, ErrorRow
from traincast_evaluation.fitting.collectives_data import Points
from traincast_evaluation.suites.cases import Compared, ComparedRow, compare

SUITE = "collectives"


def predict_sets(model: CollectiveModel, points: Points, node: str) -> Estimate:
    """Predictions, each point with the curves of its own library version."""
    whole = Estimate.zeros(len(points))
    for name in np.unique(points.set.astype(str)):
        rows = points.set == name
        part = predict_points(model, points.take(rows), replace(load_topology(node), curves=str(name)))
        whole.put(rows, part)
    return whole


def predict_points(model: CollectiveModel, points: Points, topology: Topology) -> Estimate:
    """Predictions on one topology, each group of ranks alone on it as a benchmark runs it."""
    topology = replace(topology, shared=False)
    compute = ["int8" if dtype == "int" else "fp16" for dtype in points.dtype]
    values = np.stack([points.bytes, points.ranks, points.nodes], axis=1)
    kinds = [str(kind) for kind in points.kind]
    return model.predict(Calls.from_columns(COLLECTIVE, kinds, compute, values), topology)


def scale_estimate(estimate: Estimate, factor: npt.NDArray[Any]) -> Estimate:
    """The estimate with every time multiplied by its own factor."""
    return replace(estimate, seconds=estimate.seconds * factor)


def iterate_point_groups(points: Points) -> Iterator[tuple[str, str, Points]]:
    """By machine and collective."""
    machines: npt.NDArray[Any] = np.array([str(name).split("@")[0] for name in points.set])
    for machine in np.unique(machines):
        of_machine = points.take(machines == machine)
        for kind in np.unique(of_machine.kind.astype(str)):
            yield str(machine), str(kind), of_machine.take(of_machine.kind == kind)


def summarise_by_size(label: str, points: Points, estimate: Estimate, reference: str = "") -> list[ErrorRow]:
    """A row for messages up to 64 KiB and one for those above."""
    rows: list[ErrorRow] = []
    for band, inside in (("up to 64 KiB", points.bytes <= SMALL_BYTES), ("above 64 KiB", points.bytes > SMALL_BYTES)):
        if inside.any():
            part = estimate.take(inside)
            rows.append(summarise_points(f"{label}, {band}", points.take(inside), part, reference))
    return rows


def summarise_points(label: str, points: Points, estimate: Estimate, reference: str = "") -> ComparedRow:
    """One row of the table; a model without spreads (sigma 0) has no interval."""
    columns = zip(points.set, points.bytes, points.ranks, points.nodes, points.pair, strict=True)
    names = [f"{name} {size:.0f} B {n:.0f}x{nodes:.0f} {pair}".rstrip() for name, size, n, nodes, pair in columns]
    machines = [str(name).split("@")[0] for name in points.set]
    sigma = estimate.sigma if estimate.sigma.any() else None
    return compare(SUITE, label, list_compared(machines, names, points.seconds, estimate.seconds, sigma), reference)


def list_compared(
    machines: Sequence[str], names: Sequence[str], measured: FloatArray, predicted: FloatArray, sigma: FloatArray | None
) -> list[Compared]:
    """Points beside their predictions, in seconds; `sigma` is the log-sigma of these (None: no interval)."""
    spread = np.exp(Z90 * sigma) if sigma is not None else np.ones(len(predicted))
    return [
        Compared(
            device=machine, name=name, measured=m, predicted=p, interval=(low, high) if sigma is not None else None
        )
        for machine, name, m, p, low, high in zip(
            machines, names, measured.tolist(), predicted.tolist(), (predicted / spread).tolist(),
            (predicted * spread).tolist(), strict=True,
        )
    ]  # fmt: skip
