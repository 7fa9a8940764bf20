"""Every kernel family, what first principles say of it, the fitted model that is shipped, and what that was fitted on.

From the records follow the ops that are lowered (`kernels.lower`), the rooflines and the shipped models.
"""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from traincast.costs.kernels import (
    attention,
    collective,
    conv,
    embedding,
    gemm,
    given,
    recurrent,
    rowwise,
    streaming,
    unmodelled,
)
from traincast.costs.kernels.contract import Calls, Chips, Estimate, FamilyRecord, KernelModel, State, load_state
from traincast.hardware.device import Device

RECORDS: tuple[FamilyRecord, ...] = (
    gemm.RECORD,
    *streaming.RECORDS,
    *rowwise.RECORDS,
    conv.RECORD,
    attention.RECORD,
    embedding.RECORD,
    recurrent.RECORD,
    *unmodelled.RECORDS,
    *given.RECORDS,
    collective.RECORD,
)
BY_NAME: dict[str, FamilyRecord] = {record.family.name: record for record in RECORDS}
_START_SECONDS = 2e-6  # the shortest kernels of the V100 traces; of MI300X's 2,995 the shortest tenth take up to 2.2 us
PROFILES = Path(str(files("traincast.costs.kernels") / "profiles"))


class Roofline:
    """An estimate for any call of any family on any device."""

    def predict(self, calls: Calls, device: Device) -> Estimate:
        """Device time of every call, never below the start of a kernel; nothing counts as in domain."""
        record = BY_NAME[calls.family.name]
        seconds = np.maximum(record.roofline_seconds()(calls, device, _START_SECONDS), 0.5 * _START_SECONDS)
        sigma = np.full(len(calls), record.roofline_sigma)
        return Estimate(seconds, sigma, np.zeros(len(calls), dtype=np.bool_))


@cache
def load_shipped_model(family: str) -> KernelModel | None:
    """The fitted model of a family, read when first asked for; None where the roofline is all there is."""
    record = BY_NAME[family]
    return record.model_class().from_state(_load_profile(record.profile)) if record.model else None


@cache
def _load_profile(name: str) -> State:
    """A profile's numbers, once for the families that share it."""
    return load_state(PROFILES / name)


def is_chip_measured(device: Device) -> bool:
    """Whether GEMMs or element-wise kernels of this chip were measured, so that parameters of its own are fitted."""
    return any(chips.find(device) >= 0 for chips in _load_measured_chips())


@cache
def _load_measured_chips() -> tuple[Chips, ...]:
    """Of every part of the profiles of GEMMs and element-wise kernels (a part's arrays begin with its name)."""
    parts = [
        {key.removeprefix(part): array for key, array in state.items() if key.startswith(part)}
        for state in map(_load_profile, ("gemm", "elementwise"))
        for part in (key.removesuffix("chip_key") for key in state if key.endswith("chip_key"))
    ]
    return tuple(map(Chips.from_state, parts))


@cache
def describe_profile(name: str) -> dict[str, Any]:
    """What is written alongside a shipped profile about where it comes from."""
    document: dict[str, Any] = json.loads((PROFILES / f"{name}.json").read_text(encoding="utf-8"))
    return document


@cache
def list_measured_devices(family: str) -> dict[str, tuple[str, ...]]:
    """Keys of the devices whose kernels of this family were measured for its model, each with the kinds of GEMM that
    were (none told apart: no kinds)."""
    record = BY_NAME.get(family)
    known = describe_profile(record.profile).get("devices", ()) if record and record.profile else ()
    if not isinstance(known, dict):
        return {str(key): () for key in known}
    found: dict[str, tuple[str, ...]] = {}
    for kind, keys in known.items():
        for key in keys:
            found[str(key)] = (*found.get(str(key), ()), str(kind))
    return found


def list_measured_families(device: str) -> list[str]:
    """Families whose kernels were measured on a device: `gemm (fp32, half)`, `attention`."""
    found = {family: list_measured_devices(family) for family in BY_NAME}
    return [
        f"{family} ({', '.join(devices[device])})" if devices[device] else family
        for family, devices in found.items()
        if device in devices
    ]
