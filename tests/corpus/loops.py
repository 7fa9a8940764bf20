"""Training loops as people write them: nanoGPT, optimizers, checkpointing, graphs, Lightning, torch.compile."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tests.corpus.setups import setup, tokens, trained

PYG = ("torch_geometric",)


class Block(nn.Module):
    def __init__(self, dim: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.c_attn, self.c_proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim), nn.Dropout(dropout))
        self.heads = heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, c = x.size()
        q, k, v = self.c_attn(self.ln_1(x)).split(c, dim=2)
        q, k, v = (y.view(b, t, self.heads, c // self.heads).transpose(1, 2) for y in (q, k, v))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).contiguous().view(b, t, c))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, layers: int = 2, dim: int = 64, dropout: float = 0.0) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(512, dim), nn.Embedding(512, dim)
        self.h = nn.ModuleList(Block(dim, 4, dropout) for _ in range(layers))
        self.ln_f, self.lm_head = nn.LayerNorm(dim), nn.Linear(dim, 512, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        places = torch.arange(0, ids.shape[1], dtype=torch.long, device=ids.device)
        x = self.wte(ids) + self.wpe(places)
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return functional.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)


@setup("nanoGPT", "language model", seq_len=64)
def nanogpt(batch: int, seq_len: int, device: str = "cuda") -> Any:
    model = GPT().to(device)
    ids = tokens(batch, seq_len, 512, device)
    return trained(model, lambda: model(ids, ids))


@setup(
    "nanoGPT, accumulation, scaler, clipping, printed loss",
    "language model",
    seq_len=64,
    like_cpu=False,
    beside="pins memory, which needs a GPU",
)
def nanogpt_loop(batch: int, seq_len: int, device: str = "cuda") -> Any:
    model = GPT(dropout=0.1).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95), fused=True)
    scaler = torch.amp.GradScaler(device, enabled=True)
    data = torch.randint(0, 512, (4096,), dtype=torch.int64)

    def get_batch() -> tuple[torch.Tensor, torch.Tensor]:
        starts = torch.randint(len(data) - seq_len - 1, (batch,))
        x = torch.stack([data[i : i + seq_len] for i in range(len(starts))])
        y = torch.stack([data[i + 1 : i + 1 + seq_len] for i in range(len(starts))])
        return x.pin_memory().to(device, non_blocking=True), y.pin_memory().to(device, non_blocking=True)

    def step() -> None:
        for _ in range(2):
            x, y = get_batch()
            with torch.amp.autocast(device_type=device, dtype=torch.float16):
                loss = model(x, y) / 2
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        print(f"loss {loss.item():.4f}", file=open("/dev/null", "w"))  # noqa: SIM115, PTH123

    return step


@setup("nanoGPT, torch.compile", "compiled", seq_len=64)
def nanogpt_compiled(batch: int, seq_len: int, device: str = "cuda") -> Any:
    model = torch.compile(GPT().to(device))
    ids = tokens(batch, seq_len, 512, device)
    return trained(model, lambda: model(ids, ids))


@setup("whole step under torch.compile", "compiled", batch=8)
def step_compiled(batch: int, device: str = "cuda") -> Any:
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8)).to(device)
    optimizer = torch.optim.Adam(model.parameters())
    x, y = torch.randn(batch, 32, device=device), torch.zeros(batch, dtype=torch.long, device=device)

    @torch.compile(mode="max-autotune", fullgraph=False)
    def step() -> None:
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    return step


@torch.compile
def _rotate(x: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([-b, a], -1) * x.sigmoid()


@setup("function under @torch.compile at module level", "compiled", batch=8)
def module_level_compile(batch: int, device: str = "cuda") -> Any:
    layer = nn.Linear(32, 32).to(device)
    x = torch.randn(batch, 32, device=device)
    return trained(layer, lambda: _rotate(layer(x)).sum())


@setup("module.compile()", "compiled", batch=8)
def module_compiled(batch: int, device: str = "cuda") -> Any:
    model = nn.Sequential(nn.Linear(32, 64), nn.SiLU(), nn.Linear(64, 8)).to(device)
    model.compile(dynamic=False)
    x = torch.randn(batch, 32, device=device)
    return trained(model, lambda: model(x).square().mean())


@setup(
    "flex_attention, causal block mask, compiled",
    "compiled",
    seq_len=128,
    like_cpu=False,
    beside="flex_attention has no backward on a CPU",
)
def flex(batch: int, seq_len: int, device: str = "cuda") -> Any:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    attend = torch.compile(flex_attention)
    mix = nn.Linear(64, 192).to(device)
    x = torch.randn(batch, seq_len, 64, device=device)
    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, seq_len, seq_len, device=device)

    def loss() -> torch.Tensor:
        q, k, v = mix(x).view(batch, seq_len, 3, 4, 16).permute(2, 0, 3, 1, 4)
        return attend(q, k, v, block_mask=mask).square().mean()

    return trained(mix, loss)


@setup("varlen attention", "language model", seq_len=64, like_cpu=False, beside="no CPU has a kernel for it")
def varlen(batch: int, seq_len: int, device: str = "cuda") -> Any:
    from torch.nn.attention.varlen import varlen_attn

    mix = nn.Linear(64, 192, dtype=torch.bfloat16).to(device)
    x = torch.randn(batch * seq_len, 64, device=device, dtype=torch.bfloat16)
    ends = torch.arange(0, batch * seq_len + 1, seq_len, dtype=torch.int32, device=device)

    def loss() -> torch.Tensor:
        q, k, v = mix(x).view(batch * seq_len, 3, 4, 16).unbind(1)
        return varlen_attn(q, k, v, ends, ends, seq_len, seq_len, window_size=(-1, 0)).float().square().mean()

    return trained(mix, loss)


def _torchtitan(kind: str, batch: int, seq_len: int, device: str) -> Any:
    from torchtitan.models.llama3 import llama3_configs

    config = llama3_configs[kind]
    model = config.build() if hasattr(config, "build") else config()
    model = model.to(device)
    ids = tokens(batch, seq_len, 256, device)
    return trained(model, lambda: functional.cross_entropy(model(ids).flatten(0, 1).float(), ids.flatten()))


@setup("torchtitan Llama 3", "language model", seq_len=64, needs=("torchtitan", "triton"))
def torchtitan_llama(batch: int, seq_len: int, device: str = "cuda") -> Any:
    return _torchtitan("debugmodel", batch, seq_len, device)


def _mlp(device: str) -> nn.Sequential:
    return nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8)).to(device)


def _with(optimizer: Any, batch: int, device: str) -> Any:
    model, x = _mlp(device), torch.randn(batch, 32, device=device)
    return trained(model, lambda: model(x).square().mean(), optimizer)


@setup("AdamW, fused", "optimizer", batch=8)
def adamw_fused(batch: int, device: str = "cuda") -> Any:
    return _with(lambda p: torch.optim.AdamW(p, fused=True), batch, device)


@setup("Adafactor", "optimizer", batch=8)
def adafactor(batch: int, device: str = "cuda") -> Any:
    return _with(torch.optim.Adafactor, batch, device)


@setup("Muon", "optimizer", batch=8)
def muon(batch: int, device: str = "cuda") -> Any:
    def both(parameters: Any) -> Any:
        return torch.optim.Muon([p for p in parameters if p.dim() == 2])

    return _with(both, batch, device)


@setup("SGD, momentum, EMA, schedule", "optimizer", batch=8)
def sgd_ema(batch: int, device: str = "cuda") -> Any:
    model, x = _mlp(device), torch.randn(batch, 32, device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, foreach=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=100)
    average = torch.optim.swa_utils.AveragedModel(model)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        schedule.step()
        average.update_parameters(model)

    return step


@setup(
    "sparse embeddings with SparseAdam",
    "optimizer",
    batch=8,
    beside="sparse gradients: rows that are equal stay apart in a capture",
)
def sparse_adam(batch: int, device: str = "cuda") -> Any:
    table = nn.Embedding(100, 16, sparse=True).to(device)
    ids = torch.randint(0, 100, (batch, 4), device=device)
    return trained(table, lambda: table(ids).square().mean(), lambda p: torch.optim.SparseAdam(list(p)))


@setup("LBFGS", "optimizer", batch=8, refused="needs the values")
def lbfgs(batch: int, device: str = "cuda") -> Any:
    model, x = _mlp(device), torch.randn(batch, 32, device=device)
    optimizer = torch.optim.LBFGS(model.parameters())

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    return lambda: optimizer.step(closure)


def _two(device: str) -> nn.Sequential:
    """A layer, and a block to checkpoint, whose input then needs a gradient."""
    return nn.Sequential(nn.Linear(64, 64), Block(64, 4)).to(device)


@setup(
    "activation checkpointing, selective",
    "training loop",
    seq_len=64,
    beside="under its mode PyTorch adds attention masks out of place",
)
def selective(batch: int, seq_len: int, device: str = "cuda") -> Any:
    from functools import partial

    from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        kept = op is torch.ops.aten.mm.default
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    model, x = _two(device), torch.randn(batch, seq_len, 64, device=device)
    contexts = partial(create_selective_checkpoint_contexts, policy)
    return trained(model, lambda: checkpoint(model[1], model[0](x), use_reentrant=False, context_fn=contexts).sum())


@setup(
    "activation checkpointing, re-entrant",
    "training loop",
    seq_len=64,
    beside="checkpointing keeps states of random numbers in host memory",
)
def reentrant(batch: int, seq_len: int, device: str = "cuda") -> Any:
    from torch.utils.checkpoint import checkpoint

    model, x = _two(device), torch.randn(batch, seq_len, 64, device=device)
    return trained(model, lambda: checkpoint(model[1], model[0](x), use_reentrant=True).sum())


@setup("custom autograd function", "training loop", batch=8)
def custom_function(batch: int, device: str = "cuda") -> Any:
    class Swish(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x * torch.sigmoid(x)

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            (x,) = ctx.saved_tensors
            s = torch.sigmoid(x)
            return grad * (s * (1 + x * (1 - s)))

    model, x = _mlp(device), torch.randn(batch, 32, device=device)
    return trained(model, lambda: Swish.apply(model(x)).mean())


@setup("DataLoader in the step", "training loop", batch=8, beside="a CPU holds the data set too")
def loader(batch: int, device: str = "cuda") -> Any:
    model = _mlp(device)
    data = torch.utils.data.TensorDataset(torch.randn(batch * 4, 32), torch.zeros(batch * 4, dtype=torch.long))
    batches = iter(torch.utils.data.DataLoader(data, batch_size=batch, shuffle=True, pin_memory=True))

    def loss() -> torch.Tensor:
        x, y = next(batches)
        return functional.cross_entropy(model(x.to(device, non_blocking=True)), y.to(device, non_blocking=True))

    return trained(model, loss)


@setup(
    "GAN, two optimizers",
    "training loop",
    batch=8,
    beside="the real measure drops the gradients of the step before, which are held",
)
def gan(batch: int, device: str = "cuda") -> Any:
    make, judge = (
        nn.Linear(16, 32).to(device),
        nn.Sequential(nn.Linear(32, 16), nn.LeakyReLU(), nn.Linear(16, 1)).to(device),
    )
    first, second = (torch.optim.Adam(m.parameters(), lr=2e-4, foreach=True) for m in (make, judge))
    real = torch.randn(batch, 32, device=device)
    ones, zeros = torch.ones(batch, 1, device=device), torch.zeros(batch, 1, device=device)
    cost = nn.BCEWithLogitsLoss()

    def step() -> None:
        fake = make(torch.randn(batch, 16, device=device))
        second.zero_grad()
        (cost(judge(real), ones) + cost(judge(fake.detach()), zeros)).backward()
        second.step()
        first.zero_grad()
        cost(judge(fake), ones).backward()
        first.step()

    return step


@setup("DPO, frozen reference model", "language model", seq_len=32)
def dpo(batch: int, seq_len: int, device: str = "cuda") -> Any:
    from copy import deepcopy

    policy = GPT(1).to(device)
    reference = deepcopy(policy).requires_grad_(False).eval()
    good, bad = tokens(batch, seq_len, 512, device), tokens(batch, seq_len, 512, device)

    def loss() -> torch.Tensor:
        with torch.no_grad():
            before = reference(good, good) - reference(bad, bad)
        return -functional.logsigmoid(0.1 * (policy(good, good) - policy(bad, bad) - before)).mean()

    return trained(policy, loss)


def _graph(kind: str, batch: int, device: str) -> Any:
    from torch_geometric import nn as pyg

    layers = [getattr(pyg, kind)(16, 16) for _ in range(2)]
    model = nn.ModuleList(layers).to(device)
    x, edge = torch.randn(10 * batch, 16, device=device), torch.arange(40 * batch, device=device)
    edges = torch.stack([edge, 7 * edge + 3]) % (10 * batch)
    labels = torch.zeros(10 * batch, dtype=torch.long, device=device)

    def loss() -> torch.Tensor:
        deep = x
        for layer in model:
            deep = layer(deep, edges).relu()
        return functional.cross_entropy(deep, labels)

    return trained(model, loss)


@setup("PyG GraphSAGE", "graph", batch=4, needs=PYG)
def sage(batch: int, device: str = "cuda") -> Any:
    return _graph("SAGEConv", batch, device)


@setup("PyG GCN", "graph", batch=4, needs=PYG)
def gcn(batch: int, device: str = "cuda") -> Any:
    return _graph("GCNConv", batch, device)


@setup("PyG GAT", "graph", batch=4, needs=PYG)
def gat(batch: int, device: str = "cuda") -> Any:
    return _graph("GATConv", batch, device)


@setup(
    "Lightning Trainer", "training loop", batch=8, needs=("lightning",),
    beside="a CPU's autocast computes all of cross_entropy in float32, and a CPU holds the data set too",
)  # fmt: skip
def lightning(batch: int, device: str = "cuda") -> Any:
    import lightning as L

    class Net(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4))

        def training_step(self, data: Any, index: int) -> torch.Tensor:
            x, y = data
            loss = functional.cross_entropy(self.layers(x), y)
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

    data = torch.utils.data.TensorDataset(torch.randn(4 * batch, 32), torch.zeros(4 * batch, dtype=torch.long))

    def step() -> None:
        trainer = L.Trainer(
            max_steps=1, accelerator="gpu" if device == "cuda" else "cpu", devices=1, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, precision="bf16-mixed",
        )  # fmt: skip
        trainer.fit(Net(), torch.utils.data.DataLoader(data, batch_size=batch))

    return step
