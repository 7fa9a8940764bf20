"""Steps of torchvision's classifiers as ryujaehun/pytorch-gpu-benchmark times them: no update, images copied within."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from traincast_evaluation.zoo.define.examples.convnets import ResNet
from traincast_evaluation.zoo.define.small_nets import DenseNet, MobileNet, ShuffleNet, SqueezeNet
from traincast_evaluation.zoo.define.vgg import Vgg

Step = Callable[[], object]
_NARROW, _WIDE, _WIDEST = (64, 128, 256, 512), (128, 256, 512, 1024), (256, 512, 1024, 2048)
_RESNETS = {  # blocks, widths, expansion (0: blocks of two 3x3), groups
    "resnet18": ((2, 2, 2, 2), _NARROW, 0, 1), "resnet34": ((3, 4, 6, 3), _NARROW, 0, 1),
    "resnet50": ((3, 4, 6, 3), _NARROW, 4, 1), "resnet101": ((3, 4, 23, 3), _NARROW, 4, 1),
    "resnet152": ((3, 8, 36, 3), _NARROW, 4, 1), "resnext50_32x4d": ((3, 4, 6, 3), _WIDE, 2, 32),
    "resnext101_32x8d": ((3, 4, 23, 3), _WIDEST, 1, 32), "wide_resnet50_2": ((3, 4, 6, 3), _WIDE, 2, 1),
    "wide_resnet101_2": ((3, 4, 23, 3), _WIDE, 2, 1),
}  # fmt: skip
_DENSENETS = {  # layers of the blocks, channels of a layer, channels of the stem
    "densenet121": ((6, 12, 24, 16), 32, 64), "densenet161": ((6, 12, 36, 24), 48, 96),
    "densenet169": ((6, 12, 32, 32), 32, 64), "densenet201": ((6, 12, 48, 32), 32, 64),
}  # fmt: skip
_VGGS = {"vgg11": (1, 1, 2, 2, 2), "vgg13": (2, 2, 2, 2, 2), "vgg16": (2, 2, 3, 3, 3), "vgg19": (2, 2, 4, 4, 4)}
_SHUFFLENETS = {
    "shufflenet_v2_x0_5": (48, 96, 192, 1024), "shufflenet_v2_x1_0": (116, 232, 464, 1024),
    "shufflenet_v2_x1_5": (176, 352, 704, 1024), "shufflenet_v2_x2_0": (244, 488, 976, 2048),
}  # fmt: skip
_MNASNETS = {"mnasnet0_5": 0.5, "mnasnet0_75": 0.75, "mnasnet1_0": 1.0, "mnasnet1_3": 1.3}
_OTHERS: dict[str, Callable[[], nn.Module]] = {
    "mobilenet_v2": MobileNet,
    "squeezenet1_0": partial(SqueezeNet, newer=False),
    "squeezenet1_1": partial(SqueezeNet, newer=True),
}


def list_torchvision_nets() -> dict[str, Callable[[], nn.Module]]:
    """How to make each net, by torchvision's name."""
    makers = dict(_OTHERS)
    makers |= {name: partial(ResNet, *sizes, squeezes=False) for name, sizes in _RESNETS.items()}
    makers |= {name: partial(DenseNet, *sizes) for name, sizes in _DENSENETS.items()}
    makers |= {name: partial(ShuffleNet, sizes) for name, sizes in _SHUFFLENETS.items()}
    makers |= {name: partial(MobileNet, width=width) for name, width in _MNASNETS.items()}
    for suffix, normed in (("", False), ("_bn", True)):
        makers |= {name + suffix: partial(Vgg, sizes, normed=normed) for name, sizes in _VGGS.items()}
    return makers


def make_torchvision_step(net: str, *, half: bool, training: bool, pixels: int) -> Callable[[int], Step]:
    """`make_step` of a net: forward, or forward, loss and backward; the host waits for the device after each."""
    kind = torch.float16 if half else torch.float32

    def make_step(batch: int) -> Step:
        model = list_torchvision_nets()[net]().to(kind).cuda().train(training)
        images = torch.randn(batch, 3, pixels, pixels).to(kind)
        labels = torch.zeros(batch, dtype=torch.int64, device="cuda")

        def train() -> None:
            model.zero_grad(set_to_none=False)
            nn.functional.cross_entropy(model(images.to("cuda")), labels).backward()

        @torch.no_grad()
        def infer() -> None:
            model(images.to("cuda"))

        return train if training else infer

    return make_step
