"""Tables of captured steps: where they go, with all that the step does besides."""

from __future__ import annotations

import json

import pytest

import traincast
from traincast.ir.workload import TABLES
from traincast.models.placement.plan import convert_plan_to_json
from traincast.utils.errors import TraincastError

ASKED = {"on": "dgx-a100", "gpus": 2, "batch_size": 256}


@pytest.mark.parametrize("model", ["deepfm", "wide-deep"])
def test_a_captured_model_is_sharded_as_predict_predicts_it(model):
    # Given a model with one FBGEMM lookup, and one with two
    found = traincast.shard(model, **ASKED, torchrec=False, time_limit=0)

    # When its best plan is predicted
    plan = json.dumps(convert_plan_to_json(found.best.plan))
    predicted = traincast.predict(model, **ASKED, plan=plan)

    # Then that is the step that was searched for, and it is not slower than the default plan
    assert found.is_whole_step
    assert predicted.iteration == found.best.seconds
    assert found.best.seconds <= traincast.predict(model, **ASKED).iteration


def test_the_default_plan_is_the_same_step_however_it_is_asked_for():
    found = traincast.shard("deepfm", **ASKED, torchrec=False, time_limit=0)
    greedy = next(plan for plan in found.plans if plan.name == "greedy by lookups")

    assert greedy.seconds == pytest.approx(traincast.predict("deepfm", **ASKED).iteration, rel=1e-9)


def test_steps_without_pooled_tables_are_rejected():
    with pytest.raises(TraincastError, match="has no fused tables that pool their rows"):
        traincast.shard("resnet50", on="dgx-a100", gpus=2)
    with pytest.raises(TraincastError, match="fused tables that pool their rows"):
        traincast.shard("din", on="dgx-a100", gpus=2)


SCRIPT = """
import os, torch, torch.distributed as dist
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel

ROWS = {"user": 5000, "item": 300}
dist.init_process_group("nccl")
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        tables = [EmbeddingBagConfig(name=k, embedding_dim=16, num_embeddings=n, feature_names=[k])
                  for k, n in ROWS.items()]
        self.tables = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
        self.over = torch.nn.Linear(32, 1)
    def forward(self, ids):
        return self.over(self.tables(ids).values()).square().mean()

model = DistributedModelParallel(Model(), device=device)
optimizer = torch.optim.SGD(model.module.over.parameters(), lr=0.1)
for _ in range(4):
    lengths = torch.tensor([1] * 64 + [3] * 64, dtype=torch.int32)
    ids = KeyedJaggedTensor(list(ROWS), torch.randint(0, 300, (256,)), lengths=lengths).to(device)
    optimizer.zero_grad()
    model(ids).backward()
    optimizer.step()
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    pytest.importorskip("torchrec")
    path = tmp_path_factory.mktemp("script") / "train.py"
    path.write_text(SCRIPT)
    return path


@pytest.fixture(scope="module")
def captured(script):
    return traincast.capture(str(script), gpus=1)


def test_a_script_s_tables_have_their_names_and_lookups(captured):
    # Given TorchRec's own modules in a script, when one rank of it is captured, then its tables are known
    modules = json.loads(captured.meta[TABLES])["modules"]
    assert list(modules) == ["tables"]
    entries = {entry["name"]: entry for entry in modules["tables"]["tables"]}
    assert entries["user"]["num_embeddings"] == 5000
    assert {name: entry["pooling_factors"] for name, entry in entries.items()} == {"user": [1.0], "item": [3.0]}
    assert captured.programs[0].batch_size == 64


def test_a_script_s_tables_are_placed(captured, tmp_path):
    found = traincast.shard(captured, on="dgx-h100", gpus=4, torchrec=False, time_limit=0)

    assert [table.name for table in found.task.tables] == ["user", "item"]
    assert [table.pooling.mean for table in found.task.tables] == [1.0, 3.0]
    assert found.task.batch_size == 64 and found.is_whole_step

    from traincast.planner.sharding.search import write_torchrec_plan

    assert list(write_torchrec_plan("train.py", found.task, found.best.plan)["plan"]) == ["tables"]


def test_tables_of_a_module_are_placed():
    pytest.importorskip("torchrec")
    import torch
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig

    config = EmbeddingBagConfig(name="t", embedding_dim=16, num_embeddings=5000, feature_names=["t"])
    module = EmbeddingBagCollection(tables=[config], device=torch.device("meta"))
    found = traincast.shard(module, on="dgx-h100", gpus=2, batch_size=64, torchrec=False, time_limit=0)

    assert [(table.name, table.rows) for table in found.task.tables] == [("t", 5000)]
    assert not found.is_whole_step


def test_arguments_are_for_scripts(tmp_path):
    with pytest.raises(TraincastError, match="no script was given"):
        traincast.shard("mlperf-dlrm", on="dgx-h100", gpus=8, arguments=["--x"])
