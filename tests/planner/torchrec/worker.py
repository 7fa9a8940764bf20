"""A process of `test_objects.py`: `worker.py shard`, or `worker.py step RANK`; its case is JSON on standard input."""

from __future__ import annotations

import json
import logging
import os
import sys
from typing import Any

import torch
import torch.distributed as dist

from traincast.planner.torchrec.planner import make_embedding_modules, make_sharding_plan
from traincast.planner.torchrec.plans import plan_from_json
from traincast.planner.torchrec.tables import tables_from_json

BATCH = 6
LEARNING_RATE = 0.05


def main() -> None:
    logging.disable(logging.WARNING)
    case = json.loads(sys.stdin.read())
    tables = tables_from_json(case["tables"]).tables
    sizes = {"world_size": case["world_size"], "gpus_per_node": case["gpus_per_node"]}
    plan = plan_from_json(case["plan"], tables, **sizes)
    if sys.argv[1] == "shard":
        print(json.dumps([shard for rank in range(plan.world_size) for shard in shards_of(rank, tables, plan, sizes)]))
    else:
        print(json.dumps(step(int(sys.argv[2]), tables, plan, case["store"])))


def shards_of(rank: int, tables: Any, plan: Any, sizes: dict[str, int]) -> list[tuple[Any, ...]]:
    """What TorchRec keeps on a rank: rank, table, rows, columns, kernel of every shard."""
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from torchrec.distributed import comm
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.types import ShardingEnv

    local = sizes["gpus_per_node"]
    os.environ.update(LOCAL_WORLD_SIZE=str(local), LOCAL_RANK=str(rank % local))
    dist.init_process_group("fake", rank=rank, world_size=plan.world_size, store=FakeStore())
    comm._INTRA_PG = comm._CROSS_PG = None
    planned = make_sharding_plan(plan, tables, gpus_per_node=local)
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    kept = []
    for path, module in make_embedding_modules(tables).items():
        sharded = EmbeddingBagCollectionSharder().shard(module, planned.plan[path], env, torch.device("meta"))
        for lookup in sharded._lookups:
            for kernel in getattr(lookup, "module", lookup)._emb_modules:
                kept += [
                    (rank, config.name, config.local_rows, config.local_cols, config.compute_kernel.value)
                    for config in kernel._config.embedding_tables
                ]
    dist.destroy_process_group()
    return kept


def step(rank: int, tables: Any, plan: Any, store: str) -> dict[str, float]:
    """Largest difference to an unsharded model, before and after one update."""
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    torch.manual_seed(0)
    dist.init_process_group("gloo", rank=rank, world_size=2, init_method=f"file://{store}")
    whole = make_embedding_modules(tables, device="cpu", learning_rate=LEARNING_RATE)
    weights = {name: value.detach().clone() for name, value in whole.state_dict().items()}
    planned = make_sharding_plan(plan, tables, gpus_per_node=2, device="cpu")
    modules = make_embedding_modules(tables, device="meta", learning_rate=LEARNING_RATE)
    sharded = DistributedModelParallel(modules, device=torch.device("cpu"), plan=planned)
    load(sharded, weights)

    torch.manual_seed(1)  # both processes know both batches; making shards drew differently
    lengths = torch.randint(0, 5, (len(tables), 2 * BATCH))
    features = [
        KeyedJaggedTensor(
            keys=[table.name for table in tables],
            values=torch.cat([torch.randint(0, table.rows, (n,)) for table, n in zip(tables, counts, strict=True)]),
            lengths=part.reshape(-1),
        )
        for part in lengths.split(BATCH, dim=1)
        for counts in [part.sum(dim=1).tolist()]
    ]
    bags, reference = sharded.module["embedding_bag_collection"], whole["embedding_bag_collection"]

    before = [reference(part) for part in features]
    output = bags(features[rank]).to_dict()
    first = difference(output, before[rank].to_dict(), tables)
    sum(value.pow(2).sum() for value in output.values()).backward()
    # TorchRec divides gradients by the number of ranks, as DistributedDataParallel does
    (sum(part.values().pow(2).sum() for part in before) / 2).backward()
    # copies are updated by the user's own optimizer, not in backward
    sharded_tables = [table for table in tables if plan.get_placement(table.name).kind != "data_parallel"]
    with torch.no_grad():
        after, second = reference(features[rank]).to_dict(), bags(features[rank]).to_dict()
    return {
        "first": first,
        "second": difference(second, after, sharded_tables),
        "moved": difference(after, before[rank].to_dict(), sharded_tables),
    }


def load(model: Any, weights: dict[str, Any]) -> None:
    """Copies whole weights into the shards of this process."""
    for name, value in model.state_dict().items():
        source = weights[name]
        if not hasattr(value, "local_shards"):
            value.detach().copy_(source)
            continue
        for shard in value.local_shards():
            (top, left), (rows, columns) = shard.metadata.shard_offsets, shard.metadata.shard_sizes
            shard.tensor.detach().copy_(source[top : top + rows, left : left + columns])


def difference(one: dict[str, Any], other: dict[str, Any], tables: Any) -> float:
    """Largest difference over the pooled rows of these tables."""
    return max(float((one[table.name] - other[table.name]).abs().max()) for table in tables)


if __name__ == "__main__":
    main()
