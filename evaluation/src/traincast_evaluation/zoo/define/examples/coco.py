"""Batches of a detector's example, made in the training process: images are copied raw and prepared on the device.

Before that, the host decodes them and makes tensors of boxes and polygons. This is no op of PyTorch's and not captured;
on a core of an AMD EPYC server it takes 3.3 ms an image (2.4 to decode 160 kB of JPEG with Pillow, 0.9 for the rest).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from traincast_evaluation.zoo.define.examples.detection import TARGETS

HEIGHT, WIDTH = 800, 1216  # assumed: the shorter side is 800, and a batch is padded to its widest image
_RAW, _RESIZED = (480, 640), (800, 1066)  # assumed of all images: the most common size of the data set


class Batch(NamedTuple):
    """Images [batch, 3, height, width], boxes of objects [batch, objects, 4] and their classes [batch, objects]."""

    images: torch.Tensor
    objects: torch.Tensor
    classes: torch.Tensor


class Images:
    """Copies raw images and boxes one by one; resized, flipped, scaled and padded on a stream of their own."""

    def __init__(self, batch: int) -> None:
        self.raw = [torch.zeros(3, *_RAW, dtype=torch.uint8, device="cpu").pin_memory() for _ in range(batch)]
        self.corners = [torch.zeros(TARGETS, 4, device="cpu").pin_memory() for _ in range(batch)]
        self.classes = [torch.zeros(TARGETS, device="cpu").pin_memory() for _ in range(batch)]
        self.stream = torch.cuda.Stream()

    def next(self) -> Batch:
        """The batch of a step; nothing waits for its stream, as in the example."""
        torch.cuda.current_stream().wait_stream(self.stream)
        with torch.cuda.stream(self.stream):
            prepared = [_prepare_image(image, flipped=number % 2 == 1) for number, image in enumerate(self.raw)]
            images = prepared[0].new_empty(len(prepared), 3, HEIGHT, WIDTH).zero_()
            for image, place in zip(prepared, images, strict=True):
                place[:, : image.size(1), : image.size(2)].copy_(image)
            corners = [boxes.to("cuda", non_blocking=True) for boxes in self.corners]
            classes = [labels.to("cuda", non_blocking=True) for labels in self.classes]
        return Batch(images.contiguous(memory_format=torch.channels_last), torch.stack(corners), torch.stack(classes))


def _prepare_image(raw: torch.Tensor, *, flipped: bool) -> torch.Tensor:
    image = raw.to("cuda", non_blocking=True)
    resized = F.interpolate(image[None].to(torch.float32), size=_RESIZED, mode="bilinear", align_corners=False)
    image = resized.squeeze(0).round().to(torch.uint8)
    image = image.flip(-1) if flipped else image
    image = image.to(torch.float32).div(255)[[2, 1, 0]] * 255
    mean, deviation = (torch.tensor(three, device="cuda") for three in ([103.0, 116.0, 123.0], [1.0, 1.0, 1.0]))
    (deviation == 0).any().item()  # the host asks whether one is zero
    return image.clone().sub_(mean[:, None, None]).div_(deviation[:, None, None])
