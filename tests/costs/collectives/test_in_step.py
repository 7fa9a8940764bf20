"""Collectives among ranks that run one program."""

from __future__ import annotations

from dataclasses import replace

import pytest

from traincast.costs.collectives.model import price_uniform
from traincast.costs.in_step import SHIPPED
from traincast.costs.kernels.collective import COLLECTIVE
from traincast.hardware.platform import load_platform
from traincast.ir.ops import EXPOSED, UNIFORM


def test_ranks_wait_for_each_other_where_nothing_hides_it() -> None:
    topology = load_platform("dgx-h100").topology
    hidden = replace(COLLECTIVE.call("all_gather", "bf16", bytes=1e8, ranks=8, nodes=1), variant=UNIFORM)
    shown = replace(hidden, variant=f"{UNIFORM} {EXPOSED}")

    seconds = price_uniform([hidden, shown], topology, replace(SHIPPED, stall_us=50.0)).seconds

    assert seconds[1] - seconds[0] == pytest.approx(50e-6) and seconds[0] > 0
