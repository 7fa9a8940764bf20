"""Training programs of NVIDIA's DeepLearningExamples as `make_step` functions, in the style their authors wrote them.

`precision` is "fp32" (which a device with TF32 may run in it) or "amp". `update` is the whole step; without it, one of
the steps that only add to gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager

import torch
import torch.nn.functional as F
from torch import nn

from traincast.zoo.define.examples import bert, mask_rcnn, transformer_xl
from traincast.zoo.define.examples.convnets import convnet

Step = Callable[[], object]
EXAMPLE_COSTS = {
    # four samples of four corners each for every element; going back, each is an atomic sum into a sector of 32 bytes
    "traincast_examples::roi_align": {"bytes": "4 * 4 * 4 * out0.numel"},
    "traincast_examples::roi_align_backward": {"bytes": "4 * 4 * 32 * in0.numel + out0.bytes"},
    "traincast_examples::nms": {"flops": "16 * in0[0] ** 2", "bytes": "in0[0] ** 2 / 8"},
}
"""What the ops of a detector cost, by formulas: assumed from what they read and write."""
CONVNETS = ("resnet50", "resnext101-32x4d", "se-resnext101-32x4d", "efficientnet-b0", "efficientnet-widese-b0")


def example_step(model: str, precision: str, *, update: bool) -> Callable[[int], Step]:
    """`make_step` of a model: one of `CONVNETS`, "bert-large", "transformer-xl" or "mask-rcnn"."""
    makers = {"bert-large": _bert, "transformer-xl": _transformer_xl, "mask-rcnn": _mask_rcnn}
    if model in makers:
        return lambda batch: makers[model](batch, precision == "amp", update)
    return lambda batch: _convnet(model, batch, precision == "amp", update)


def _autocast(mixed: bool) -> AbstractContextManager[object]:
    return torch.autocast("cuda", dtype=torch.float16, enabled=mixed)


def _convnet(name: str, batch: int, mixed: bool, update: bool) -> Step:
    """Channels last under AMP; label smoothing; the host waits for the device after every step."""
    layout = torch.channels_last if mixed else torch.contiguous_format
    model = convnet(name).cuda().to(memory_format=layout)  # type: ignore[call-overload]
    images = torch.randn(batch, 3, 224, 224, device="cuda").contiguous(memory_format=layout)
    labels = torch.zeros(batch, dtype=torch.int64, device="cuda")
    optimizer: torch.optim.Optimizer
    if name.startswith("efficientnet"):
        optimizer = torch.optim.RMSprop(
            model.parameters(), lr=0.1, alpha=0.9, eps=0.01, momentum=0.9, weight_decay=1e-5, foreach=False
        )
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.875, weight_decay=5e-5, foreach=False)
    scaler = torch.amp.GradScaler("cuda", enabled=mixed)

    def step() -> None:
        with _autocast(mixed):
            loss = _smoothed(model(images), labels)
        scaler.scale(loss).backward()
        if update:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        torch.cuda.synchronize()
        loss.item()

    return step


def _smoothed(scores: torch.Tensor, labels: torch.Tensor, smoothing: float = 0.1) -> torch.Tensor:
    """Cross entropy with a share of the weight on all classes."""
    chances = F.log_softmax(scores, dim=-1)
    right = -chances.gather(dim=-1, index=labels.unsqueeze(1)).squeeze(1)
    return ((1.0 - smoothing) * right + smoothing * -chances.mean(dim=-1)).mean()


def _bert(batch: int, mixed: bool, update: bool) -> Step:
    """Half weights with an fp32 copy in the optimizer, which is LAMB over lists of tensors."""
    length = 128
    model = bert.BertForPreTraining().cuda()
    model = model.half() if mixed else model
    tokens, types, present = (torch.zeros(batch, length, dtype=torch.int64, device="cuda") for _ in range(3))
    count = round(bert.MASKED * batch * length)
    masked, labels = (torch.zeros(count, dtype=torch.int64, device="cuda") for _ in range(2))
    relations = torch.zeros(batch, dtype=torch.int64, device="cuda")
    lamb = _FusedLamb(model.parameters(), mixed=mixed)
    scaler = torch.amp.GradScaler("cuda", enabled=mixed)

    def step() -> None:
        scores, relation = model(tokens, types, present, masked)
        loss = F.cross_entropy(scores, labels) + F.cross_entropy(relation.view(-1, 2), relations)
        scaler.scale(loss).backward()
        if update:
            lamb.step()

    return step


class _FusedLamb:
    """LAMB as multi-tensor kernels: norms of gradients, moments, norms of weights and updates, the update."""

    def __init__(self, parameters: Iterable[nn.Parameter], *, mixed: bool) -> None:
        self.parameters: list[torch.Tensor] = list(parameters)
        self.mixed = mixed
        self.masters = [p.detach().float() if mixed else p.detach() for p in self.parameters]
        self.first = [torch.zeros_like(p) for p in self.masters]
        self.second = [torch.zeros_like(p) for p in self.masters]
        self.steps = [torch.zeros((), device="cuda") for _ in self.masters]

    @torch.no_grad()
    def step(self) -> None:
        """One update; gradients are dropped."""
        with torch.autograd.profiler.record_function("Optimizer.step#FusedLAMBAMP.step"):
            gradients = [p.grad for p in self.parameters if p.grad is not None]
            torch._foreach_norm(gradients)
            wide = [g.float() for g in gradients] if self.mixed else gradients
            torch._fused_adamw_(
                self.masters, wide, self.first, self.second, [], self.steps, lr=1e-3, beta1=0.9, beta2=0.999,
                weight_decay=0.01, eps=1e-6, amsgrad=False, maximize=False,
            )  # fmt: skip
            torch._foreach_norm(self.masters)
            torch._foreach_norm(self.first)
            if self.mixed:
                torch._foreach_copy_(self.parameters, self.masters)
        for parameter in self.parameters:
            parameter.grad = None


def _transformer_xl(batch: int, mixed: bool, update: bool) -> Step:
    """Half weights with an fp32 copy (Apex O2); gradients are clipped; LAMB parameter by parameter, jitted."""
    length = transformer_xl.LENGTH
    model = transformer_xl.TransformerXl().cuda()
    model = model.half() if mixed else model
    kind = torch.float16 if mixed else torch.float32
    tokens, target = (torch.zeros(length, batch, dtype=torch.int64, device="cuda") for _ in range(2))
    memory = torch.zeros(transformer_xl.LAYERS, length, batch, transformer_xl.SIZE, dtype=kind, device="cuda")
    lamb = _JitLamb(model.parameters(), mixed=mixed)
    state = {"memory": memory}

    def step() -> None:
        losses, state["memory"] = model(tokens, target, state["memory"])
        loss = losses.float().mean().type_as(losses)
        (loss * 128.0 if mixed else loss).backward()
        loss.item()
        if update:
            lamb.step()

    return step


class _JitLamb:
    """LAMB parameter by parameter; what a compiler fused is written as the fewest kernels PyTorch has for it."""

    def __init__(self, parameters: Iterable[nn.Parameter], *, mixed: bool) -> None:
        self.parameters: list[torch.Tensor] = list(parameters)
        self.mixed = mixed
        self.masters = [p.detach().float() if mixed else p.detach() for p in self.parameters]
        self.first = [torch.zeros_like(p) for p in self.masters]
        self.second = [torch.zeros_like(p) for p in self.masters]

    @torch.no_grad()
    def step(self) -> None:
        """One update; gradients are dropped."""
        with torch.autograd.profiler.record_function("Optimizer.step#JITLamb.step"):
            gradients = [p.grad.float() if self.mixed else p.grad for p in self.parameters if p.grad is not None]
            torch.stack(torch._foreach_norm(gradients)).norm()
            torch._foreach_mul_(gradients, 0.5)
            for weight, gradient, first, second in zip(self.masters, gradients, self.first, self.second, strict=True):
                first.lerp_(gradient, 0.1)  # the three moments are one kernel when compiled, which moves as much
                change = torch.addcdiv(second, first, gradient)
                ratio = weight.norm() / change.norm()
                weight.addcmul_(change, ratio, value=-0.01)
            if self.mixed:
                torch._foreach_copy_(self.parameters, self.masters)
        for parameter in self.parameters:
            parameter.grad = None


def _mask_rcnn(batch: int, mixed: bool, update: bool) -> Step:
    """Channels last in every precision; SGD with momentum, parameter by parameter."""
    last = torch.channels_last
    model = mask_rcnn.MaskRcnn().cuda().to(memory_format=last)  # type: ignore[call-overload]
    images = torch.randn(batch, 3, mask_rcnn.HEIGHT, mask_rcnn.WIDTH, device="cuda").contiguous(memory_format=last)
    objects = torch.zeros(batch, mask_rcnn.TARGETS, 4, device="cuda")
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1, momentum=0.9, weight_decay=1e-4, foreach=False)
    scaler = torch.amp.GradScaler("cuda", enabled=mixed)

    def step() -> None:
        with _autocast(mixed):
            loss = model(images, objects)
        scaler.scale(loss).backward()
        if update:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

    return step
