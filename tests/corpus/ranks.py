"""Several GPUs: DDP, FSDP, tensor, pipeline and context parallelism, accelerate, TorchRec."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from tests.corpus.loops import GPT, Block
from tests.corpus.recommenders import TORCHREC, bags, jagged
from tests.corpus.setups import setup, tokens, trained


class ToyModel(nn.Module):
    """That of PyTorch's tutorial on DDP."""

    def __init__(self) -> None:
        super().__init__()
        self.net1, self.relu, self.net2 = nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net2(self.relu(self.net1(x)))


@setup("DDP tutorial as printed", "data parallel", batch=20, gpus=2)
def ddp_tutorial(batch: int, *, rank: int, world_size: int) -> Any:
    from torch.nn.parallel import DistributedDataParallel as DDP

    def setup_group(rank: int, world_size: int) -> None:
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", "12355"
        acc = torch.accelerator.current_accelerator()
        backend = torch.distributed.get_default_backend_for_device(acc)
        dist.init_process_group(backend, rank=rank, world_size=world_size)

    setup_group(rank, world_size)
    model = ToyModel().to(rank)
    ddp_model = DDP(model, device_ids=[rank])
    loss_fn = nn.MSELoss()
    optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.001)

    def step() -> None:
        optimizer.zero_grad()
        outputs = ddp_model(torch.randn(batch, 10))
        labels = torch.randn(batch, 5).to(rank)
        loss_fn(outputs, labels).backward()
        optimizer.step()

    return step


def _ddp(batch: int, prepare: Any = None, model: nn.Module | None = None, **options: Any) -> Any:
    wrapped = DistributedDataParallel((model or ToyModel()).cuda(), **options)
    if prepare is not None:
        prepare(wrapped)
    x = torch.randn(batch, 10, device="cuda")
    return trained(wrapped, lambda: wrapped(x).square().mean())


@setup("DDP, torchrun style", "data parallel", batch=8, gpus=2)
def ddp_torchrun(batch: int, *, rank: int, world_size: int) -> Any:
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    dist.init_process_group(backend="nccl")
    return _ddp(batch, device_ids=[local])


class Unused(ToyModel):
    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(10, 5)


@setup("DDP, find_unused_parameters", "data parallel", batch=8, gpus=2)
def ddp_unused(batch: int, *, rank: int, world_size: int) -> Any:
    return _ddp(batch, model=Unused(), find_unused_parameters=True)


@setup("DDP, static_graph", "data parallel", batch=8, gpus=2)
def ddp_static(batch: int, *, rank: int, world_size: int) -> Any:
    return _ddp(batch, model=Unused(), static_graph=True)


@setup("DDP, fp16 communication hook", "data parallel", batch=8, gpus=2)
def ddp_hook(batch: int, *, rank: int, world_size: int) -> Any:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    return _ddp(batch, lambda ddp: ddp.register_comm_hook(None, default_hooks.fp16_compress_hook))


@setup("DDP, PowerSGD hook", "data parallel", batch=8, gpus=2)
def ddp_power(batch: int, *, rank: int, world_size: int) -> Any:
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    return _ddp(batch, lambda ddp: ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook), bucket_cap_mb=0.0001)


@setup("DDP, SyncBatchNorm", "data parallel", batch=8, gpus=2)
def ddp_sync_norm(batch: int, *, rank: int, world_size: int) -> Any:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.LazyLinear(4))
    model.cuda()(torch.randn(2, 3, 8, 8, device="cuda"))
    model = DistributedDataParallel(nn.SyncBatchNorm.convert_sync_batchnorm(model))
    x = torch.randn(batch, 3, 8, 8, device="cuda")
    return trained(model, lambda: model(x).square().mean())


@setup("DDP, ZeRO-1 optimizer", "data parallel", batch=8, gpus=2)
def zero_one(batch: int, *, rank: int, world_size: int) -> Any:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = DistributedDataParallel(ToyModel().cuda())
    x = torch.randn(batch, 10, device="cuda")
    return trained(
        model, lambda: model(x).square().mean(), lambda p: ZeroRedundancyOptimizer(p, torch.optim.Adam, lr=1e-3)
    )


@setup("DDP, torch.compile", "data parallel", batch=8, gpus=2)
def ddp_compiled(batch: int, *, rank: int, world_size: int) -> Any:
    model = torch.compile(DistributedDataParallel(ToyModel().cuda()))
    x = torch.randn(batch, 10, device="cuda")
    return trained(model, lambda: model(x).square().mean())


@setup("DDP with no_sync and loss all-reduced", "data parallel", batch=8, gpus=2)
def ddp_no_sync(batch: int, *, rank: int, world_size: int) -> Any:
    model = DistributedDataParallel(ToyModel().cuda())
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(batch, 10, device="cuda")

    def step() -> None:
        with model.no_sync():
            model(x).mean().backward()
        loss = model(x).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen = loss.detach()
        dist.all_reduce(seen, op=dist.ReduceOp.AVG)
        print(seen.item(), file=open(os.devnull, "w"))  # noqa: SIM115, PTH123

    return step


def _sharded(batch: int, seq_len: int, wrap: Any) -> Any:
    model = wrap(GPT().cuda())
    ids = tokens(batch, seq_len, 512, "cuda")
    return trained(model, lambda: model(ids, ids))


@setup("FSDP1", "sharded", seq_len=32, gpus=2)
def fsdp1(batch: int, seq_len: int, *, rank: int, world_size: int) -> Any:
    from functools import partial

    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
    from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

    policy = partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})
    precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)
    return _sharded(
        batch, seq_len,
        lambda m: FullyShardedDataParallel(
            m, auto_wrap_policy=policy, mixed_precision=precision, device_id=torch.cuda.current_device()
        ),
    )  # fmt: skip


@setup("FSDP1, use_orig_params", "sharded", seq_len=32, gpus=2)
def fsdp1_original(batch: int, seq_len: int, *, rank: int, world_size: int) -> Any:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    wrap = lambda m: FullyShardedDataParallel(m, auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=True)  # noqa: E731
    return _sharded(batch, seq_len, wrap)


def _fully(model: Any, **options: Any) -> Any:
    from torch.distributed.fsdp import fully_shard

    for block in model.h:
        fully_shard(block, **options)
    return fully_shard(model, **options)


@setup("FSDP2", "sharded", seq_len=32, gpus=2)
def fsdp2(batch: int, seq_len: int, *, rank: int, world_size: int) -> Any:
    return _sharded(batch, seq_len, _fully)


@setup("FSDP2, mixed precision, clipping", "sharded", seq_len=32, gpus=2)
def fsdp2_mixed(batch: int, seq_len: int, *, rank: int, world_size: int) -> Any:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    model = _fully(GPT().cuda(), mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    ids = tokens(batch, seq_len, 512, "cuda")
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        model(ids, ids).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


@setup("FSDP2, built on meta", "sharded", seq_len=32, gpus=2)
def fsdp2_meta(batch: int, seq_len: int, *, rank: int, world_size: int) -> Any:
    with torch.device("meta"):
        model = GPT()
    model = _fully(model)
    model.to_empty(device="cuda")
    ids = tokens(batch, seq_len, 512, "cuda")
    return trained(model, lambda: model(ids, ids))


@setup("FSDP2, CPU offload", "sharded", seq_len=32, gpus=2)
def fsdp2_offload(batch: int, seq_len: int, *, rank: int, world_size: int) -> Any:
    from torch.distributed.fsdp import CPUOffloadPolicy

    model = _fully(GPT(), offload_policy=CPUOffloadPolicy())
    ids = tokens(batch, seq_len, 512, "cuda")
    return trained(model, lambda: model(ids, ids))


@setup("HSDP", "sharded", seq_len=32, gpus=4)
def hsdp(batch: int, seq_len: int, *, rank: int, world_size: int) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("replicate", "shard"))
    return _sharded(batch, seq_len, lambda m: _fully(m, mesh=mesh))


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(functional.silu(self.up(x)))


def _split(model: nn.Module, mesh: Any) -> Any:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    return parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


@setup("tensor parallel", "tensor parallel", batch=8, gpus=2)
def tensor_parallel(batch: int, *, rank: int, world_size: int) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    model = _split(FeedForward().cuda(), init_device_mesh("cuda", (world_size,)))
    x = torch.randn(batch, 64, device="cuda")
    return trained(model, lambda: model(x).square().mean())


@setup("FSDP2 and tensor parallel on a 2-D mesh", "tensor parallel", batch=8, gpus=4)
def fsdp_tensor_parallel(batch: int, *, rank: int, world_size: int) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("dp", "tp"))
    model = fully_shard(_split(FeedForward().cuda(), mesh["tp"]), mesh=mesh["dp"])
    x = torch.randn(batch, 64, device="cuda")
    return trained(model, lambda: model(x).square().mean())


@setup("sequence parallel", "tensor parallel", batch=8, gpus=2)
def sequence_parallel(batch: int, *, rank: int, world_size: int) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    model = nn.Sequential(nn.LayerNorm(64), FeedForward()).cuda()
    plan = {
        "0": SequenceParallel(),
        "1": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
        "1.up": ColwiseParallel(), "1.down": RowwiseParallel(output_layouts=Shard(1)),
    }  # fmt: skip
    model = parallelize_module(model, init_device_mesh("cuda", (world_size,)), plan)
    x = torch.randn(batch, 16 // world_size, 64, device="cuda")
    return trained(model, lambda: model(x).square().mean())


def _pipeline(schedule: str, batch: int, rank: int, world_size: int, stages: int = 1) -> Any:
    from torch.distributed import pipelining

    total = world_size * stages
    parts = [nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).cuda() for _ in range(stages)]
    made = [
        pipelining.PipelineStage(part, rank + i * world_size, total, torch.device("cuda"))
        for i, part in enumerate(parts)
    ]
    run = getattr(pipelining, schedule)(
        made if stages > 1 else made[0], n_microbatches=4, loss_fn=lambda y, target: (y - target).square().mean()
    )
    optimizer = torch.optim.AdamW([p for part in parts for p in part.parameters()])
    x, target = torch.randn(4 * batch, 64, device="cuda"), torch.zeros(4 * batch, 64, device="cuda")

    def step() -> None:
        optimizer.zero_grad()
        first, last = rank == 0, rank == world_size - 1
        run.step(*([x] if first else []), **({"target": target} if last else {}))
        optimizer.step()

    return step


@setup("pipeline, GPipe", "pipeline", gpus=2)
def gpipe(batch: int, *, rank: int, world_size: int) -> Any:
    return _pipeline("ScheduleGPipe", batch, rank, world_size)


@setup("pipeline, 1F1B", "pipeline", gpus=4)
def one_f_one_b(batch: int, *, rank: int, world_size: int) -> Any:
    return _pipeline("Schedule1F1B", batch, rank, world_size)


@setup("pipeline, interleaved 1F1B", "pipeline", gpus=2)
def interleaved(batch: int, *, rank: int, world_size: int) -> Any:
    return _pipeline("ScheduleInterleaved1F1B", batch, rank, world_size, stages=2)


@setup("context parallel", "sequence", batch=2, seq_len=64, gpus=2)
def context(batch: int, seq_len: int, *, rank: int, world_size: int) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel

    mesh = init_device_mesh("cuda", (world_size,))
    block = Block(64, 4).cuda().bfloat16()
    full = torch.randn(batch, seq_len, 64, device="cuda", dtype=torch.bfloat16)

    optimizer = torch.optim.AdamW(block.parameters())

    def step() -> None:
        optimizer.zero_grad()
        x = full.clone()
        with context_parallel(mesh, buffers=[x], buffer_seq_dims=[1]):
            block(x).float().square().mean().backward()
        optimizer.step()

    return step


@setup("MoE, all-to-all of fixed sizes", "mixture of experts", batch=8, gpus=2)
def expert_parallel(batch: int, *, rank: int, world_size: int) -> Any:
    from torch.distributed.nn.functional import all_to_all_single

    gate, expert = nn.Linear(32, world_size).cuda(), FeedForward().cuda()
    model = nn.ModuleList([gate, expert])
    x = torch.randn(batch * world_size, 64, device="cuda")

    def loss() -> torch.Tensor:
        sent = all_to_all_single(torch.empty_like(x), x)
        back = all_to_all_single(torch.empty_like(x), expert(sent))
        return (back * gate(x[:, :32]).softmax(-1).max(-1).values[:, None]).square().mean()

    return trained(model, loss)


@setup("accelerate, DDP", "data parallel", batch=8, gpus=2, needs=("accelerate",))
def accelerate_ddp(batch: int, *, rank: int, world_size: int) -> Any:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, PartialState

    AcceleratorState._reset_state(True)
    PartialState._reset_state()
    accelerator = Accelerator()
    model = ToyModel()
    optimizer = torch.optim.AdamW(model.parameters())
    data = torch.utils.data.TensorDataset(torch.randn(8 * batch, 10))
    model, optimizer, loader = accelerator.prepare(model, optimizer, torch.utils.data.DataLoader(data, batch))
    batches = iter(loader)

    def step() -> None:
        (x,) = next(batches)
        accelerator.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()

    return step


@setup("Lightning, DDP", "data parallel", batch=8, gpus=2, needs=("lightning",))
def lightning_ddp(batch: int, *, rank: int, world_size: int) -> Any:
    import lightning as L

    class Net(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = ToyModel()

        def training_step(self, data: Any, index: int) -> torch.Tensor:
            return self.net(data[0]).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

    data = torch.utils.data.TensorDataset(torch.randn(8 * batch, 10))

    def step() -> None:
        trainer = L.Trainer(
            max_steps=1, accelerator="gpu", devices=world_size, strategy="ddp", logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(Net(), torch.utils.data.DataLoader(data, batch_size=batch))

    return step


class SparseNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables, self.over = bags("meta"), nn.Linear(32, 1)

    def forward(self, features: Any) -> tuple[torch.Tensor, torch.Tensor]:
        scores = self.over(self.tables(features).values())
        return scores.square().mean(), scores


def _sharded_recommender(world_size: int, rank: int, model: nn.Module | None = None) -> Any:
    from torchrec.distributed import DistributedModelParallel
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology

    model = model or SparseNet()
    sharders: Any = [EmbeddingBagCollectionSharder()]
    topology = Topology(world_size=world_size, compute_device="cuda")
    plan = EmbeddingShardingPlanner(topology=topology).plan(model, sharders)
    return DistributedModelParallel(model, device=torch.device("cuda", rank), plan=plan, sharders=sharders)


@setup("TorchRec DistributedModelParallel", "recommender", batch=8, gpus=2, needs=TORCHREC)
def distributed_model_parallel(batch: int, *, rank: int, world_size: int) -> Any:
    model = _sharded_recommender(world_size, rank)
    features = jagged(batch, "cuda")
    return trained(model, lambda: model(features)[0], lambda p: torch.optim.SGD(p, lr=0.1))


@setup("TorchRec TrainPipelineSparseDist", "recommender", batch=8, gpus=2, needs=TORCHREC)
def train_pipeline(batch: int, *, rank: int, world_size: int) -> Any:
    from itertools import repeat

    from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

    model = _sharded_recommender(world_size, rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pipeline = TrainPipelineSparseDist(model, optimizer, torch.device("cuda", rank))
    batches = repeat(jagged(batch, "cpu"))
    return lambda: pipeline.progress(batches)
