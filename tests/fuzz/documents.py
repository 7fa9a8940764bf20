"""Changes to documents (what JSON, YAML and TOML hold) that keep most of their structure: a few places are odd."""

from __future__ import annotations

import copy
import random
from typing import Any

ODD_NUMBERS = (
    0, -1, 1, 2, 3, 7, 63, 255, 1 << 15, 1 << 24, 1 << 31, (1 << 31) - 1, 1 << 33, 1 << 53, 1 << 62, (1 << 63) - 1,
    1 << 63, 1 << 64, -(1 << 31), -(1 << 63), 10**18, 10**30, 0.0, -0.0, 0.5, -0.5, 1e-300, 1e-12, 1e15,
    1e300, 1e308, -1e308,
)  # fmt: skip
NOT_FINITE = (float("nan"), float("inf"), float("-inf"))
ODD_TEXTS = (
    "", " ", "a", "None", "null", "0", "-1", "nan", "x" * 3000, "\n", "a\nb", "\x1b[31mred", "\u202e", "\ud800", "é",
    "../../etc", "/", "{}", "%s", "\x00", "int64", "float32", "float64", "complex128", "float8", "cuda", "cpu", "meta",
    "aten::mm", "aten::no_such",
)  # fmt: skip
ODD_VALUES: tuple[Any, ...] = (None, True, False, [], {}, [[]], [{}], {"a": 1}, [1, 2, 3], [[1], [2]])

Path = tuple[Any, ...]


def places(document: Any, most: int = 20_000) -> list[Path]:
    """Where the values of a document are, containers included; the document itself is the empty path."""
    paths: list[Path] = [()]
    for path in paths:
        value = at(document, path)
        inner = value.keys() if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
        paths += [(*path, key) for key in inner]
        if len(paths) > most:
            break
    return paths


def at(document: Any, path: Path) -> Any:
    """The value at a place."""
    for key in path:
        document = document[key]
    return document


def mutated(document: Any, rng: random.Random, *, not_finite: bool = True, near: float = 0.4) -> Any:
    """A copy with one to four odd places; `near` is the share of numbers that stay near their own."""
    document = copy.deepcopy(document)
    for _ in range(rng.choice((1, 1, 1, 2, 2, 3, 4))):
        paths = places(document)
        path = rng.choice(paths[1:] or paths)
        if not path:
            return _other(document, rng, not_finite, near)
        parent, key = at(document, path[:-1]), path[-1]
        change = rng.random()
        if change < 0.6:
            parent[key] = _other(parent[key], rng, not_finite, near)
        elif change < 0.72:
            del parent[key]
        elif change < 0.86:
            parent[key] = copy.deepcopy(at(document, rng.choice(paths)))  # another part of the same document
        elif isinstance(parent, list):
            parent.insert(rng.randrange(len(parent) + 1), copy.deepcopy(parent[key]))
        else:
            parent[rng.choice(ODD_TEXTS)] = copy.deepcopy(parent[key])
    return document


def _other(value: Any, rng: random.Random, not_finite: bool, near_share: float) -> Any:
    same_type = rng.random() < 0.75
    if same_type and isinstance(value, int | float) and not isinstance(value, bool):
        near = (
            value + 1,
            value - 1,
            -value,
            value * 2,
            value * 1000,
            value // 2 if isinstance(value, int) else value / 3,
        )
        return rng.choice(near if rng.random() < near_share else ODD_NUMBERS)
    if same_type and isinstance(value, str):
        return rng.choice((value + "x", value[:-1], value.upper(), *ODD_TEXTS))
    if same_type and isinstance(value, list) and value:
        return rng.choice((value[:-1], value[::-1], value + value[:1], value * 2, [value[0]] * len(value), value[:1]))
    pool = (*ODD_NUMBERS, *ODD_TEXTS, *ODD_VALUES, *(NOT_FINITE if not_finite else ()))
    return copy.deepcopy(rng.choice(pool))


def damaged_bytes(data: bytes, rng: random.Random) -> bytes:
    """Bytes changed, cut, repeated or left out."""
    change = rng.randrange(5)
    place = rng.randrange(len(data) + 1)
    if change == 0:
        return data[:place]
    if change == 1:
        return data[:place] + data[place + rng.randrange(1, 50) :]
    if change == 2:
        return data[:place] + data[place : place + 40] * rng.randrange(2, 5) + data[place:]
    changed = bytearray(data or b" ")  # of nothing, a byte
    for _ in range(rng.randrange(1, 8)):
        changed[rng.randrange(len(changed))] = rng.randrange(256)
    return bytes(changed)
