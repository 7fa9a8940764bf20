"""Training programs of Lambda's benchmark: NVIDIA's examples with the options that its configurations give them.

They differ from what the examples' own tables ran: Transformer-XL scores the whole vocabulary (no `--adaptive`) and its
processes exchange no gradients (no `--multi_gpu`), convolution nets keep PyTorch's own layout, BERT is fine-tuned.
`precision` is "fp32" (which a device with TF32 may run in it), "amp", or "half" (half weights, ResNet-50 only).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from traincast_evaluation.zoo.build.example_optimizers import AdamByParameter, BertAdam, ClippedJitLamb, FusedAdam
from traincast_evaluation.zoo.define.examples import bert, ncf, ssd, transformer_xl
from traincast_evaluation.zoo.define.examples.convnets import make_convnet

Step = Callable[[], object]
_SCALE = 128.0  # of the loss; its value costs nothing
_SQUAD_TOKENS = 384


def make_lambda_step(model: str, precision: str) -> Callable[[int], Step]:
    """`make_step` of a model as Lambda's tables name it."""
    mixed = precision != "fp32"
    makers: dict[str, Callable[[int], Step]] = {
        "transformerxlbase": lambda batch: _make_transformer_xl_step(batch, transformer_xl.BASE, mixed),
        "transformerxllarge": lambda batch: _make_transformer_xl_step(batch, transformer_xl.LARGE, mixed),
        "bert_base_squad": lambda batch: _make_squad_step(batch, bert.BASE, mixed),
        "bert_large_squad": lambda batch: _make_squad_step(batch, bert.LARGE, mixed),
        "resnet50": lambda batch: _make_resnet_step(batch, precision),
        "ncf": lambda batch: make_ncf_step(batch, mixed),
        "SSD": lambda batch: make_ssd_step(batch, mixed),
    }
    return makers[model]


def _make_transformer_xl_step(batch: int, sizes: transformer_xl.Dimensions, mixed: bool) -> Step:
    """Half weights with an fp32 copy (Apex O2); the loss is read before the update."""
    model = transformer_xl.TransformerXl(sizes, adaptive=False).cuda()
    model = model.half() if mixed else model
    tokens, target = (torch.zeros(sizes.length, batch, dtype=torch.int64, device="cuda") for _ in range(2))
    kind = torch.float16 if mixed else torch.float32
    state = {"memory": torch.zeros(sizes.layers, sizes.length, batch, sizes.size, dtype=kind, device="cuda")}
    update = ClippedJitLamb if sizes == transformer_xl.BASE else AdamByParameter
    optimizer = update(model.parameters(), mixed=mixed)

    def step() -> None:
        losses, state["memory"] = model(tokens, target, state["memory"])
        loss = losses.float().mean().type_as(losses)
        (loss.float() * _SCALE if mixed else loss).backward()
        gradients = optimizer.unscale()
        loss.float().item()
        optimizer.step(gradients)

    return step


def _make_squad_step(batch: int, sizes: bert.Dimensions, mixed: bool) -> Step:
    """Batches are copied from pageable memory; half weights with fused Adam (Apex O2), or fp32 with Adam op by op."""
    model = bert.BertForQuestionAnswering(sizes).cuda()
    model = model.half() if mixed else model
    texts = [torch.zeros(batch, _SQUAD_TOKENS, dtype=torch.int64) for _ in range(3)]
    answers = [torch.zeros(batch, dtype=torch.int64) for _ in range(2)]
    optimizer = (FusedAdam if mixed else BertAdam)(model.parameters(), mixed=mixed)

    def step() -> None:
        tokens, types, present, start, end = (each.to("cuda") for each in (*texts, *answers))
        by_start, by_end = model(tokens, types, present)
        loss = (F.cross_entropy(by_start, start) + F.cross_entropy(by_end, end)) / 2
        (loss.float() * _SCALE if mixed else loss).backward()
        optimizer.step(optimizer.unscale())
        loss.item()

    return step


def _make_resnet_step(batch: int, precision: str) -> Step:
    """ResNet-50 in PyTorch's own layout; the host waits for the device after every step."""
    model = make_convnet("resnet50").cuda()
    images = torch.randn(batch, 3, 224, 224, device="cuda")
    if precision == "half":
        model, images = model.half(), images.half()
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.float()
    labels = torch.zeros(batch, dtype=torch.int64, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4, foreach=False)
    scaler = torch.amp.GradScaler("cuda", enabled=precision == "amp")

    def step() -> None:
        with torch.autocast("cuda", dtype=torch.float16, enabled=precision == "amp"):
            loss = F.cross_entropy(model(images).float(), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        loss.item()

    return step


def make_ncf_step(batch: int, mixed: bool, update: bool = True) -> Step:
    """The epoch's own set-up (negative items drawn, pairs shuffled) is in the measured time: a batch's share of it."""
    model = ncf.NeuMf().cuda()
    model = model.half() if mixed else model
    pairs = [torch.zeros(batch, dtype=torch.int64, device="cuda") for _ in range(2)]
    labels = torch.zeros(batch, device="cuda")
    optimizer = FusedAdam(model.parameters(), mixed=mixed)

    def step() -> None:
        drawn = torch.empty_like(pairs[1]).random_(0, ncf.ITEMS)
        order = torch.randperm(batch, device="cuda")
        user, item, label = (torch.cat((every,))[order] for every in (pairs[0], drawn, labels))
        loss = F.binary_cross_entropy_with_logits(model(user, item).float(), label.view(-1, 1), reduction="none")
        (loss.float().view(-1).mean(0) * _SCALE).backward()
        if update:
            optimizer.step(optimizer.unscale())

    return step


def make_ssd_step(batch: int, mixed: bool, update: bool = True) -> Step:
    """Channels last, autocast; the host waits for the device around every step."""
    model = ssd.Ssd300().cuda().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    images = torch.randn(batch, 3, 300, 300, device="cuda")
    places = torch.ones(batch, ssd.BOXES, 4, device="cuda")
    labels = torch.zeros(batch, ssd.BOXES, dtype=torch.int32, device="cuda")
    boxes = torch.ones(1, 4, ssd.BOXES, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4, foreach=False)
    scaler = torch.amp.GradScaler("cuda", enabled=mixed)

    def step() -> None:
        normal = ((images - 0.5) / 0.2).to(memory_format=torch.channels_last)
        with torch.autocast("cuda", dtype=torch.float16, enabled=mixed):
            found, scores = model(normal)
            wanted = places.transpose(1, 2).contiguous()
            loss = ssd.compute_ssd_loss(found.float(), scores.float(), wanted, labels.long(), boxes)
        scaler.scale(loss).backward()
        if update:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()

    return step
