"""A recommender of TorchRec on two ranks, tables whole and in rows, that is run for real and captured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

BATCH, ROWS, DIM = 256, 20_000, 32
KEYS = ("a", "b", "c", "d")


class Recommender(nn.Module):
    """Four tables and one layer over them."""

    def __init__(self) -> None:
        from torchrec import EmbeddingBagCollection, EmbeddingBagConfig

        super().__init__()
        tables = [
            EmbeddingBagConfig(name=f"t_{key}", embedding_dim=DIM, num_embeddings=ROWS, feature_names=[key])
            for key in KEYS
        ]
        self.tables = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
        self.over = nn.Linear(DIM * len(KEYS), 1)

    def forward(self, features: Any) -> torch.Tensor:
        return self.over(self.tables(features).values()).square().mean()


def features(rank: int, device: str) -> Any:
    """Ranks have bags of other lengths, and rows that are in both halves of a table."""
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    lengths = (torch.arange(BATCH * len(KEYS), device=device, dtype=torch.int32) + rank) % (3 + rank)
    values = torch.arange(sum((i + rank) % (3 + rank) for i in range(BATCH * len(KEYS))), device=device) * 7919 % ROWS
    return KeyedJaggedTensor(keys=list(KEYS), values=values, lengths=lengths)


def sharded(rank: int, device: str) -> Callable[[], object]:
    """Two tables whole, one on each rank, and two in rows on both; the layer is copied."""
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec.distributed import DistributedModelParallel
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise, table_wise
    from torchrec.distributed.types import ShardingPlan

    model = Recommender()
    fused = {"compute_kernel": "fused"}  # what a GPU takes by itself
    how = {
        "t_a": table_wise(rank=0, **fused), "t_b": table_wise(rank=1, **fused), "t_c": row_wise(**fused),
        "t_d": row_wise(**fused),
    }  # fmt: skip
    sharder = EmbeddingBagCollectionSharder({"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.1})
    plan = construct_module_sharding_plan(
        model.tables, how, sharder, local_size=2, world_size=2, device_type=torch.device(device).type
    )
    on = torch.device("cpu") if device == "cpu" else torch.device("cuda", rank)
    model = DistributedModelParallel(model, device=on, plan=ShardingPlan({"tables": plan}), sharders=[sharder])
    optimizer = torch.optim.SGD(model.module.over.parameters(), lr=0.1, foreach=True)
    given = features(rank, device)

    def step() -> None:
        optimizer.zero_grad()
        model(given).backward()
        optimizer.step()

    return step
