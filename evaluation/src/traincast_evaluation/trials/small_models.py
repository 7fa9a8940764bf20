"""Small Transformers and CNNs that a CPU thread trains in tens of milliseconds, from the zoo's definitions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from traincast.models.layers.optimizers import LEARNING_RATE
from traincast_evaluation.zoo.define.bert import BertForPreTraining, compute_pretraining_loss
from traincast_evaluation.zoo.define.gpt2 import Gpt2, compute_causal_loss
from traincast_evaluation.zoo.define.resnet import Bottleneck
from traincast_evaluation.zoo.define.sizes import LanguageModelSizes

Step = Callable[[], object]
_VOCABULARY, _LENGTH, _SIDE, _CLASSES = 4000, 64, 32, 100
_DEVIATION = 0.05  # of parameters: neither vanishing nor growing through a few layers


@dataclass(frozen=True, slots=True)
class SmallModel:
    """How to build a model, a batch of it, and its loss (model outputs, then the batch's targets)."""

    build: Callable[[], nn.Module]
    batch: Callable[[int], tuple[torch.Tensor, tuple[torch.Tensor, ...]]]
    loss: Callable[..., torch.Tensor]
    adam: bool


def _draw_tokens(batch_size: int) -> torch.Tensor:
    return torch.arange(batch_size * _LENGTH).remainder(_VOCABULARY).view(batch_size, _LENGTH)


def _define_bert(layers: int, size: int) -> SmallModel:
    config = LanguageModelSizes(
        num_layers=layers, hidden_size=size, num_heads=4, ffn_size=4 * size, vocab_size=_VOCABULARY,
        max_seq_len=_LENGTH, dropout=0.0,
    )  # fmt: skip

    def batch(samples: int) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        return _draw_tokens(samples), (_draw_tokens(samples), torch.zeros(samples, dtype=torch.int64))

    return SmallModel(lambda: BertForPreTraining(config), batch, compute_pretraining_loss, adam=True)


def _define_gpt2(layers: int, size: int) -> SmallModel:
    config = LanguageModelSizes(
        num_layers=layers, hidden_size=size, num_heads=4, max_seq_len=_LENGTH, vocab_size=_VOCABULARY, dropout=0.0
    )
    return SmallModel(
        lambda: Gpt2(config), lambda n: (_draw_tokens(n), (_draw_tokens(n),)), compute_causal_loss, adam=True
    )


def _draw_images(samples: int) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    return torch.rand(samples, 3, _SIDE, _SIDE), (torch.zeros(samples, dtype=torch.int64),)


def _define_cnn(build: Callable[[], nn.Module]) -> SmallModel:
    return SmallModel(build, _draw_images, F.cross_entropy, adam=False)


def _build_resnet() -> nn.Module:
    """A stem and three stages of one bottleneck each."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(),
        Bottleneck(32, 16, 1), Bottleneck(64, 32, 2), Bottleneck(128, 64, 2),
        nn.AdaptiveAvgPool2d((1, 1)), nn.Flatten(), nn.Linear(256, _CLASSES),
    )  # fmt: skip


def _build_conv_stack(widths: tuple[int, ...], convolutions: int, kernel: int) -> nn.Module:
    """Stages of convolutions with ReLU, each ended by a pool; then a classifier."""
    layers: list[nn.Module] = []
    channels = 3
    for width in widths:
        for _ in range(convolutions):
            layers += [nn.Conv2d(channels, width, kernel, padding=kernel // 2), nn.ReLU()]
            channels = width
        layers.append(nn.MaxPool2d(2, stride=2))
    side = _SIDE >> len(widths)
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels * side * side, _CLASSES))


SMALL_MODELS: dict[str, SmallModel] = {
    "bert-mini": _define_bert(2, 192),
    "bert-small": _define_bert(4, 256),
    "gpt2-mini": _define_gpt2(2, 192),
    "gpt2-small": _define_gpt2(4, 256),
    "resnet-mini": _define_cnn(_build_resnet),
    "vgg-mini": _define_cnn(lambda: _build_conv_stack((32, 64, 128), 2, 3)),
    "plain-mini": _define_cnn(lambda: _build_conv_stack((24, 48), 1, 5)),
}


def build_small_model_step(name: str) -> Callable[..., Step]:
    """`make_step(batch_size, *, rank, world_size)` of a model; under DDP where there are several ranks."""
    small = SMALL_MODELS[name]

    def make_step(batch_size: int, *, rank: int = 0, world_size: int = 1) -> Step:
        model = _initialise_weights(small.build())
        if world_size > 1:
            model = DistributedDataParallel(model)
        batch, targets = small.batch(batch_size)
        optimizer: Any = torch.optim.AdamW if small.adam else torch.optim.SGD
        # on a CPU PyTorch steps one parameter at a time; a capture, which imitates a GPU, is told so
        stepped = optimizer(model.parameters(), lr=LEARNING_RATE, foreach=False)

        def step() -> None:
            stepped.zero_grad()
            small.loss(model(batch), *targets).backward()  # type: ignore[no-untyped-call]
            stepped.step()

        return step

    return make_step


def _initialise_weights(model: nn.Module) -> nn.Module:
    """Numbers in every parameter: memory as it was found may hold some that take a CPU far longer."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, _DEVIATION)
    return model
