"""timm, diffusers, and detection and segmentation in the style of torchvision."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tests.corpus.setups import setup, trained

TIMM, DIFFUSERS = ("timm", "torchvision"), ("diffusers",)


def classified(model: nn.Module, batch: int, size: int, device: str, optimizer: Any = None) -> Any:
    model = model.to(device)
    images = torch.randn(batch, 3, size, size, device=device)
    labels = torch.zeros(batch, dtype=torch.long, device=device)
    return trained(model, lambda: functional.cross_entropy(model(images), labels), optimizer)


def timm_model(name: str, batch: int, size: int, device: str, **options: Any) -> Any:
    import timm

    return classified(timm.create_model(name, num_classes=10, **options), batch, size, device)


@setup(
    "timm ResNet-50, channels last, AMP",
    "vision",
    batch=4,
    needs=TIMM,
    beside="CUDA widens half to float inside softmax",
)
def resnet50(batch: int, device: str = "cuda") -> Any:
    import timm

    model = timm.create_model("resnet50", num_classes=10).to(device, memory_format=torch.channels_last)
    images = torch.randn(batch, 3, 64, 64, device=device).to(memory_format=torch.channels_last)
    labels = torch.zeros(batch, dtype=torch.long, device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler(device)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(device, dtype=torch.float16):
            loss = functional.cross_entropy(model(images), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    return step


@setup("timm ResNet-18", "vision", needs=TIMM)
def resnet18(batch: int, device: str = "cuda") -> Any:
    return timm_model("resnet18", batch, 64, device)


@setup("timm ConvNeXt", "vision", needs=TIMM)
def convnext(batch: int, device: str = "cuda") -> Any:
    return timm_model("convnext_atto", batch, 64, device)


@setup("timm EfficientNet", "vision", needs=TIMM)
def efficientnet(batch: int, device: str = "cuda") -> Any:
    return timm_model("efficientnet_b0", batch, 64, device)


@setup("timm Swin", "vision", needs=TIMM)
def swin(batch: int, device: str = "cuda") -> Any:
    return timm_model("swin_tiny_patch4_window7_224", batch, 56, device, img_size=56, depths=(2, 2), num_heads=(3, 6))


@setup("timm ViT", "vision", needs=TIMM)
def vit(batch: int, device: str = "cuda") -> Any:
    return timm_model("vit_tiny_patch16_224", batch, 64, device, img_size=64, depth=2)


@setup("timm MLP-Mixer", "vision", needs=TIMM)
def mixer(batch: int, device: str = "cuda") -> Any:
    return timm_model("mixer_s32_224", batch, 64, device, img_size=64)


@setup("timm RegNet, mixup and EMA", "vision", needs=TIMM, beside="on a CPU one_hot checks its classes first")
def regnet(batch: int, device: str = "cuda") -> Any:
    import timm
    import timm.optim
    from timm.data import Mixup
    from timm.loss import SoftTargetCrossEntropy
    from timm.utils import ModelEmaV3

    model = timm.create_model("regnetx_002", num_classes=10).to(device)
    average = ModelEmaV3(model)
    mixup, criterion = Mixup(mixup_alpha=0.8, num_classes=10), SoftTargetCrossEntropy()
    optimizer = timm.optim.create_optimizer_v2(model, opt="adamw", lr=1e-3)
    images = torch.randn(4 * (batch // 2 + 1) // 2 * 2, 3, 64, 64, device=device)[: batch // 2 * 2]
    labels = torch.zeros(batch // 2 * 2, dtype=torch.long, device=device)

    def step() -> None:
        mixed, targets = images, functional.one_hot(labels, 10).float()
        optimizer.zero_grad()
        criterion(model(mixed), targets).backward()
        optimizer.step()
        average.update(model)

    del mixup
    return step


@setup("diffusers DDPM UNet", "diffusion", needs=DIFFUSERS, beside="for group norm CUDA copies what has channels last")
def ddpm(batch: int, device: str = "cuda") -> Any:
    from diffusers import DDPMScheduler, UNet2DModel

    model = UNet2DModel(
        sample_size=16, in_channels=3, out_channels=3, layers_per_block=1, block_out_channels=(32, 64),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    ).to(device)  # fmt: skip
    scheduler = DDPMScheduler(num_train_timesteps=1000)
    images = torch.randn(batch, 3, 16, 16, device=device)

    def loss() -> torch.Tensor:
        noise = torch.randn_like(images)
        times = torch.randint(0, 1000, (batch,), device=device)
        return functional.mse_loss(model(scheduler.add_noise(images, noise, times), times).sample, noise)

    return trained(model, loss)


@setup("diffusers Stable Diffusion UNet", "diffusion", needs=DIFFUSERS)
def stable_diffusion(batch: int, device: str = "cuda") -> Any:
    from diffusers import UNet2DConditionModel

    model = UNet2DConditionModel(
        sample_size=16, layers_per_block=1, block_out_channels=(32, 64), cross_attention_dim=32, attention_head_dim=8,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    ).to(device)  # fmt: skip
    latent = torch.randn(batch, 4, 16, 16, device=device)
    text = torch.randn(batch, 8, 32, device=device)
    times = torch.randint(0, 1000, (batch,), device=device)
    return trained(model, lambda: functional.mse_loss(model(latent, times, text).sample, latent))


@setup(
    "diffusers DiT",
    "diffusion",
    needs=DIFFUSERS,
    beside="mse_loss holds the bytes of its elements after it has added them up",
)
def dit(batch: int, device: str = "cuda") -> Any:
    from diffusers import DiTTransformer2DModel

    model = DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=16, in_channels=4, num_layers=2, sample_size=16, norm_num_groups=4
    ).to(device)
    latent = torch.randn(batch, 4, 16, 16, device=device)
    times = torch.randint(0, 1000, (batch,), device=device)
    classes = torch.zeros(batch, dtype=torch.long, device=device)

    def loss() -> torch.Tensor:
        made = model(latent, timestep=times, class_labels=classes).sample
        return functional.mse_loss(made[:, :4], latent)

    return trained(model, loss)


@setup("diffusers VAE", "diffusion", needs=DIFFUSERS, beside="for group norm CUDA copies what has channels last")
def vae(batch: int, device: str = "cuda") -> Any:
    from diffusers import AutoencoderKL

    model = AutoencoderKL(block_out_channels=(32,), norm_num_groups=8).to(device)
    images = torch.randn(batch, 3, 16, 16, device=device)

    def loss() -> torch.Tensor:
        posterior = model.encode(images).latent_dist
        rebuilt = model.decode(posterior.sample()).sample
        return functional.mse_loss(rebuilt, images) + 1e-6 * posterior.kl().mean()

    return trained(model, loss)


class _UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True))
        self.deep = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU())
        self.up = nn.ConvTranspose2d(32, 16, 2, stride=2)
        self.out = nn.Conv2d(32, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        high = self.down(x)
        return self.out(torch.cat([high, self.up(self.deep(high))], 1))


@setup("UNet, segmentation", "vision")
def unet(batch: int, device: str = "cuda") -> Any:
    model = _UNet().to(device)
    images = torch.randn(batch, 3, 32, 32, device=device)
    labels = torch.zeros(batch, 32, 32, dtype=torch.long, device=device)
    return trained(model, lambda: functional.cross_entropy(model(images), labels))


class _RetinaHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 16, 3, 4, 1), nn.GroupNorm(4, 16), nn.ReLU())
        self.classes, self.boxes = nn.Conv2d(16, 9 * 5, 3, padding=1), nn.Conv2d(16, 9 * 4, 3, padding=1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        deep = self.body(x)
        n = len(x)
        classes = self.classes(deep).view(n, 9, 5, *deep.shape[2:]).permute(0, 3, 4, 1, 2).reshape(n, -1, 5)
        boxes = self.boxes(deep).view(n, 9, 4, *deep.shape[2:]).permute(0, 3, 4, 1, 2).reshape(n, -1, 4)
        return classes, boxes


@setup("RetinaNet head, focal loss", "vision")
def retina(batch: int, device: str = "cuda") -> Any:
    model = _RetinaHead().to(device)
    images = torch.randn(batch, 3, 64, 64, device=device)
    wanted = torch.zeros(batch, 16 * 16 * 9, 5, device=device)
    boxes = torch.zeros(batch, 16 * 16 * 9, 4, device=device)

    def loss() -> torch.Tensor:
        scores, moved = model(images)
        p = torch.sigmoid(scores)
        crossed = functional.binary_cross_entropy_with_logits(scores, wanted, reduction="none")
        focal = (crossed * (1 - (p * wanted + (1 - p) * (1 - wanted))) ** 2).sum()
        found = (wanted.sum(-1) > 0).float()
        near = (functional.smooth_l1_loss(moved, boxes, reduction="none").sum(-1) * found).sum()
        return (focal + near) / found.sum().clamp(min=1)

    return trained(model, loss)
