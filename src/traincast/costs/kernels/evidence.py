"""What shipped kernel models were fitted on: which families and types of which devices."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from traincast.costs.kernels.families import BY_NAME, PROFILES


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
