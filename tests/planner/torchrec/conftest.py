"""Tables and plans that the tests of this package share."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import pytest

from traincast.models.embeddings import Pooling, Table, Zipf
from traincast.models.placement.plan import Placement, Plan
from traincast.utils.errors import TraincastError

NEEDS_TORCHREC = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("torchrec", "fbgemm_gpu", "tensordict")),
    reason="TorchRec is not installed; scripts/setup dev installs it",
)


def refusal(read: Callable[[], object]) -> str:
    """What a reader complains of, "" when it reads; any other exception is a failure."""
    try:
        read()
    except TraincastError as error:
        return str(error) or "no message"
    return ""


@pytest.fixture
def tables() -> tuple[Table, ...]:
    """Six tables: three optimizers, two dtypes, one with weighted lookups."""
    return tuple(
        Table(
            name=f"t{position}",
            rows=1000 + 7 * position,
            dim=dim,
            pooling=Pooling.from_constant(1.0 + position),
            access=Zipf(1.05),
            dtype=dtype,
            weighted=weighted,
            optimizer=optimizer,
        )
        for position, (dim, dtype, weighted, optimizer) in enumerate(
            [
                (32, "fp32", False, "sgd"),
                (64, "fp32", False, "sgd"),
                (32, "fp16", False, "rowwise_adagrad"),
                (64, "fp32", True, "sgd"),
                (32, "fp32", False, "adagrad"),
                (16, "fp32", False, "sgd"),
            ]
        )
    )


@pytest.fixture
def plan() -> Plan:
    """Every kind of sharding and every kernel on four ranks, two per node."""
    return Plan(
        tuple(f"t{position}" for position in range(6)),
        (
            Placement("table_wise", (1,)),
            Placement.make_row_wise(4),
            Placement("column_wise", (0, 0, 3, 1)),
            Placement.make_data_parallel(4),
            Placement("table_row_wise", (2, 3), "fused_uvm_caching", 0.3),
            Placement("table_wise", (2,), "fused_uvm"),
        ),
        4,
    )
