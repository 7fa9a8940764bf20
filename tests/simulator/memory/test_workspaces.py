"""What ops work in besides their tensors: against what the allocator recorded in public traces of an H100."""

from __future__ import annotations

import pytest

import traincast
from traincast.costs.kernels.contract import Calls
from traincast.costs.kernels.conv import CONV
from traincast.costs.kernels.conv.workspace import estimate_workspace_bytes
from traincast.hardware.platform import load_device
from traincast.ir.ops import Signature, TensorSpec
from traincast.simulator.memory.workspaces import count_sorting_bytes


def work(
    device: str, compute: str, image: tuple[int, int, int], filters: int, kernel: int, stride: int = 1,
    channels_last: float = 0.5,
) -> float:  # fmt: skip
    """Bytes for a square convolution whose window of one step keeps the image's size."""
    batch, channels, side = image
    pad = kernel // 2 if stride == 1 else 0
    call = CONV.call(
        "forward", compute, batch=batch, in_channels=channels, out_channels=filters, in_h=side, in_w=side,
        kernel_h=kernel, kernel_w=kernel, stride_h=stride, stride_w=stride, pad_h=pad, pad_w=pad, dilation_h=1,
        dilation_w=1, groups=1, channels_last=channels_last, direct=0, searched=0, slowness=1.0,
        winograd=0,
    )  # fmt: skip
    [nbytes] = estimate_workspace_bytes(Calls.of(CONV, [call]), load_device(device)).tolist()
    return float(nbytes)


@pytest.mark.parametrize(
    ("compute", "image", "filters", "kernel", "stride", "recorded"),
    [
        ("tf32", (512, 64, 224), 64, 3, 1, 13_153_485_312),  # VGG-13
        ("tf32", (512, 128, 112), 128, 3, 1, 6_577_259_008),
        ("tf32", (512, 256, 28), 512, 3, 1, 1_237_844_480),
        ("tf32", (512, 512, 14), 512, 3, 1, 420_479_488),
        ("tf32", (512, 3, 224), 64, 3, 1, 0),  # three channels: plain cores
        ("bf16", (1, 3, 1008), 1024, 14, 14, 30_085_632),  # OWLv2: channels are padded to eight
        ("bf16", (4, 3, 224), 768, 16, 16, 7_561_728),  # ViT
        ("bf16", (128, 3, 224), 768, 16, 16, 144_703_488),  # TimeSformer
    ],
)
def test_convolutions_copy_what_the_allocator_recorded(compute, image, filters, kernel, stride, recorded):
    assert work("h100", compute, image, filters, kernel, stride) == pytest.approx(recorded, rel=2e-3)


def test_nothing_is_copied_without_matrix_units_or_in_channels_last():
    image = (32, 64, 56)
    assert work("h100", "bf16", image, 64, 3) > 0
    assert work("h100", "fp32", image, 64, 3) == work("v100", "fp32", image, 64, 3) == 0
    assert work("h100", "bf16", image, 64, 3, channels_last=1.0) == 0
    assert work("mi300x", "bf16", image, 64, 3) == 0


def test_gradients_of_rows_are_added_in_as_many_sums_as_rows_and_tenths_of_lookups():
    def count(lookups: int, rows: int, dim: int) -> int:
        given = (TensorSpec((lookups, dim), (dim, 1), "float32"), TensorSpec((lookups,), (1,), "int64"))
        made = (TensorSpec((rows, dim), (dim, 1), "float32"),)
        return count_sorting_bytes(Signature("aten::embedding_dense_backward", given, made))

    assert count(3072, 10**6, 64) == 0  # one kernel adds few
    few_rows, many_rows = count(10_000, 100, 64), count(10_000, 10**6, 64)
    assert few_rows == (3 * 10_000 + 2 * 100 + 1_100) * 8 + 1_100 * 64 * 4
    assert many_rows == (3 * 10_000 + 2 * 10_000 + 11_000) * 8 + 11_000 * 64 * 4


def test_a_step_holds_the_largest_of_them_with_what_else_is_alive():
    with_units = traincast.predict("vgg13", on="h100", batch_size=64).memory
    without = traincast.predict("vgg13", on="v100", batch_size=64).memory
    assert without.peak_bytes < with_units.peak_bytes < 1.2 * without.peak_bytes
    alive = with_units.events.sum_by_category(with_units.events.peak_tick)
    assert alive["workspace"] > 10 * (without.by_kind.get("workspace", 0) + 1)
