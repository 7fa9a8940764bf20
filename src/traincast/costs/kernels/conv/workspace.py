"""What cuDNN works in besides a convolution's tensors."""

from __future__ import annotations

import numpy as np

from traincast.costs.kernels.contract import Calls
from traincast.costs.kernels.conv.model import LEAST_TENSOR_CHANNELS, TENSOR_TYPES
from traincast.costs.kernels.conv.physics import Geometry
from traincast.hardware.device import Device
from traincast.utils.arrays import FloatArray

_LOADED_AT_ONCE = 16  # bytes, which channels are padded to


def estimate_workspace_bytes(calls: Calls, device: Device) -> FloatArray:
    """Bytes of copies in channels last of image, filters and result, where kernels of matrix units want them. Of VGG-13
    on an H100 in TF32, and of patch embeddings there in 16 bits, that is what the allocator recorded, to half a per
    cent in 23 of 25 convolutions; two take half or a fiftieth more. What Winograd's kernels of plain cores work in is
    left out."""
    g, item = Geometry.of(calls, device), calls.item_bytes()
    tensor = calls.is_compute(*[name for name in TENSOR_TYPES if name in device.peak_flops])
    tensor &= (item < 4) | (g.channels >= LEAST_TENSOR_CHANNELS)
    copied = tensor & (calls["channels_last"] < 1) & (g.groups == 1) & (device.vendor == "nvidia")
    together = _LOADED_AT_ONCE / item
    padded = np.ceil(g.channels / together) * together / g.channels
    return np.asarray(np.where(copied, item * (padded * (g.input_size + g.filter_size) + g.output_size), 0.0))
