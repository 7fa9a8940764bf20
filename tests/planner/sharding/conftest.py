from __future__ import annotations

import pytest

from traincast.hardware.platform import load_platform
from traincast.models.embeddings import Pooling, Table, Zipf
from traincast.planner.sharding.cost import FastCost
from traincast.planner.sharding.result import make_task

ZIPF = Zipf(1.0)


def table(name, rows=1000, dim=64, pooling=4, access=ZIPF, **changes):
    return Table(name=name, rows=rows, dim=dim, pooling=Pooling.from_constant(pooling), access=access, **changes)


@pytest.fixture(scope="session")
def node_task():
    """Four tables on the four GPUs of one node."""
    tables = [table("a", 100_000), table("b", 5_000, pooling=1), table("c", 300_000, 128), table("d", 200, pooling=9)]
    return make_task(tables, load_platform("dgx-a100"), gpus=4, batch_size=512)


@pytest.fixture(scope="session")
def node_cost(node_task):
    return FastCost(node_task)


@pytest.fixture(scope="session")
def two_nodes_task():
    """Three tables, two of them of one type, on two nodes of eight GPUs."""
    tables = [table("a", 100_000), table("b", 5_000), table("c", 300_000, dtype="fp16", optimizer="sgd")]
    return make_task(tables, load_platform("dgx-h100"), gpus=16, batch_size=256)


@pytest.fixture(scope="session")
def two_nodes_cost(two_nodes_task):
    return FastCost(two_nodes_task)
