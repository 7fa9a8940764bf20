from __future__ import annotations

from dataclasses import replace

import pytest

from tests.costs.kernels.signatures import field, kernels, lowered, tensor
from traincast.costs.kernels.conv import CONV
from traincast.costs.kernels.registry import LoweringContext

_WINDOW = {"stride": (2, 2), "padding": (3, 3), "dilation": (1, 1), "transposed": False, "groups": 1}
_FIRST_LAYER = CONV.call(
    "forward", batch=32, in_channels=3, out_channels=64, in_h=224, in_w=224, kernel_h=7, kernel_w=7,
    stride_h=2, stride_w=2, pad_h=3, pad_w=3, dilation_h=1, dilation_w=1, groups=1, channels_last=0.5,
    direct=0, searched=0, slowness=1, winograd=0,
)  # fmt: skip


def test_forward():
    inputs = {"input": tensor(32, 3, 224, 224), "weight": tensor(64, 3, 7, 7)}
    assert lowered("aten::convolution", inputs, tensor(32, 64, 112, 112), **_WINDOW) == (_FIRST_LAYER,)


def test_bias_is_a_kernel_of_its_own():
    inputs = {"input": tensor(32, 3, 224, 224), "weight": tensor(64, 3, 7, 7), "bias": tensor(64)}
    conv, add = lowered("aten::convolution", inputs, tensor(32, 64, 112, 112), **_WINDOW)
    assert conv == _FIRST_LAYER
    assert field(add, "bytes_read") == 4 * (32 * 64 * 112 * 112 + 64)


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        ((True, True, False), ["conv:backward_data", "conv:backward_weights"]),
        ((False, True, False), ["conv:backward_weights"]),
        ((True, False, False), ["conv:backward_data"]),
        ((False, True, True), ["conv:backward_weights", "reduction:inner"]),
    ],
)
def test_output_mask_decides_what_runs_backward(mask, expected):
    inputs = {"grad_output": tensor(32, 64, 112, 112), "input": tensor(32, 3, 224, 224), "weight": tensor(64, 3, 7, 7)}
    calls = lowered("aten::convolution_backward", inputs, tensor(64, 3, 7, 7), output_mask=mask, **_WINDOW)
    assert kernels(calls) == expected
    assert calls[0].values == _FIRST_LAYER.values


def test_transposed_convolution_is_a_data_gradient():
    window = {**_WINDOW, "padding": (1, 1), "transposed": True}
    inputs = {"input": tensor(8, 128, 16, 16), "weight": tensor(128, 64, 4, 4)}
    (call,) = lowered("aten::convolution", inputs, tensor(8, 64, 32, 32), **window)
    assert call.kind == "backward_data"
    assert (field(call, "in_channels"), field(call, "out_channels"), field(call, "in_h")) == (64, 128, 32)


@pytest.mark.parametrize(("release", "tiles"), [((1, 4), 1), ((1, 5), 0)])
def test_half_has_winograd_before_pytorch_1_5(release, tiles):
    inputs = {"input": tensor(32, 64, 56, 56), "weight": tensor(64, 64, 3, 3)}
    context = LoweringContext(framework_version=release)
    (call,) = lowered("aten::convolution", inputs, tensor(32, 64, 56, 56), context, **_WINDOW)
    assert field(call, "winograd") == tiles


def test_one_and_three_dimensions():
    (one,) = lowered(
        "aten::convolution", {"input": tensor(4, 8, 100), "weight": tensor(16, 8, 5)}, tensor(4, 16, 96), stride=(1,),
        padding=(0,), dilation=(1,), groups=1,
    )  # fmt: skip
    assert (field(one, "in_h"), field(one, "in_w"), field(one, "kernel_h"), field(one, "kernel_w")) == (1, 100, 1, 5)
    (three,) = lowered(
        "aten::convolution", {"input": tensor(2, 8, 10, 32, 32), "weight": tensor(16, 8, 3, 3, 3)},
        tensor(2, 16, 8, 30, 30), stride=(1, 1, 1), padding=(0, 0, 0), dilation=(1, 1, 1), groups=1,
    )  # fmt: skip
    assert (field(three, "batch"), field(three, "in_channels")) == (2 * 8, 8 * 3)


def test_tf32_where_allowed():
    inputs = {"input": tensor(2, 3, 8, 8), "weight": tensor(4, 3, 3, 3)}
    (call,) = lowered("aten::cudnn_convolution", inputs, tensor(2, 4, 6, 6), LoweringContext(tf32=True), stride=(1, 1))
    assert call.compute == "tf32"


def last(*shape, dtype="float32"):
    spec = tensor(*shape, dtype=dtype)
    return replace(spec, stride=(shape[1] * shape[2] * shape[3], 1, shape[3] * shape[1], shape[1]))


def test_channels_last_is_read_from_the_strides():
    window = {"stride": (1, 1), "padding": (1, 1), "dilation": (1, 1), "transposed": False, "groups": 1}
    weight = tensor(64, 32, 3, 3)
    for source, output, expected in (
        (last(8, 32, 14, 14), last(8, 64, 14, 14), 1.0),
        (last(8, 32, 14, 14), tensor(8, 64, 14, 14), 1.0),  # cuDNN is asked for it, whatever the result is then
        (tensor(8, 32, 14, 14), tensor(8, 64, 14, 14), 0.0),
    ):
        inputs = {"input": source, "weight": weight}
        (old,) = lowered("aten::convolution", inputs, output, LoweringContext(framework_version=(1, 12)), **window)
        (new,) = lowered("aten::convolution", inputs, output, LoweringContext(framework_version=(1, 13)), **window)
        assert field(old, "channels_last") == expected
        assert field(new, "channels_last") == max(expected, 0.5)  # newer libraries turn half


def test_weights_in_channels_last_turn_the_image():
    window = {"stride": (1, 1), "padding": (1, 1), "dilation": (1, 1), "transposed": False, "groups": 1}
    image, weight, result = tensor(8, 32, 14, 14), last(64, 32, 3, 3), last(8, 64, 14, 14)
    context = LoweringContext(framework_version=(1, 12))

    copy, forward = lowered("aten::convolution", {"input": image, "weight": weight}, result, context, **window)
    inputs = {"grad_output": tensor(8, 64, 14, 14), "input": image, "weight": weight}
    outputs = (image, weight)
    backward = lowered(
        "aten::convolution_backward", inputs, outputs, context, **window, output_mask=(True, True, False)
    )

    assert (copy.family.name, field(copy, "elements")) == ("copy", 8 * 32 * 14 * 14)
    assert [call.family.name for call in backward] == ["copy", "copy", "conv", "conv"]
    assert all(field(call, "channels_last") == 1 for call in (forward, *backward[2:]))


def test_groups_of_older_releases_take_longer_but_on_volta_and_turing_in_channels_last():
    window = {"stride": (1, 1), "padding": (1, 1), "dilation": (1, 1), "transposed": False, "groups": 32}
    weight = tensor(64, 2, 3, 3, dtype="float16")

    def find_slowness(layout, version, capability):
        image = layout(16, 64, 14, 14, dtype="float16")
        context = LoweringContext(framework_version=version, capability=capability)
        inputs = {"input": image, "weight": weight}
        return field(lowered("aten::convolution", inputs, image, context, **window)[-1], "slowness")

    assert find_slowness(last, (1, 11), 8.0) == find_slowness(tensor, (1, 11), 7.0) > 1
    assert find_slowness(last, (1, 12), 8.0) == find_slowness(last, (1, 11), 7.0) == 1


@pytest.mark.parametrize(
    ("groups", "version", "layout", "direct"),
    [
        (8, (1, 11), last, 1), (8, (1, 12), last, 1), (4, (1, 12), last, 0), (2, (1, 12), last, 1),
        (32, (1, 11), last, 0),
        (2, (2, 13), last, 0), (2, (1, 12), tensor, 0), (64, (1, 11), last, 0),
    ],
)  # fmt: skip
def test_old_releases_have_gemms_for_some_groups_only(groups, version, layout, direct):
    image = layout(16, 64, 14, 14, dtype="float16")
    inputs = {"input": image, "weight": tensor(64, 64 // groups, 3, 3, dtype="float16")}
    window = {"stride": (1, 1), "padding": (1, 1), "dilation": (1, 1), "transposed": False, "groups": groups}
    (call,) = lowered("aten::convolution", inputs, image, LoweringContext(framework_version=version), **window)
    assert field(call, "direct") == direct
