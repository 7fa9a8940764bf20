"""Host profiles: the five overheads per top-level op as data, by who issues the op, on CPUs of other generations and
clocks."""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np

from traincast.costs.in_step import SHIPPED
from traincast.hardware.device import Device
from traincast.ir.ops import DISPATCH_SCOPE, MODULE_SCOPE, TIMES
from traincast.utils.arrays import FloatArray
from traincast.utils.errors import TraincastError, make_unknown_error

# nodes before PyTorch 1.9, which began to number them
_UNNUMBERED = re.compile(r"([A-Z]\w*Backward)$")
_PYTHON_NODES = ("All", "Lookup")  # autograd functions written in Python keep their class's name
_REPLACED = {
    "CudnnConvolutionBackward0": "ConvolutionBackward0",
    "CudnnConvolutionTransposeBackward0": "ConvolutionBackward0",
    "MiopenConvolutionBackward0": "ConvolutionBackward0",
    "ThnnConv2DBackward0": "ConvolutionBackward0",
    "ReluBackward1": "ReluBackward0",
    # what a capture calls attention before a device has chosen its kernel
    "ScaledDotProductFusedAttentionOverrideableBackward0": "ScaledDotProductFlashAttentionBackward0",
}


def get_current_name(op: str) -> str:
    """The name that a top-level op of an older trace has in host profiles."""
    numbered = f"{op}0" if _UNNUMBERED.match(op) and not op.startswith(_PYTHON_NODES) else op
    return _REPLACED.get(numbered, numbered)


# who issues a top-level op: the user's Python, the autograd engine taking up a node, or C++ in between (the engine's
# own sums, the reducer's copies)
PYTHON, NODE, ENGINE = ISSUERS = ("python", "node", "engine")
_NODE_MARKS = ("Backward", "AccumulateGrad", "torch::autograd::CppNode")


def get_issuer(op: str, *, main: bool) -> str:
    """One of `ISSUERS`; `main` says that the op runs on the main thread."""
    if main:
        return PYTHON
    return NODE if any(mark in op for mark in _NODE_MARKS) else ENGINE


_MARKS = re.compile(r"\((?:r|tm|c)\)|\bcpu\b|\bprocessors?\b|\b\d+-cores?\b|@.*$|[,()]", re.IGNORECASE)
_STATED_CLOCK = re.compile(r"@\s*(\d+(?:\.\d+)?)\s*ghz", re.IGNORECASE)
_TURBO = 1.3  # of the base clock that a name states, where the model is not listed


@dataclass(frozen=True, slots=True)
class Cpu:
    """A CPU: its name in lower case without marks, and how many times as long as `server-2022` its host code takes.
    `spread` is the log-sigma of that."""

    name: str
    slowness: float
    spread: float


@cache
def find_cpu(text: str) -> Cpu | None:
    """The CPU that a name such as "AMD EPYC 7742 64-Core Processor" means; None where no generation is recognised."""
    known = _read_cpus()
    name = " ".join(_MARKS.sub(" ", text.lower()).replace("+", " ").split())
    generation = next((each for each in known["generation"] if re.search(each["pattern"], name)), None)
    if generation is None:
        return None
    listed = [ghz for model, ghz in known["boost_ghz"].items() if re.search(rf"\b{re.escape(model)}", name)]
    stated = _STATED_CLOCK.search(text)
    clock = listed[0] if listed else _TURBO * float(stated[1]) if stated else float(generation["ghz"])
    slowness = (known["reference"] / (generation["per_clock"] * clock)) ** known["exponent"]
    return Cpu(name, slowness, known["spread"])


def list_cpus() -> tuple[str, ...]:
    """Models whose clock is listed, in lower case; others are recognised by their generation."""
    return tuple(_read_cpus()["boost_ghz"])


@cache
def _read_cpus() -> dict[str, Any]:
    return tomllib.loads((files("traincast.costs.host") / "data" / "cpus.toml").read_text(encoding="utf-8"))


SERVER = "server-2022"
"""The profile that others are scaled from: a server whose CPU is not known."""
TENSORFLOW = "tensorflow"
"""The host of TensorFlow programs under Horovod, made from that server."""
_HOROVOD_CYCLE_SECONDS = 1e-3  # its default: how often it looks for tensors that all ranks have ready
_DATA = files("traincast.costs.host") / "data"

_TABLES = ("t1", "t2", "t3", "t4", "t5", "alone")  # of a profile, by overhead

# how a scope's host time is cut up around its launches
BEFORE, BETWEEN, AFTER, ALONE = 0, 1, 2, 3


@dataclass(frozen=True, eq=False, kw_only=True)
class HostProfile:
    """Mean host times in seconds, by top-level op name.

    `t1` is the gap before an op, by who issues it (`host.names`); `t2`, `t3`, `t5` are by op name (before the first
    launch, after the last, between two); `alone` is the whole time of an op that launches nothing (the other meaning
    of T5); `t4` is by runtime call ("launch", "memcpy", "memset", "synchronize"). The entry "*" of each table is for
    ops nobody measured, and "*Backward" for autograd nodes nobody measured.
    """

    name: str
    t1: Mapping[str, float]
    t2: Mapping[str, float]
    t3: Mapping[str, float]
    t4: Mapping[str, float]
    t5: Mapping[str, float]
    alone: Mapping[str, float]
    spread: float
    provenance: Mapping[str, Any]

    def scope_seconds(self, names: Sequence[str]) -> FloatArray:
        """Host seconds per name and part, T1 not included: float64[n, 4] in the order BEFORE, BETWEEN, AFTER, ALONE."""
        tables = (self.t2, self.t5, self.t3, self.alone)
        rows = [[_look_up(table, name) for table in tables] for name in names]
        return np.array(rows, dtype=np.float64).reshape(len(names), 4)

    def gap_seconds(self, names: Sequence[str], *, main: bool) -> FloatArray:
        """T1 in seconds before each of these ops on the main thread, or on another one: float64[n]."""
        return np.array([self.t1[get_issuer(name, main=main)] for name in names], dtype=np.float64)

    def scaled(self, factor: float) -> HostProfile:
        """The same profile on a host that takes `factor` times as long for everything."""
        if not 0.01 <= factor <= 100:
            raise TraincastError(f"a host cannot be {factor:g} times as slow as another; give 0.01 to 100")

        slower: dict[str, Any] = {
            table: {name: factor * seconds for name, seconds in getattr(self, table).items()} for table in _TABLES
        }
        return replace(self, **slower)

    def knows(self, name: str) -> bool:
        """Whether this op was measured."""
        return name in self.t2 or name in self.alone


def _look_up(table: Mapping[str, float], name: str) -> float:
    if name in table:
        return table[name]
    op, _, times = name.partition(TIMES)
    if times.isdecimal():
        return int(times) * _look_up(table, op)
    if "Backward" in name and "*Backward" in table:
        return table["*Backward"]
    return table["*"]


@cache
def list_host_profiles() -> tuple[str, ...]:
    """Names of the built-in host profiles."""
    return tuple(sorted(entry.name[:-5] for entry in _DATA.iterdir() if entry.name.endswith(".json")))


@cache
def load_host_profile(name: str, slowness: float = 1.0) -> HostProfile:
    """A built-in host profile, or that of a CPU by its name, of a host that takes `slowness` times as long."""
    if slowness != 1.0:
        return load_host_profile(name).scaled(slowness)
    if name == TENSORFLOW:
        return _make_tensorflow_host()
    if name not in list_host_profiles():
        return _scale_to_cpu(name)
    return parse_host_profile(name, json.loads((_DATA / f"{name}.json").read_text(encoding="utf-8")))


def load_usual_host(device: Device) -> HostProfile:
    """The host of machines that a GPU is usual in. A server of which nobody named the CPU, or the machine of a graphics
    card, is as uncertain as a CPU of which only the name is known."""
    profile = load_host_profile(device.host, device.host_slowness)
    unknown = _read_cpus()["spread"] if device.host == SERVER or device.is_graphics_card else 0.0
    return replace(profile, spread=math.hypot(profile.spread, unknown))


def _make_tensorflow_host() -> HostProfile:
    """A server whose executor costs what autograd's engine does, and Horovod, for which an op waits half a cycle."""
    server, wait = load_host_profile(SERVER), 0.5 * _HOROVOD_CYCLE_SECONDS
    return replace(server, name=TENSORFLOW, t2={**server.t2, "HorovodAlltoall": wait, "HorovodAllreduce": wait})


def _scale_to_cpu(name: str) -> HostProfile:
    """The profile of servers as this CPU would take it; it is as uncertain as what is known of the CPU."""
    cpu = find_cpu(name)
    if cpu is None:
        remedy = f"Name a CPU as its system does (AMD EPYC 7742), or one of {', '.join(list_host_profiles())}."
        raise make_unknown_error("host", name, (*list_host_profiles(), *list_cpus()), remedy)
    server = load_host_profile(SERVER)
    provenance = {**server.provenance, "cpu": cpu.name, "slowness": round(cpu.slowness, 3)}
    scaled = server.scaled(cpu.slowness)
    return replace(scaled, name=cpu.name, spread=math.hypot(server.spread, cpu.spread), provenance=provenance)


def parse_host_profile(name: str, data: Mapping[str, Any]) -> HostProfile:
    """A host profile from its JSON form, in which times are microseconds."""
    try:
        tables: dict[str, dict[str, float]] = {
            key: {str(op): 1e-6 * float(us) for op, us in data[f"{key}_us"].items()} for key in _TABLES
        }
        missing = [name for name in ISSUERS if name not in tables["t1"]]
        if missing:
            raise KeyError(f"t1_us.{missing[0]}")
        tables["alone"].setdefault(MODULE_SCOPE, 1e-6 * SHIPPED.module_us)
        tables["alone"].setdefault(DISPATCH_SCOPE, 1e-6 * SHIPPED.routing_us)
        return HostProfile(
            name=name,
            spread=float(data["spread"]),
            provenance=data["provenance"],
            **tables,
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise TraincastError(f"host profile '{name}' is malformed: {error!r}") from None
