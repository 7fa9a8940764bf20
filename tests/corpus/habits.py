"""Training set-ups of single-file scripts: penalties on gradients, codebooks, clipped updates, hooks, many tasks."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tests.corpus.setups import setup, trained

_HELD = "the real measure drops the gradients of the step before, which are held"


@setup("WGAN with gradient penalty", "training loop", batch=8)
def wgan(batch: int, device: str = "cuda") -> Any:
    make = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.LeakyReLU(0.2), nn.Linear(32, 64)).to(device)
    judge = nn.Sequential(nn.Linear(64, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1)).to(device)
    optimizer = torch.optim.Adam(judge.parameters(), lr=1e-4, betas=(0.0, 0.9), foreach=True)
    real = torch.randn(batch, 64, device=device)

    def step() -> None:
        optimizer.zero_grad()
        with torch.no_grad():
            fake = make(torch.randn(batch, 16, device=device))
        share = torch.rand(batch, 1, device=device)
        between = (share * real + (1 - share) * fake).requires_grad_(True)
        scores = judge(between)
        (slopes,) = torch.autograd.grad(scores, between, torch.ones_like(scores), create_graph=True)
        penalty = ((slopes.norm(2, dim=1) - 1) ** 2).mean()
        (judge(fake).mean() - judge(real).mean() + 10 * penalty).backward()
        optimizer.step()

    return step


@setup(
    "VQ-VAE, codebook by moving averages",
    "vision",
    beside="mse_loss holds the bytes of its elements after it has added them up",
)
def codebook(batch: int, device: str = "cuda") -> Any:
    encode = nn.Sequential(nn.Conv2d(3, 16, 4, 2, 1), nn.ReLU(), nn.Conv2d(16, 16, 4, 2, 1)).to(device)
    decode = nn.Sequential(nn.ConvTranspose2d(16, 16, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(16, 3, 4, 2, 1))
    model = nn.ModuleList([encode, decode.to(device)])
    codes, sizes = torch.randn(32, 16, device=device), torch.ones(32, device=device)
    images = torch.randn(batch, 3, 32, 32, device=device)

    def loss() -> torch.Tensor:
        z = model[0](images).permute(0, 2, 3, 1).contiguous()
        flat = z.view(-1, 16)
        apart = flat.pow(2).sum(1, keepdim=True) + codes.pow(2).sum(1) - 2 * flat @ codes.t()
        near = torch.zeros(flat.shape[0], 32, device=device).scatter_(1, apart.argmin(1, keepdim=True), 1)
        with torch.no_grad():
            sizes.mul_(0.99).add_(near.sum(0), alpha=0.01)
            codes.mul_(0.99).add_(near.t() @ flat / sizes.unsqueeze(1), alpha=0.01)
        chosen = (near @ codes).view(z.shape)
        passed = (z + (chosen - z).detach()).permute(0, 3, 1, 2).contiguous()
        return functional.mse_loss(model[1](passed), images) + 0.25 * functional.mse_loss(chosen.detach(), z)

    return trained(model, loss)


@setup("PPO, clipped update", "reinforcement learning", batch=16, beside=_HELD)
def ppo(batch: int, device: str = "cuda") -> Any:
    actor = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 4))
    critic = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
    model = nn.ModuleList([actor, critic]).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=2.5e-4, eps=1e-5, foreach=True)
    seen, actions = torch.randn(batch, 8, device=device), torch.randint(0, 4, (batch,), device=device)
    before, gains, returns = (torch.randn(batch, device=device) for _ in range(3))

    def step() -> None:
        chance = torch.distributions.Categorical(logits=model[0](seen), validate_args=False)
        ratio = (chance.log_prob(actions) - before).exp()
        gain = (gains - gains.mean()) / (gains.std() + 1e-8)
        policy = torch.max(-gain * ratio, -gain * ratio.clamp(0.8, 1.2)).mean()
        value = 0.5 * (model[1](seen).view(-1) - returns).pow(2).mean()
        optimizer.zero_grad()
        (policy + 0.5 * value - 0.01 * chance.entropy().mean()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()

    return step


@setup("SimCLR", "vision", batch=4)
def simclr(batch: int, device: str = "cuda") -> Any:
    encode = nn.Sequential(nn.Conv2d(3, 16, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 32))
    model = encode.to(device)
    first, second = (torch.randn(batch, 3, 16, 16, device=device) for _ in range(2))

    def loss() -> torch.Tensor:
        z = functional.normalize(torch.cat([model(first), model(second)]), dim=1)
        alike = (z @ z.t() / 0.5).masked_fill(torch.eye(2 * batch, dtype=torch.bool, device=device), float("-inf"))
        return functional.cross_entropy(alike, (torch.arange(2 * batch, device=device) + batch) % (2 * batch))

    return trained(model, loss)


@setup("BYOL, target by moving average", "vision", batch=4, beside=_HELD)
def byol(batch: int, device: str = "cuda") -> Any:
    online = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 16)).to(device)
    target, guess = deepcopy(online), nn.Linear(16, 16).to(device)
    optimizer = torch.optim.SGD([*online.parameters(), *guess.parameters()], lr=0.1, momentum=0.9, foreach=True)
    first, second = (torch.randn(batch, 32, device=device) for _ in range(2))

    def step() -> None:
        with torch.no_grad():
            wanted = target(second)
        optimizer.zero_grad()
        (2 - 2 * functional.cosine_similarity(guess(online(first)), wanted, dim=-1).mean()).backward()
        optimizer.step()
        with torch.no_grad():
            for kept, new in zip(target.parameters(), online.parameters(), strict=True):
                kept.mul_(0.99).add_(new, alpha=0.01)

    return step


@setup("MMoE, two tasks", "recommender", batch=16)
def mmoe(batch: int, device: str = "cuda") -> Any:
    tables = nn.ModuleList(nn.Embedding(100, 8) for _ in range(4))
    experts = nn.ModuleList(nn.Sequential(nn.Linear(32, 16), nn.ReLU()) for _ in range(4))
    gates, towers = (nn.ModuleList(nn.Linear(width, made) for _ in range(2)) for width, made in ((32, 4), (16, 1)))
    model = nn.ModuleList([tables, experts, gates, towers]).to(device)
    ids, labels = torch.randint(0, 100, (batch, 4), device=device), torch.ones(batch, 1, device=device)

    def loss() -> torch.Tensor:
        x = torch.cat([table(ids[:, i]) for i, table in enumerate(tables)], 1)
        made = torch.stack([expert(x) for expert in experts], 1)
        mixed = [(gate(x).softmax(1).unsqueeze(2) * made).sum(1) for gate in gates]
        scores = [torch.sigmoid(tower(x)) for tower, x in zip(towers, mixed, strict=True)]
        return torch.stack([functional.binary_cross_entropy(score, labels) for score in scores]).sum()

    return trained(model, loss, lambda p: torch.optim.Adagrad(p, lr=0.05, foreach=True))


@setup("optimizers in hooks of backward", "optimizer", batch=8)
def in_backward(batch: int, device: str = "cuda") -> Any:
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8)).to(device)
    of = {parameter: torch.optim.Adam([parameter], foreach=True) for parameter in model.parameters()}
    x = torch.randn(batch, 32, device=device)

    def update(parameter: torch.Tensor) -> None:
        of[parameter].step()
        of[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    return lambda: model(x).square().mean().backward()


@setup("detection head, weighted targets", "vision", batch=4)
def detection(batch: int, device: str = "cuda") -> Any:
    layers = [nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.SiLU(), nn.Conv2d(16, 3 * 10, 1)]
    model = nn.Sequential(*layers).to(device)
    cost = nn.BCEWithLogitsLoss(pos_weight=torch.ones(1, device=device))
    images = torch.randn(batch, 3, 32, 32, device=device)
    which, anchor, row, column = (torch.randint(0, n, (3 * batch,), device=device) for n in (batch, 3, 16, 16))
    boxes = torch.rand(3 * batch, 4, device=device)

    def loss() -> torch.Tensor:
        made = model(images).view(batch, 3, 10, 16, 16).permute(0, 1, 3, 4, 2).contiguous()
        found = made[which, anchor, row, column]
        near = 1 - (found[:, :4].sigmoid() - boxes).abs().mean(1)
        there = torch.zeros_like(made[..., 4])
        there[which, anchor, row, column] = near.detach().clamp(0)
        return (1 - near).mean() + cost(made[..., 4], there) + cost(found[:, 5:], torch.zeros_like(found[:, 5:]))

    return trained(model, loss)
