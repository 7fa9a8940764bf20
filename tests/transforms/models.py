"""Small models to capture and edit, and their training steps as somebody would write them."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from traincast.capturing import capture_step


class Recommender(nn.Module):
    """Two tables, two MLPs, pairs of all features."""

    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(1000, 32, mode="sum") for _ in range(2))
        self.below = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 32))
        self.above = nn.Sequential(nn.Linear(32 + 9, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, dense, *lookups):
        x = self.below(dense)
        features = torch.stack([x, *(table(rows) for table, rows in zip(self.tables, lookups, strict=True))], 1)
        pairs = torch.bmm(features, features.transpose(1, 2))
        return self.above(torch.cat([x, pairs.flatten(1)], 1))


class _Block(nn.Module):
    """A layer of a language model; `fused`: attention is one op."""

    def __init__(self, fused):
        super().__init__()
        self.fused = fused
        self.norms = nn.ModuleList(nn.LayerNorm(64) for _ in range(2))
        self.qkv, self.out = nn.Linear(64, 192), nn.Linear(64, 64)
        self.feed = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
        self.drop = nn.Dropout(0.1)

    def forward(self, x, mask):
        q, k, v = (part.unflatten(2, (4, 16)).transpose(1, 2) for part in self.qkv(self.norms[0](x)).chunk(3, -1))
        if self.fused:
            seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            seen = self.drop((q @ k.transpose(2, 3) / 4 + mask).softmax(-1)) @ v
        x = x + self.drop(self.out(seen.transpose(1, 2).flatten(2)))
        return x + self.drop(self.feed(self.norms[1](x)))


class Language(nn.Module):
    """A small language model whose words are looked up and predicted with the same weights."""

    def __init__(self, fused=False):
        super().__init__()
        self.words = nn.Embedding(500, 64)
        self.blocks = nn.ModuleList(_Block(fused) for _ in range(2))
        self.norm = nn.LayerNorm(64)

    def forward(self, tokens):
        x = self.words(tokens)
        mask = torch.zeros(32, 32, device="cuda", dtype=x.dtype)
        for block in self.blocks:
            x = self.through(block, x, mask)
        return F.linear(self.norm(x), self.words.weight).flatten(0, 1)


class Residual(nn.Module):
    """A small network of convolutions, batch norms and a shortcut."""

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(inplace=True)
        )
        self.block = nn.Sequential(
            nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 1)
        )
        self.last = nn.Linear(16, 10)

    def forward(self, images):
        x = self.first(images)
        x = F.max_pool2d(F.relu(x + self.through(self.block, x)), 2)
        return self.last(x.mean((2, 3)))


def inputs_of(name, batch, dtype):
    if name == "recommender":
        lookups = [torch.zeros(batch, 8, dtype=torch.long, device="cuda") for _ in range(2)]
        return [torch.zeros(batch, 16, device="cuda", dtype=dtype), *lookups], torch.zeros(
            batch, 1, device="cuda", dtype=dtype
        )
    if name == "residual":
        return [torch.zeros(batch, 3, 16, 16, device="cuda", dtype=dtype)], torch.zeros(
            batch, dtype=torch.long, device="cuda"
        )
    return [torch.zeros(batch, 32, dtype=torch.long, device="cuda")], torch.zeros(
        batch * 32, dtype=torch.long, device="cuda"
    )


MODELS = {
    "recommender": Recommender,
    "language": Language,
    "fused": lambda: Language(fused=True),
    "residual": Residual,
}


def _again(run, *inputs):
    return checkpoint(run, *inputs, use_reentrant=False)


def _kept(run, *inputs):
    return run(*inputs)


def captured(name, *, autocast=None, weights=None, again=False, compiled=False):
    """A captured training step of a model: plain, under autocast, with its weights in another type, with its blocks
    computed again in the backward pass, or compiled."""

    def make_step(batch_size):
        model = MODELS[name]().cuda().to(weights or torch.float32)
        model.through = _again if again else _kept
        model = torch.compile(model) if compiled else model
        inputs, targets = inputs_of(name, batch_size, weights or torch.float32)
        loss = F.binary_cross_entropy_with_logits if name == "recommender" else F.cross_entropy
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

        def step():
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=autocast) if autocast else nullcontext():
                value = loss(model(*inputs), targets)
            value.backward()
            optimizer.step()

        return step

    return capture_step(make_step, batch_size=8, name=name, rebatch=False)


def ops_of(step):
    """Every op with the types and forms of its tensors, scope by scope."""
    program = step.programs[0]
    return [
        (program.names[program.columns.scope_name[op.scope]], op.signature)
        for op in program.ops
    ]  # fmt: skip
