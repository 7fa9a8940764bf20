"""The collective model: measured curves where there are some, links where there are none; alone and as they run in a
step."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from traincast.costs.collectives.links import (
    LinkModel,
    Places,
    count_ring_steps,
    estimate_direct_seconds,
    get_bus_factor,
    get_node_bandwidth,
    name_measured_kind,
)
from traincast.costs.in_step import SHIPPED, InStep
from traincast.costs.kernels.collective import COLLECTIVE
from traincast.costs.kernels.contract import COMPUTE_TYPES, Calls, Estimate, KernelCall
from traincast.hardware.topology import Topology
from traincast.ir.collectives import COLLECTIVES, UNEVEN_FORM, Route
from traincast.ir.ops import EXPOSED
from traincast.utils.arrays import BoolArray, FloatArray
from traincast.utils.errors import TraincastError, make_unknown_error

SMALL_BYTES = 65536  # up to here the latency decides; spreads are kept apart on both sides


@dataclass(frozen=True, eq=False)
class Curve:
    """Seconds at growing message sizes, never falling. Each stretch is one regime of the library underneath.

    `measured` is the range of bytes the points came from; `sigma` the spread of log time up to 64 KiB and above.
    """

    bytes: FloatArray
    seconds: FloatArray
    sigma: tuple[float, float]
    measured: tuple[float, float]

    @property
    def floor(self) -> float:
        """Seconds of the smallest message."""
        return float(self.seconds[0])

    @property
    def bandwidth(self) -> float:
        """Bytes per second of the last stretch: what the largest messages reach."""
        return float((self.bytes[-1] - self.bytes[-2]) / max(self.seconds[-1] - self.seconds[-2], 1e-12))

    def at(self, message: FloatArray) -> FloatArray:
        """Seconds for messages of this many bytes; beyond the last point the last bandwidth goes on."""
        inside = np.interp(message, self.bytes, self.seconds)
        return np.asarray(inside + np.maximum(message - self.bytes[-1], 0.0) / self.bandwidth)

    def sigma_at(self, message: FloatArray) -> FloatArray:
        """Spread of log time for messages of this many bytes."""
        return np.where(message <= SMALL_BYTES, *self.sigma)

    def covers(self, message: FloatArray) -> BoolArray:
        """Whether messages are within what was measured."""
        return (message >= self.measured[0]) & (message <= self.measured[1])

    def to_json(self) -> dict[str, Any]:
        """The curve as plain data, rounded to what the measurements can carry."""
        return {
            "bytes": [float(f"{value:.12g}") for value in self.bytes],
            "us": [float(f"{1e6 * value:.5g}") for value in self.seconds],
            "sigma": [round(value, 4) for value in self.sigma],
            "measured_bytes": list(self.measured),
        }

    @staticmethod
    def from_json(entry: dict[str, Any]) -> Curve:
        """The curve from its plain data."""
        small, large = entry["sigma"]
        low, high = entry["measured_bytes"]
        return Curve(
            bytes=np.array(entry["bytes"], dtype=np.float64),
            seconds=1e-6 * np.array(entry["us"], dtype=np.float64),
            sigma=(float(small), float(large)),
            measured=(float(low), float(high)),
        )


PROFILE = Path(str(files("traincast.costs.collectives") / "profiles" / "collectives.json"))
INTEGERS = ("int64", "int32", "int16", "int8", "bool")
DERIVED_SIGMA = 0.15  # a kind taken from the curve of its sibling
RENDEZVOUS_SIGMA = 0.6  # networks that ask first: settings of such clusters (Alps, Polaris) differ by two to four times
_MAX_BYTES, _MAX_RANKS = 1e15, 1 << 20

Place = tuple[int, int]  # (ranks, nodes)
CurveSet = dict[tuple[str, str], dict[Place, Curve]]  # (kind, "float" | "int" | "any") -> place -> curve
Answer = tuple[FloatArray, FloatArray, BoolArray]


@dataclass(frozen=True, kw_only=True)
class CollectiveModel:
    """Device time of collectives. `sets` holds curves by name (`h100@2.29.2`: device and NCCL version).

    `ranks_sigma` is the spread added when a rank count was not measured.
    """

    sets: dict[str, CurveSet]
    links: LinkModel
    ranks_sigma: float
    provenance: dict[str, Any] = field(default_factory=dict)

    def curve_set(self, name: str) -> CurveSet:
        """The curves of this name; `h100` means its newest NCCL version, `h100+cluster01` both together."""
        merged: CurveSet = {}
        for part in name.split("+"):
            versions = [key for key in self.sets if part in (key, key.split("@")[0])]
            if not versions:
                raise make_unknown_error(
                    "set of collective curves", part, self.sets, "Leave 'curves' out to predict from links."
                )
            for key, places in self.sets[max(versions, key=_read_version)].items():
                merged[key] = {**merged.get(key, {}), **places}
        return merged

    def predict(self, calls: Calls, topology: Topology) -> Estimate:
        """Device time of every call on this topology, from the moment the last rank arrives."""
        _check_request(calls, topology)
        curves = self.curve_set(topology.curves) if topology.curves else {}
        estimate = Estimate.zeros(len(calls))
        shape = (len(COLLECTIVE.kinds), len(COMPUTE_TYPES), _MAX_RANKS + 1, _MAX_RANKS + 1)
        ranks_of, nodes_of = calls["ranks"].astype(np.int64), calls["nodes"].astype(np.int64)
        keys = np.ravel_multi_index((calls.kind, calls.compute, ranks_of, nodes_of), shape)
        order = np.argsort(keys, kind="stable")
        _, starts = np.unique(keys[order], return_index=True)
        for members in np.split(order, starts[1:]) if len(calls) else []:
            first = members[0]
            kind, compute = COLLECTIVE.kinds[calls.kind[first]], COMPUTE_TYPES[calls.compute[first]]
            ranks, nodes = int(ranks_of[first]), int(nodes_of[first])
            result = self._group(kind, compute, calls["bytes"][members], ranks, nodes, topology, curves)
            estimate.seconds[members], estimate.sigma[members], estimate.in_domain[members] = result
        return estimate

    def _group(
        self, kind: str, compute: str, message: FloatArray, ranks: int, nodes: int, topology: Topology, curves: CurveSet
    ) -> Answer:
        if kind == "barrier":
            message = np.ones_like(message)
        if COLLECTIVES[kind].route is Route.DIRECT:
            return self._direct(kind, compute, message, ranks, nodes, topology, curves)
        if nodes == 1:
            size = message / topology.link_speed
            seconds, sigma, known = self._inside(kind, compute, size, ranks, topology, curves)
            return topology.get_correction(_find_alike(kind)) * seconds, sigma, known
        per_node = max(2, topology.count_ranks_per_node(ranks, nodes))
        floor, rate = self.node_limits(kind, compute, per_node, topology, curves)

        def by_links(size: FloatArray) -> FloatArray:
            return self.links.across(kind, size, ranks, nodes, topology, floor=floor, rate=rate)

        seconds, sigma = by_links(message), np.full(len(message), self._get_network_sigma(topology))
        exact = _describe_places(curves, kind, compute).get((ranks, nodes))
        if exact is None:
            return seconds, sigma, np.zeros(len(message), dtype=bool)
        # clusters were measured on large messages: below, the links' shape, joined where the curve begins
        start = exact.bytes[:1]
        below = message < start
        measured = exact.at(message / topology.network_speed)
        seconds = np.where(below, seconds * exact.at(start) / by_links(start), measured)
        return seconds, np.where(below, sigma, exact.sigma_at(message)), exact.covers(message)

    def _direct(
        self, kind: str, compute: str, message: FloatArray, ranks: int, nodes: int, topology: Topology, curves: CurveSet
    ) -> Answer:
        """Nobody has measured these: they have the floors and the bandwidths of links that NCCL reaches."""
        per_node = topology.count_ranks_per_node(ranks, nodes)
        _, rate = self.node_limits("all_gather", compute, max(2, per_node), topology, curves)
        places = Places(per_node=per_node, nodes=nodes, rate=rate)
        seconds = estimate_direct_seconds(kind, message, places, self.links, topology)
        return seconds, np.full(len(message), self._get_network_sigma(topology)), np.zeros(len(message), dtype=bool)

    def _get_network_sigma(self, topology: Topology) -> float:
        """Spread of log time between nodes: settings of networks with a rendezvous differ by two times."""
        return float(np.hypot(self.links.network_sigma, RENDEZVOUS_SIGMA if topology.rendezvous else 0.0))

    def node_limits(
        self, kind: str, compute: str, ranks: int, topology: Topology, curves: CurveSet
    ) -> tuple[float, float]:
        """Floor in seconds and bus bandwidth in bytes per second of a large message inside a node."""
        ranks = min(ranks, max(2, topology.gpus_per_node))
        floor = float(self._inside(kind, compute, np.ones(1), ranks, topology, curves)[0][0])
        if COLLECTIVES[kind].route is Route.PAIR:
            return floor, topology.link_speed * self.links.node_rate(kind, 2, topology)
        large = self._inside(kind, compute, np.array([1e10, 2e10]), ranks, topology, curves)[0]
        return floor, topology.link_speed * 1e10 * get_bus_factor(kind, ranks) / float(large[1] - large[0])

    def _inside(
        self, kind: str, compute: str, message: FloatArray, ranks: int, topology: Topology, curves: CurveSet
    ) -> Answer:
        places = {n: curve for (n, nodes), curve in _describe_places(curves, kind, compute).items() if nodes == 1}
        if not places:
            sibling = _find_sibling(kind, message, ranks)
            if curves and sibling is not None:
                seconds, sigma, known = self._inside(sibling[0], compute, sibling[1], sibling[2], topology, curves)
                return seconds, np.hypot(sigma, DERIVED_SIGMA), known & (kind in ("barrier", "all_to_all_v"))
            seconds = self.links.inside(kind, message, ranks, topology)
            return seconds, np.full(len(message), self.links.sigma), np.zeros(len(message), dtype=bool)
        if ranks in places:
            curve = places[ranks]
            return curve.at(message), curve.sigma_at(message), curve.covers(message)
        return self.other_ranks(kind, message, ranks, places, topology)

    def other_ranks(
        self, kind: str, message: FloatArray, ranks: int, places: dict[int, Curve], topology: Topology
    ) -> Answer:
        """A rank count nobody measured: floors go with the hops, the rest with the bytes over the busiest link."""
        known = sorted(places)
        above = next((position for position, n in enumerate(known) if n > ranks), len(known))
        pair = known[max(0, above - 2) :][:2] if above in (0, len(known)) else known[above - 1 : above + 1]
        floor = self._floor(kind, ranks, pair, places, topology)
        nearest = [min(pair, key=lambda n: abs(np.log(n / ranks)))] if above in (0, len(known)) else pair
        share = np.interp(np.log(ranks), np.log(nearest), np.arange(len(nearest), dtype=float))
        work = np.zeros(len(message))
        for position, n in enumerate(nearest):
            scale = _estimate_per_byte(kind, ranks, topology) / _estimate_per_byte(kind, n, topology)
            weight = 1.0 if len(nearest) == 1 else (share if position else 1 - share)
            work += weight * scale * (places[n].at(message) - places[n].floor)
        sigma = np.hypot(places[nearest[0]].sigma_at(message), self.ranks_sigma)
        return floor + work, sigma, np.zeros(len(message), dtype=bool)

    def _floor(self, kind: str, ranks: int, pair: list[int], places: dict[int, Curve], topology: Topology) -> float:
        if len(pair) == 1:
            links = self.links
            return places[pair[0]].floor * links.floor(kind, ranks, topology) / links.floor(kind, pair[0], topology)
        low, high = pair
        slope = (places[high].floor - places[low].floor) / (count_ring_steps(kind, high) - count_ring_steps(kind, low))
        # a lucky or noisy point must not let the floor fall as ranks are added
        slope = max(slope, 0.0)
        return max(
            places[low].floor + slope * (count_ring_steps(kind, ranks) - count_ring_steps(kind, low)),
            0.5 * places[low].floor,
        )

    def save(self, path: Path) -> None:
        """Writes the model and where it came from as JSON; the same bytes every time."""
        sets = [
            {"set": name, "kind": kind, "dtype": dtype, "ranks": ranks, "nodes": nodes, **curve.to_json()}
            for name, curves in sorted(self.sets.items())
            for (kind, dtype), places in sorted(curves.items())
            for (ranks, nodes), curve in sorted(places.items())
        ]
        head = {"links": self.links.to_json(), "provenance": self.provenance, "ranks_sigma": round(self.ranks_sigma, 4)}
        lines = ",\n".join(json.dumps(entry, sort_keys=True) for entry in sets)
        text = json.dumps(head, indent=1, sort_keys=True)[:-2]
        path.write_text(f'{text},\n "curves": [\n{lines}\n]}}\n', encoding="utf-8")

    @staticmethod
    def load(path: Path) -> CollectiveModel:
        """Reads the model back."""
        try:
            entry = json.loads(path.read_text(encoding="utf-8"))
            sets: dict[str, CurveSet] = {}
            for row in entry["curves"]:
                curves = sets.setdefault(row["set"], {})
                place = (int(row["ranks"]), int(row["nodes"]))
                curves.setdefault((row["kind"], row["dtype"]), {})[place] = Curve.from_json(row)
            return CollectiveModel(
                sets=sets,
                links=LinkModel.from_json(entry["links"]),
                ranks_sigma=float(entry["ranks_sigma"]),
                provenance=entry["provenance"],
            )
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise TraincastError(f"'{path}' is not a file of collective curves: {error!r}") from None


@cache
def load_shipped_collectives() -> CollectiveModel:
    """The model that comes with the package."""
    return CollectiveModel.load(PROFILE)


def _describe_places(curves: CurveSet, kind: str, compute: str) -> dict[Place, Curve]:
    wanted = "int" if compute in INTEGERS else "float"
    for dtype in (wanted, "any", "float"):
        if (kind, dtype) in curves:
            return curves[kind, dtype]
    return {}


def _find_sibling(kind: str, message: FloatArray, ranks: int) -> tuple[str, FloatArray, int] | None:
    """The kind, message and ranks whose curve stands for this one."""
    record, other = COLLECTIVES[kind], name_measured_kind(kind)
    if other == kind:
        return None
    if record.route is Route.PAIR:
        return other, 2 * message, 2
    return other, message * get_bus_factor(kind, ranks) / get_bus_factor(other, ranks), ranks


def _find_alike(kind: str) -> tuple[str, ...]:
    """The kinds of which measurements stand for this one, itself first."""
    record = COLLECTIVES[kind]
    return kind, record.uneven_form_of, record.like, UNEVEN_FORM.get(kind, "")


def _estimate_per_byte(kind: str, ranks: int, topology: Topology) -> float:
    return get_bus_factor(kind, ranks) / get_node_bandwidth(kind, ranks, topology)


def _read_version(name: str) -> tuple[int, ...]:
    return tuple(int(part) for part in name.partition("@")[2].split(".") if part.isdigit())


def _check_request(calls: Calls, topology: Topology) -> None:
    size, ranks, nodes = calls["bytes"], calls["ranks"], calls["nodes"]
    if not np.all(np.isfinite(size) & (size >= 0) & (size <= _MAX_BYTES)):
        raise TraincastError("a collective has a message that is not between 0 and 1e15 bytes")
    if not np.all((ranks >= 2) & (ranks <= _MAX_RANKS) & (ranks == np.floor(ranks))):
        raise TraincastError("a collective needs an integer number of ranks, two or more")
    if not np.all((nodes >= 1) & (nodes <= ranks) & (nodes == np.floor(nodes))):
        raise TraincastError("a collective spans an integer number of nodes, at least one and no more than its ranks")
    over = np.flatnonzero(np.ceil(ranks / nodes) > topology.gpus_per_node)
    if len(over):
        row = over[0]
        raise TraincastError(
            f"a collective puts {ranks[row]:.0f} ranks on {nodes[row]:.0f} node(s) of '{topology.key}', "
            f"which hold {topology.gpus_per_node} GPUs each; give it more nodes"
        )


def price_uniform(calls: Sequence[KernelCall], topology: Topology, numbers: InStep = SHIPPED) -> Estimate:
    """Device time of these collectives: that of the links, and where kernels wait for it the time until all ranks have
    arrived, since ranks that do the same are never quite at the same place."""
    alone = load_shipped_collectives().predict(Calls.of(COLLECTIVE, calls), topology)
    stalls = np.array([EXPOSED in call.variant.split() for call in calls], dtype=np.bool_)
    return replace(alone, seconds=alone.seconds + 1e-6 * numbers.stall_us * stalls)
