"""Costs of ops that their authors give, from a file or from Python."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path

from traincast.ir.given import OpCost, read_op_costs
from traincast.utils.errors import TraincastError

_LARGEST_FILE = 1 << 20  # bytes


def read_costs(costs: str | Path | Sequence[OpCost] | None) -> tuple[OpCost, ...]:
    """The costs of a `.toml` file (`["lib::op"]` with `seconds`, `flops`, `bytes`), or those given; None is none."""
    if costs is None:
        return ()
    if not isinstance(costs, str | Path):
        return tuple(costs)
    path = Path(costs)
    if not path.is_file():
        raise TraincastError(f'no file {path} with costs; write a .toml file with a table ["lib::op"] for each op')
    if path.stat().st_size > _LARGEST_FILE:
        raise TraincastError(f"{path} is larger than a file of costs can be ({_LARGEST_FILE >> 20} MiB)")
    try:
        table = tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise TraincastError(f"{path} is no TOML: {error}") from None
    return read_op_costs(table, str(path))
