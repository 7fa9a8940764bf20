"""Training programs of NVIDIA's DeepLearningExamples as `make_step` functions, in the style their authors wrote them.

`precision` is "fp32" (which a device with TF32 may run in it) or "amp". `update` is the whole step; without it, one of
the steps that only add to gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

import torch
import torch.nn.functional as F

from traincast_evaluation.zoo.build.example_optimizers import FusedLamb, FusedSgd, JitLamb
from traincast_evaluation.zoo.build.lambda_steps import make_ncf_step, make_ssd_step
from traincast_evaluation.zoo.define.examples import bert, mask_rcnn, transformer_xl
from traincast_evaluation.zoo.define.examples.coco import Images
from traincast_evaluation.zoo.define.examples.convnets import count_image_pixels, make_convnet

Step = Callable[[], object]


def make_example_step(model: str, precision: str, *, update: bool) -> Callable[[int], Step]:
    """`make_step` of a model: one of `list_convnets`, "bert-large", "transformer-xl", "transformer-xl-large",
    "mask-rcnn", "ncf" or "ssd300"."""
    makers: dict[str, Callable[[int, bool, bool], Step]] = {
        "bert-large": _make_bert_step,
        "transformer-xl": partial(_make_transformer_xl_step, sizes=transformer_xl.BASE),
        "transformer-xl-large": partial(_make_transformer_xl_step, sizes=transformer_xl.LARGE_PUBLISHED),
        "ncf": make_ncf_step,
        "ssd300": make_ssd_step,
        "mask-rcnn": _make_mask_rcnn_step,
    }
    if model in makers:
        return lambda batch: makers[model](batch, precision == "amp", update)
    return lambda batch: _make_convnet_step(model, batch, precision == "amp", update)


def _enter_autocast(mixed: bool) -> AbstractContextManager[object]:
    return torch.autocast("cuda", dtype=torch.float16, enabled=mixed)


def _make_convnet_step(name: str, batch: int, mixed: bool, update: bool) -> Step:
    """Channels last under AMP; label smoothing; the host waits for the device after every step."""
    layout = torch.channels_last if mixed else torch.contiguous_format
    model = make_convnet(name).cuda().to(memory_format=layout)  # type: ignore[call-overload]
    pixels = count_image_pixels(name)
    images = torch.randn(batch, 3, pixels, pixels, device="cuda").contiguous(memory_format=layout)
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
        with _enter_autocast(mixed):
            loss = _compute_smoothed_loss(model(images), labels)
        scaler.scale(loss).backward()
        if update:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=False)
        torch.cuda.synchronize()
        loss.item()

    return step


def _compute_smoothed_loss(scores: torch.Tensor, labels: torch.Tensor, smoothing: float = 0.1) -> torch.Tensor:
    """Cross entropy with a share of the weight on all classes."""
    chances = F.log_softmax(scores, dim=-1)
    right = -chances.gather(dim=-1, index=labels.unsqueeze(1)).squeeze(1)
    return ((1.0 - smoothing) * right + smoothing * -chances.mean(dim=-1)).mean()


def _make_bert_step(batch: int, mixed: bool, update: bool) -> Step:
    """Half weights with an fp32 copy in the optimizer, which is LAMB over lists of tensors; the example scripts the
    whole model, and the compiler of its container fuses what is between GEMMs."""
    length = 128
    model = bert.BertForPreTraining().cuda()
    model = model.half() if mixed else model
    model.compile()
    tokens, types, present = (torch.zeros(batch, length, dtype=torch.int64, device="cuda") for _ in range(3))
    count = round(bert.MASKED * batch * length)
    masked, labels = (torch.zeros(count, dtype=torch.int64, device="cuda") for _ in range(2))
    relations = torch.zeros(batch, dtype=torch.int64, device="cuda")
    lamb = FusedLamb(model.parameters(), mixed=mixed)
    scaler = torch.amp.GradScaler("cuda", enabled=mixed)

    def step() -> None:
        scores, relation = model(tokens, types, present, masked)
        loss = F.cross_entropy(scores, labels) + F.cross_entropy(relation.view(-1, 2), relations)
        scaler.scale(loss).backward()
        if update:
            lamb.step()

    return step


def _make_transformer_xl_step(batch: int, mixed: bool, update: bool, *, sizes: transformer_xl.Dimensions) -> Step:
    """Half weights with an fp32 copy (Apex O2); gradients are clipped; LAMB parameter by parameter, jitted."""
    length = sizes.length
    model = transformer_xl.TransformerXl(sizes).cuda()
    model = model.half() if mixed else model
    kind = torch.float16 if mixed else torch.float32
    tokens, target = (torch.zeros(length, batch, dtype=torch.int64, device="cuda") for _ in range(2))
    memory = torch.zeros(sizes.layers, length, batch, sizes.size, dtype=kind, device="cuda")
    lamb = JitLamb(model.parameters(), mixed=mixed)
    state = {"memory": memory}

    def step() -> None:
        losses, state["memory"] = model(tokens, target, state["memory"])
        loss = losses.float().mean().type_as(losses)
        (loss * 128.0 if mixed else loss).backward()
        loss.item()
        if update:
            lamb.step()

    return step


def _make_mask_rcnn_step(batch: int, mixed: bool, update: bool) -> Step:
    """Batches are made in the training process; channels last in every precision; all losses are read before
    backward."""
    model = mask_rcnn.MaskRcnn().cuda().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    images = Images(batch)
    optimizer = FusedSgd(p for p in model.parameters() if p.requires_grad)
    scaler = torch.amp.GradScaler("cuda", enabled=mixed)

    def step() -> None:
        made = images.next()
        with _enter_autocast(mixed):
            losses = model(made)
        loss = torch.stack([each.float() for each in losses]).sum()
        for each in (loss, *losses):
            each.item()
        scaler.scale(loss).backward()
        if update:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=False)

    return step
