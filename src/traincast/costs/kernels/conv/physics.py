"""What a convolution asks of a GPU: the ways to compute one, their tiles and traffic."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from traincast.costs.kernels.contract import (
    COMPUTE_TYPES,
    Calls,
    estimate_memory_seconds,
)
from traincast.costs.kernels.conv import CONV
from traincast.hardware.device import Device
from traincast.utils.arrays import BoolArray, FloatArray

# output tile of a block, and how close to the peak its inner loop comes (larger tiles load less per product)
_TILES = ((128, 128, 1.0), (128, 64, 0.94), (128, 32, 0.80), (64, 64, 0.85), (64, 32, 0.70))
_BATCHED_TILES = ((128, 128, 1.0), (128, 64, 0.94), (64, 64, 0.85), (32, 128, 0.80))
_WINOGRAD_BLOCKS = (
    (1, 4, 8),
    (2, 4, 4),
    (4, 4, 2),
    (2, 2, 8),
    (4, 1, 8),
    (4, 2, 4),
    (1, 8, 4),
)  # images, tile rows, cols
# tiles of the kernels that cuDNN's forward searches chose most often
_FORWARD_TILES = ((128, 32), (128, 64), (128, 128), (64, 64))
_FORWARD_BATCHED_TILES = ((128, 128), (128, 64), (64, 64), (32, 128), (128, 32))
_WHOLE_WAVES = 0.6  # share of wave rounding that shows: blocks of a wave do not end at one time
_FILL = 0.4  # blocks that an SM needs before it runs at full rate, and after
# multiplications of 3x3 (tiles of 2x2) and 5x5 windows at stride 1 that Winograd's tiles save; of 24,662 measured 3x3
# convolutions in fp32 the fastest run at 2.2 times the peak on V100 and P100
WINOGRAD_SAVES, _WINOGRAD5_SAVES = 2.25, 2.78
# of cuDNN's direct kernels in channels last: wide groups of RTX 3090's nfnets and regnets in timm's steps
_DIRECT_SHARE, _DIRECT_CHANNELS = 0.15, 58.0
_UNROLLED_TAPS = 9  # of the depthwise kernels that are compiled for their window; others loop over it


@dataclass(frozen=True, slots=True)
class Geometry:
    """Sizes of convolutions as columns, channels per group, output height and width derived."""

    batch: FloatArray
    channels: FloatArray
    filters: FloatArray
    height: FloatArray
    width: FloatArray
    kernel_h: FloatArray
    kernel_w: FloatArray
    stride: FloatArray  # of both directions together
    out_h: FloatArray
    out_w: FloatArray
    groups: FloatArray
    winograd: BoolArray  # 3x3, stride 1, one group, fp32
    winograd5: BoolArray  # the same with 5x5
    data: BoolArray  # backward with respect to the input
    weights: BoolArray  # backward with respect to the filters

    @staticmethod
    def of(calls: Calls, device: Device | None = None) -> Geometry:
        """From columns of calls; a device without units for fp16 multiplies it as fp32, by Winograd's tiles too."""
        assert calls.family is CONV
        v = {name: calls[name] for name in CONV.fields}
        reach_h = v["dilation_h"] * (v["kernel_h"] - 1) + 1
        reach_w = v["dilation_w"] * (v["kernel_w"] - 1) + 1
        plain = (v["kernel_h"] == v["kernel_w"]) & (v["stride_h"] == 1) & (v["stride_w"] == 1) & (v["groups"] == 1)
        single = calls.is_compute("fp32")
        if device is not None and "fp16" not in device.peak_flops:
            single |= calls.is_compute("fp16") & (v["winograd"] == 1)
        plain &= (v["dilation_h"] == 1) & (v["dilation_w"] == 1) & single
        return Geometry(
            batch=v["batch"],
            channels=v["in_channels"] / v["groups"],
            filters=v["out_channels"] / v["groups"],
            height=v["in_h"],
            width=v["in_w"],
            kernel_h=v["kernel_h"],
            kernel_w=v["kernel_w"],
            stride=v["stride_h"] * v["stride_w"],
            out_h=np.maximum(np.floor((v["in_h"] + 2 * v["pad_h"] - reach_h) / v["stride_h"]) + 1, 1.0),
            out_w=np.maximum(np.floor((v["in_w"] + 2 * v["pad_w"] - reach_w) / v["stride_w"]) + 1, 1.0),
            groups=v["groups"],
            winograd=plain & (v["kernel_h"] == 3),
            winograd5=plain & (v["kernel_h"] == 5),
            data=calls.is_kind("backward_data"),
            weights=calls.is_kind("backward_weights"),
        )

    @property
    def taps(self) -> FloatArray:
        """Filter positions."""
        return self.kernel_h * self.kernel_w

    @property
    def input_size(self) -> FloatArray:
        """Elements of the input."""
        return self.batch * self.groups * self.channels * self.height * self.width

    @property
    def output_size(self) -> FloatArray:
        """Elements of the output."""
        return self.batch * self.groups * self.filters * self.out_h * self.out_w

    @property
    def filter_size(self) -> FloatArray:
        """Elements of all filters."""
        return self.groups * self.channels * self.filters * self.taps

    @property
    def total_size(self) -> FloatArray:
        """Elements of input, output and filters."""
        return self.input_size + self.output_size + self.filter_size

    @property
    def saved_products(self) -> FloatArray:
        """How many times as few products Winograd's tiles make; 1 where they do not apply."""
        return np.select([self.winograd, self.winograd5], [WINOGRAD_SAVES, _WINOGRAD5_SAVES], 1.0)

    @property
    def flops(self) -> FloatArray:
        """Operations of any of the three directions."""
        return 2.0 * self.output_size * self.channels * self.taps


def compute_implicit_gemm_features(g: Geometry, device: Device, rate: FloatArray, item: FloatArray) -> FloatArray:
    """[GEMMs by tiles and waves, bytes by the sheet's DRAM rate] of the implicit GEMM, in seconds."""
    positions = g.batch * g.out_h * g.out_w
    # the filter gradient sums over positions; splitting that sum feeds all SMs, and costs adding up the parts
    rows = np.select([g.data, g.weights], [g.batch * g.height * g.width, g.channels * g.taps], positions)
    cols = np.where(g.data, g.channels, g.filters)
    # of a strided filter's taps only some meet an input position; kernels skip part of the others
    depth = np.select([g.data, g.weights], [g.filters * g.taps / np.sqrt(g.stride), positions], g.channels * g.taps)
    seconds, parts = [], []
    for tile_rows, tile_cols, efficiency in _TILES:
        blocks = g.groups * np.ceil(rows / tile_rows) * np.ceil(cols / tile_cols)
        most = np.clip(np.floor(2 * device.num_sms / blocks), 1.0, np.maximum(depth // 256, 1))
        split = np.where(g.weights, most, 1.0)
        tile = _estimate_tile_seconds(tile_rows, tile_cols, depth / split, efficiency, rate)
        seconds.append(_count_waves(blocks * split, device) * tile)
        parts.append(np.where(split > 1, split * g.filter_size * 4.0, 0.0))
    fastest = np.argmin(seconds, axis=0)[None]
    least, extra = (np.take_along_axis(np.array(each), fastest, axis=0)[0] for each in (seconds, parts))
    moved = g.total_size * item + extra
    return np.stack([least, moved / device.dram_bandwidth], axis=1)


def compute_winograd_features(g: Geometry, device: Device, rate: FloatArray) -> FloatArray:
    """[GEMMs, bytes, filter transform] of the fused Winograd kernel (forward and data gradient), in seconds."""
    inner, outer, out_h, out_w = _orient_sizes(g)
    tiles = np.minimum.reduce(_count_winograd_blocks(g, out_h, out_w))
    block = _estimate_winograd_block(inner, rate)
    moved = 4.0 * g.total_size / device.dram_bandwidth
    transform = 4.0 * 25 * g.channels * g.filters / device.dram_bandwidth
    return np.stack([_count_waves(tiles * np.ceil(outer / 32), device) * block, moved, transform], axis=1)


def compute_nonfused_winograd_features(g: Geometry, device: Device, rate: FloatArray) -> FloatArray:
    """[GEMMs, data transforms, filter transform if channels divide by 4, if not] of four-kernel Winograd."""
    inner, outer, out_h, out_w = _orient_sizes(g)
    tiles = g.batch * np.ceil(out_h / 4) * np.ceil(out_w / 4)
    products = np.where(g.winograd5, 144.0, 36.0)  # of a tile of 4x4 outputs
    rows, cols = np.where(g.weights, g.channels, tiles), np.where(g.weights, g.filters, outer)
    depth = np.where(g.weights, tiles, inner)
    seconds = [
        _count_waves(products * np.ceil(rows / high) * np.ceil(cols / wide), device)
        * _estimate_tile_seconds(high, wide, depth, efficiency, rate)
        for high, wide, efficiency in _BATCHED_TILES
    ]
    least = np.minimum.reduce(seconds)
    moved = 4.0 * (g.input_size + g.output_size + products * tiles * (inner + outer)) / device.dram_bandwidth
    transform = 4.0 * (g.taps + products) * g.channels * g.filters / device.dram_bandwidth
    even = g.channels % 4 == 0
    return np.stack([least, moved, np.where(even, transform, 0.0), np.where(even, 0.0, transform)], axis=1)


def estimate_forward_tile_seconds(g: Geometry, device: Device) -> list[FloatArray]:
    """Seconds of forward convolutions in fp32 by each tile, in whole waves: of the implicit GEMM, of
    the fused Winograd kernel, of the 36 GEMMs of the four-kernel one."""
    rate = np.full(len(g.batch), device.get_sustained_flops("fp32") / device.num_sms)
    positions, squares = g.batch * g.out_h * g.out_w, g.batch * np.ceil(g.out_h / 4) * np.ceil(g.out_w / 4)
    ways = [(tile, 1.0, positions, g.channels * g.taps) for tile in _FORWARD_TILES]
    ways += [(tile, 36.0, squares, g.channels) for tile in _FORWARD_BATCHED_TILES]
    gemms = [
        np.ceil(products * np.ceil(count / rows) * np.ceil(g.filters / cols) / device.num_sms)
        * _estimate_tile_seconds(rows, cols, depth, 1.0, rate)
        for (rows, cols), products, count, depth in ways
    ]
    fused = [
        np.ceil(blocks * np.ceil(g.filters / 32) / device.num_sms) * _estimate_winograd_block(g.channels, rate)
        for blocks in _count_winograd_blocks(g, g.out_h, g.out_w)
    ]
    return [*gemms[: len(_FORWARD_TILES)], *fused, *gemms[len(_FORWARD_TILES) :]]


def _count_winograd_blocks(g: Geometry, out_h: FloatArray, out_w: FloatArray) -> list[FloatArray]:
    """Blocks of the fused Winograd kernel over one produced channel, by each of their shapes."""
    return [
        np.ceil(g.batch / images) * np.ceil(np.ceil(out_h / 2) / down) * np.ceil(np.ceil(out_w / 2) / side)
        for images, down, side in _WINOGRAD_BLOCKS
    ]


def estimate_depthwise_seconds(g: Geometry, device: Device, item: FloatArray) -> FloatArray:
    """Convolutions with one channel per group: every tap is a load from cache, so lanes or memory limit."""
    lanes = device.num_sms * device.cores_per_sm * 1e6 * device.effective_clock_mhz
    per_tap = np.where(g.taps <= _UNROLLED_TAPS, 5.0, 14.0)
    cycles = (40.0 + per_tap * g.taps) * np.where(g.data, g.input_size, g.output_size) * np.where(g.weights, 2.0, 1.0)
    moved = g.total_size * item / (0.6 * device.dram_bandwidth)
    return np.asarray(np.hypot(cycles / lanes, moved))


def estimate_direct_seconds(g: Geometry, device: Device) -> FloatArray:
    """Grouped convolutions that plain cores multiply one by one: at most a share of their rate, less the fewer channels
    of a group there are to share a loaded value."""
    rate = _DIRECT_SHARE * device.get_sustained_flops("fp32") / (1.0 + _DIRECT_CHANNELS / g.channels)
    return np.asarray(g.flops / rate)


def _estimate_winograd_block(channels: FloatArray, rate: FloatArray | float) -> FloatArray:
    """Seconds of one block, 32 tiles by 32 filters of 16 GEMMs each."""
    return np.asarray(2 * 16 * 32 * 32 * (4 * np.ceil(channels / 4) + 8) / rate)


def _orient_sizes(g: Geometry) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
    """Summed channels, produced channels, produced height and width."""
    return (
        np.where(g.data, g.filters, g.channels),
        np.where(g.data, g.channels, g.filters),
        np.where(g.data, g.height, g.out_h),
        np.where(g.data, g.width, g.out_w),
    )


def _count_waves(blocks: FloatArray, device: Device) -> FloatArray:
    """Blocks that the busiest SM runs, one after the other."""
    share = blocks / device.num_sms
    return np.asarray((1 - _WHOLE_WAVES) * share + _WHOLE_WAVES * np.ceil(share) + _FILL)


def _estimate_tile_seconds(rows: int, cols: int, depth: FloatArray, efficiency: float, rate: FloatArray) -> FloatArray:
    """Seconds of one block on one SM of this rate in flop/s."""
    return np.asarray(2.0 * rows * cols * 8.0 * np.ceil(depth / 8.0) / (efficiency * rate))


def conv_seconds(calls: Calls, device: Device, start: float) -> FloatArray:
    """The longer of all products at the peak rate, as many fewer as Winograd's tiles save, and one trip through
    memory."""
    g = Geometry.of(calls, device)
    saved = g.saved_products
    rate = calls.per_compute({name: device.get_product_flops(name) for name in COMPUTE_TYPES}, np.inf)
    moved = estimate_memory_seconds(g.total_size * calls.item_bytes(), device, 1.0)
    return np.asarray(start + np.maximum(g.flops / (saved * rate), moved))
