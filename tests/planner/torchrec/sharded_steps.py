"""Recommenders of TorchRec on two ranks in many forms, that are run for real and captured.

`SETUPS` names them; a step is made by the function of its name: `sharded_steps:rows_adagrad`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

BATCH, ROWS, DIM = 256, 20_000, 32
KEYS = ("a", "b", "c", "d")


@dataclass(frozen=True, kw_only=True)
class Setup:
    """How the tables a to d are sharded (one word each), and what else of them differs."""

    kinds: tuple[str, str, str, str] = ("whole", "whole", "rows", "rows")
    optimizer: str = "SGD"
    weighted: bool = False
    pooling: str = "SUM"
    lengths: str = "differ"
    dims: tuple[int, int, int, int] = (DIM, DIM, DIM, DIM)
    sequence: bool = False
    layers: int = 1
    low_ids: bool = False  # four of five ids are in the first half of a table


SETUPS = {
    "sharded": Setup(),
    "whole": Setup(kinds=("whole",) * 4),
    "rows": Setup(kinds=("rows",) * 4),
    "columns": Setup(kinds=("columns",) * 4),
    "copied": Setup(kinds=("copied",) * 4),
    "columns_and_rows": Setup(kinds=("columns", "columns", "rows", "rows")),
    "whole_and_columns": Setup(kinds=("whole", "whole", "columns", "columns")),
    "rows_of_a_node": Setup(kinds=("node_rows",) * 4),
    "weighted": Setup(weighted=True),
    "weighted_whole": Setup(kinds=("whole",) * 4, weighted=True),
    "weighted_rows": Setup(kinds=("rows",) * 4, weighted=True),
    "mean": Setup(pooling="MEAN"),
    "adagrad": Setup(optimizer="ADAGRAD"),
    "rowwise_adagrad": Setup(optimizer="ROWWISE_ADAGRAD"),
    "one_each": Setup(lengths="one"),
    "empty_bags": Setup(lengths="sparse"),
    "other_widths": Setup(dims=(16, 32, 64, 128)),
    "deep": Setup(layers=4),
    "random_lengths": Setup(kinds=("whole",) * 4, lengths="random"),
    "random_lengths_by_rows": Setup(kinds=("rows",) * 4, lengths="random"),
    "rows_of_one_rank": Setup(kinds=("rows",) * 4, low_ids=True),
    "variable_batches": Setup(kinds=("whole",) * 4, lengths="variable"),
    "sequences": Setup(kinds=("whole",) * 4, sequence=True),
    "sequences_by_rows": Setup(kinds=("rows",) * 4, sequence=True),
}


def __getattr__(name: str) -> Callable[[int, str], Callable[[], object]]:
    if name not in SETUPS:
        raise AttributeError(name)
    return partial(_make_step, SETUPS[name])


class Recommender(nn.Module):
    """Four tables and layers over them."""

    def __init__(self, setup: Setup) -> None:
        from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig
        from torchrec.modules.embedding_configs import PoolingType

        super().__init__()
        self.sequence, meta = setup.sequence, torch.device("meta")
        sizes = [
            {"name": f"t_{key}", "embedding_dim": dim, "num_embeddings": ROWS, "feature_names": [key]}
            for key, dim in zip(KEYS, setup.dims, strict=True)
        ]
        if self.sequence:
            self.tables: Any = EmbeddingCollection(tables=[EmbeddingConfig(**size) for size in sizes], device=meta)
        else:
            bags = [EmbeddingBagConfig(**size, pooling=PoolingType[setup.pooling]) for size in sizes]
            self.tables = EmbeddingBagCollection(tables=bags, device=meta, is_weighted=setup.weighted)
        width = DIM if self.sequence else sum(setup.dims)
        hidden = [layer for _ in range(setup.layers - 1) for layer in (nn.Linear(width, width), nn.ReLU())]
        self.over = nn.Sequential(*hidden, nn.Linear(width, 1))

    def forward(self, features: Any) -> torch.Tensor:
        found = self.tables(features)
        rows = torch.cat([one.values() for one in found.values()]) if self.sequence else found.values()
        return self.over(rows).square().mean()


def features(rank: int, device: str, setup: Setup = SETUPS["sharded"]) -> Any:
    """Ranks have bags of other lengths, and rows that are in both halves of a table."""
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    count = BATCH * len(KEYS)
    if setup.lengths == "random":
        drawn = torch.Generator().manual_seed(rank)
        sizes = torch.randint(0, 6, (count,), generator=drawn).tolist()
    elif setup.lengths == "one":
        sizes = [1] * count
    else:
        of = 3 + rank if setup.lengths == "differ" else 2
        sizes = [(i + rank) % of for i in range(count)]
    lengths = torch.tensor(sizes, dtype=torch.int32).to(device)
    values = torch.arange(sum(sizes), device=device) * 7919 % ROWS
    if setup.low_ids:
        values = torch.where(torch.arange(sum(sizes), device=device) % 5 > 0, values % (ROWS // 2), values)
    if setup.lengths == "variable":
        return _vary_batches(rank, device)
    weights = torch.ones(sum(sizes), device=device) if setup.weighted else None
    return KeyedJaggedTensor(keys=list(KEYS), values=values, lengths=lengths, weights=weights)


def _vary_batches(rank: int, device: str) -> Any:
    """Features that have batches of their own, and where the rows of a sample are in them."""
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    strides = [[BATCH // (number + 1 + rank)] for number in range(len(KEYS))]
    sizes = [(i + rank) % 3 for i in range(sum(stride for (stride,) in strides))]
    places = torch.stack([torch.arange(BATCH) % stride for (stride,) in strides])
    return KeyedJaggedTensor(
        keys=list(KEYS), values=(torch.arange(sum(sizes)) * 7919 % ROWS).to(device),
        lengths=torch.tensor(sizes, dtype=torch.int32).to(device), stride_per_key_per_rank=strides,
        inverse_indices=(list(KEYS), places.to(device)),
    )  # fmt: skip


def _make_step(setup: Setup, rank: int, device: str) -> Callable[[], object]:
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec.distributed import DistributedModelParallel
    from torchrec.distributed.embedding import EmbeddingCollectionSharder
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.sharding_plan import construct_module_sharding_plan
    from torchrec.distributed.types import ShardingPlan

    model = Recommender(setup)
    kind = EmbeddingCollectionSharder if setup.sequence else EmbeddingBagCollectionSharder
    sharder: Any = kind({"optimizer": EmbOptimType[f"EXACT_{setup.optimizer}"], "learning_rate": 0.1})
    chosen = [_choose(kind, number % 2) for number, kind in enumerate(setup.kinds)]
    how = {f"t_{key}": choice for key, choice in zip(KEYS, chosen, strict=True)}
    plan = construct_module_sharding_plan(
        model.tables, how, sharder, local_size=2, world_size=2, device_type=torch.device(device).type
    )
    on = torch.device("cpu") if device == "cpu" else torch.device("cuda", rank)
    model = DistributedModelParallel(model, device=on, plan=ShardingPlan({"tables": plan}), sharders=[sharder])
    stepped = torch.optim.SGD([p for n, p in model.named_parameters() if "over" in n], lr=0.1, foreach=True)
    given = features(rank, device, setup)

    def step() -> None:
        stepped.zero_grad()
        model(given).backward()
        stepped.step()

    return step


def _choose(kind: str, rank: int) -> Any:
    from torchrec.distributed import sharding_plan

    fused = {"compute_kernel": "fused"}  # what a GPU takes by itself
    if kind == "whole":
        return sharding_plan.table_wise(rank=rank, **fused)
    if kind == "columns":
        return sharding_plan.column_wise(ranks=[0, 1], **fused)
    if kind == "copied":
        return sharding_plan.data_parallel()
    if kind == "node_rows":
        return sharding_plan.table_row_wise(host_index=0)
    return sharding_plan.row_wise(**fused)
