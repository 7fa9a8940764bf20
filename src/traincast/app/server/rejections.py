"""What is rejected, as every rejection is told: a status of HTTP, the field that is wrong, and what to do."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any


class Rejection(Exception):
    """A request that is not answered. `status` is one of 4xx; `field` names what is wrong ("" where it is no field)."""

    def __init__(self, status: int, message: str, field: str = "") -> None:
        super().__init__(message)
        self.status, self.message, self.field = status, message, field

    def to_dict(self) -> dict[str, Any]:
        """The body of the result."""
        return {"error": {"field": self.field, "message": self.message}}


def find_field(message: str, request: dict[str, Any], names: Iterable[str]) -> str:
    """The field that a message is about: one that it names, else one whose value it repeats, else the workload.

    >>> field_of("`batch_size` 0 is out of range", {"batch_size": 0}, ["gpus", "batch_size"])
    'batch_size'
    """
    notes = f" {' '.join(re.findall('[a-z0-9]+', message.lower()))} "
    names = list(names)
    for name in names:
        if f"`{name}" in message:
            return name
    for name in names:
        if name in request and f" {name.replace('_', ' ')} " in notes:
            return name
    for name, value in request.items():
        if isinstance(value, str) and value and value in message:
            return name
    return "workload"
