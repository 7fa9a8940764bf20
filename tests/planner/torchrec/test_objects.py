"""Against the real TorchRec: it shards its modules by our plans, rank by rank as the plan says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.planner.torchrec.conftest import NEEDS_TORCHREC
from traincast.models.embeddings import Pooling, Table
from traincast.models.placement.plan import Placement, Plan
from traincast.planner.torchrec import planner
from traincast.planner.torchrec.planner import (
    convert_sharding_plan,
    describe_module,
    make_embedding_modules,
    make_sharding_plan,
)
from traincast.planner.torchrec.plans import plan_from_json, plan_to_json
from traincast.planner.torchrec.tables import default_modules, tables_from_json
from traincast.utils.errors import TraincastError

WORKER = Path(__file__).parent / "worker.py"


def test_without_torchrec_the_message_says_what_to_install(tables, plan, monkeypatch):
    planner.import_torchrec.cache_clear()
    monkeypatch.setitem(sys.modules, "torchrec", None)
    monkeypatch.setitem(sys.modules, "torchrec.distributed.types", None)
    try:
        with pytest.raises(TraincastError, match=r"install 'traincast\[torchrec\]'"):
            make_sharding_plan(plan, tables, gpus_per_node=2)
    finally:
        planner.import_torchrec.cache_clear()


@NEEDS_TORCHREC
def test_our_json_is_what_torchrec_writes_itself(tables, plan):
    ours = plan_to_json(plan, tables, gpus_per_node=2, modules=default_modules(tables))

    theirs = convert_sharding_plan(make_sharding_plan(plan, tables, gpus_per_node=2))

    assert theirs == ours
    assert plan_from_json(json.loads(json.dumps(theirs)), tables, world_size=4, gpus_per_node=2) == plan


@NEEDS_TORCHREC
def test_tables_become_modules_and_come_back(tables):
    poolings = {table.name: table.pooling.mean for table in tables}

    described = json.loads(json.dumps(describe_module(make_embedding_modules(tables), poolings)))
    read = tables_from_json(described)

    # TorchRec's modules do not know the access distribution
    assert {table.name: (table.rows, table.dim, table.dtype, table.weighted) for table in read.tables} == {
        table.name: (table.rows, table.dim, table.dtype, table.weighted) for table in tables
    }
    assert {table.name: (table.optimizer, table.pooling) for table in read.tables} == {
        table.name: (table.optimizer, table.pooling) for table in tables
    }
    assert read.modules == default_modules(tables)


@NEEDS_TORCHREC
def test_a_sequence_collection_is_described():
    import torch
    from torchrec.modules.embedding_configs import EmbeddingConfig
    from torchrec.modules.embedding_modules import EmbeddingCollection

    model = torch.nn.Sequential(
        EmbeddingCollection(
            tables=[EmbeddingConfig(num_embeddings=10, embedding_dim=8, name="s", feature_names=["f"])],
            device=torch.device("meta"),
        )
    )
    described = describe_module(model, {"s": 1.0})

    assert described["modules"]["0"]["tables"][0]["pooling"] == "NONE"
    assert tables_from_json(described).tables[0].rows == 10
    with pytest.raises(TraincastError, match="'s': pooling NONE"):
        tables_from_json(describe_module(model, {"s": 30.0}))
    with pytest.raises(TraincastError, match="no EmbeddingBagCollection"):
        describe_module(torch.nn.Linear(2, 2))


@NEEDS_TORCHREC
def test_a_dim_that_fbgemm_refuses_is_refused_by_name():
    with pytest.raises(TraincastError, match="'odd': dim 6"):
        make_embedding_modules([Table(name="odd", rows=10, dim=6, pooling=Pooling.from_constant(1.0))])


@NEEDS_TORCHREC
def test_torchrec_shards_its_modules_as_the_plan_says(tables, plan):
    """TorchRec's sharder, on every rank, over a process group that talks to nobody and meta tensors."""
    run = subprocess.run(
        [sys.executable, "-W", "ignore", str(WORKER), "shard"],
        input=json.dumps({"world_size": 4, "gpus_per_node": 2, **_content(tables, plan)}),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    theirs = sorted(map(tuple, json.loads(run.stdout.splitlines()[-1])))

    ours = sorted(
        (shard.rank, tables[shard.table].name, shard.height, shard.width, plan.placements[shard.table].kernel)
        for shard in plan.make_shards(tables)
    )
    assert theirs == ours


@NEEDS_TORCHREC
def test_a_step_of_two_processes_under_our_plan_equals_the_step_of_one(tmp_path):
    """DistributedModelParallel over gloo: forward, backward and the fused update give what one process gives."""
    tables = [
        Table(name=f"t{i}", rows=rows, dim=dim, pooling=Pooling.from_constant(3.0))
        for i, (rows, dim) in enumerate([(50, 16), (31, 8), (20, 32), (10, 8)])
    ]
    plan = Plan(
        tuple(table.name for table in tables),
        (
            Placement("table_wise", (1,)),
            Placement.make_row_wise(2),
            Placement("column_wise", (1, 0)),
            Placement.make_data_parallel(2),
        ),
        2,
    )
    content = json.dumps(
        {"world_size": 2, "gpus_per_node": 2, "store": str(tmp_path / "store"), **_content(tables, plan)}
    )
    workers = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", str(WORKER), "step", str(rank)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    for worker in workers:
        assert worker.stdin is not None
        worker.stdin.write(content)
        worker.stdin.close()
        worker.stdin = None
    results = [worker.communicate(timeout=300) for worker in workers]

    assert [worker.returncode for worker in workers] == [0, 0], "\n".join(errors[-1500:] for _, errors in results)
    for output, _ in results:
        error = json.loads(output.splitlines()[-1])
        assert error["first"] < 1e-5 and error["second"] < 1e-5 and error["moved"] > 1e-3


def _content(tables, plan):
    from traincast.planner.torchrec.tables import tables_to_json

    return {
        "tables": tables_to_json(tables),
        "plan": plan_to_json(plan, tables, gpus_per_node=2, modules=default_modules(tables)),
    }
