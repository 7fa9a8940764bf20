"""Convolutions: which way is fastest, what it costs, and how that holds off the measured path."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.costs.kernels.model_checks import check_contract
from traincast.costs.kernels.contract import Calls
from traincast.costs.kernels.conv import CONV
from traincast.costs.kernels.families import load_shipped_model
from traincast.hardware import list_device_keys, load_device


def conv(
    batch,
    channels,
    filters,
    size,
    kernel=3,
    stride=1,
    kind="forward",
    compute="fp32",
    groups=1,
    channels_last=0,
    direct=0,
    searched=0,
    winograd=1,
):
    pad = kernel // 2
    return CONV.call(
        kind, compute, batch=batch, in_channels=channels, out_channels=filters, in_h=size, in_w=size, kernel_h=kernel,
        kernel_w=kernel, stride_h=stride, stride_w=stride, pad_h=pad, pad_w=pad, dilation_h=1, dilation_w=1,
        groups=groups, channels_last=channels_last, direct=direct, searched=searched, slowness=1, winograd=winograd,
    )  # fmt: skip


def seconds(device, *calls) -> np.ndarray:
    return load_shipped_model("conv").predict(Calls.of(CONV, calls), device).seconds


def many(n=300, compute="fp32") -> Calls:
    random = np.random.default_rng(1)
    calls = []
    for kind in CONV.kinds:
        for _ in range(n // 3):
            batch, channels, filters, size = np.floor(np.exp(random.uniform(0, 6, 4)))
            kernel = int(random.choice([1, 3, 5, 7]))
            calls.append(
                conv(batch, channels, filters, size + kernel, kernel, int(random.choice([1, 2])), kind, compute)
            )
    return Calls.of(CONV, calls)


@pytest.mark.parametrize("key", list_device_keys())
@pytest.mark.parametrize("compute", ["fp32", "tf32", "fp16", "bf16"])
def test_contract_on_every_device_and_type(key, compute):
    check_contract(load_shipped_model("conv"), many(compute=compute), load_device(key))


@pytest.mark.parametrize("key", ["v100", "p100", "t4", "a100-40gb", "h100"])
@pytest.mark.parametrize("kind", CONV.kinds)
@pytest.mark.parametrize("kernel", [1, 3, 7])
def test_four_times_the_batch_takes_longer(key, kind, kernel):
    took = seconds(load_device(key), *(conv(4**i, 64, 128, 28, kernel, kind=kind) for i in range(6)))
    assert (np.diff(took) > 0).all()


@pytest.mark.parametrize("key", ["v100", "h100"])
@pytest.mark.parametrize("kind", CONV.kinds)
def test_a_large_convolution_comes_near_the_peak_but_not_above_what_winograd_allows(key, kind):
    device = load_device(key)
    flops = 2 * 256 * 512 * 512 * 9 * 56 * 56
    reached = flops / seconds(device, conv(256, 512, 512, 56, kind=kind))[0] / device.get_peak_flops("fp32")
    assert 0.5 < reached < 4.0
    plain = 2 * 256 * 512 * 512 * 56 * 56
    assert 0.5 < plain / seconds(device, conv(256, 512, 512, 56, 1, kind=kind))[0] / device.get_peak_flops("fp32") < 1.2


def test_winograd_makes_a_3x3_cheaper_than_its_products_and_a_stride_takes_that_away():
    device = load_device("v100")
    direct, strided = seconds(device, conv(32, 256, 256, 28), conv(32, 256, 256, 56, stride=2))
    assert direct < 0.75 * strided


def test_a_depthwise_convolution_costs_far_less_than_a_full_one_but_more_than_its_bytes():
    device = load_device("v100")
    depthwise, full = seconds(device, conv(32, 256, 256, 56, groups=256), conv(32, 256, 256, 56))
    assert depthwise < 0.5 * full
    assert depthwise > 2 * 4 * 32 * 256 * 56 * 56 / device.dram_bandwidth


def test_a_locked_clock_slows_a_convolution_in_proportion_at_most():
    device = load_device("v100")
    fast, slow = (seconds(d, conv(64, 256, 256, 28, 1))[0] for d in (device, device.with_clock(765)))
    assert 1.3 < slow / fast < 2.05


def test_only_measured_kinds_on_measured_chips_are_in_domain_and_others_are_less_sure():
    model = load_shipped_model("conv")
    calls = Calls.of(CONV, [conv(32, 64, 64, 56), conv(32, 64, 64, 56, 1), conv(32, 64, 64, 56, kind="backward_data")])
    v100, h100 = (model.predict(calls, load_device(key)) for key in ("v100-pcie", "h100"))
    assert v100.in_domain.tolist() == [True, False, False]
    assert not h100.in_domain.any()
    assert (h100.sigma > v100.sigma).all()
    assert v100.sigma[1] > v100.sigma[0]


@pytest.mark.parametrize(
    ("call", "measured_us"),
    [
        (conv(32, 3, 64, 224, 7, 2), 610), (conv(32, 64, 64, 56, 1), 98), (conv(32, 64, 64, 56), 354),
        (conv(32, 64, 256, 56, 1), 310), (conv(32, 128, 128, 28), 306), (conv(32, 256, 256, 14), 289),
        (conv(32, 256, 256, 28, 3, 2), 779), (conv(32, 128, 128, 28, kind="backward_weights"), 406),
        (conv(32, 256, 1024, 14, 1), 355), (conv(32, 1024, 512, 14, 1), 704),
        (conv(32, 1024, 256, 14, 1, kind="backward_data"), 405),
        (conv(32, 512, 2048, 7, 1, kind="backward_weights"), 320),
        (conv(32, 64, 256, 56, 1, kind="backward_data"), 274),
    ],
)  # fmt: skip
def test_resnet_layers_agree_with_a_v100_trace_that_is_in_no_fit(call, measured_us):
    assert 1e6 * seconds(load_device("v100-dgxs"), call)[0] == pytest.approx(measured_us, rel=0.4)


def test_without_a_search_only_wide_implicit_products_are_slower():
    wide = [(256, 1024, 14, 1), (256, 1024, 14, 1, 1, "backward_data"), (256, 256, 28, 3, 2)]
    same = [
        (256, 256, 14),
        (64, 256, 56, 1),
        (256, 1024, 14, 1, 1, "backward_weights"),
        (256, 1024, 14, 1, 1, "forward", "fp16"),
    ]
    picked, found = (
        seconds(load_device("v100"), *(conv(32, *sizes, searched=s) for sizes in wide + same)) for s in (0, 1)
    )
    assert picked / found == pytest.approx([1.36] * 3 + [1.0] * 4)


def test_vgg_layers_in_tf32_agree_with_the_h100_trace_they_were_written_for():
    measured_us = {(64, 224, 64): 17909, (128, 112, 128): 9331, (256, 56, 256): 6449, (512, 28, 512): 5172}
    for (channels, size, filters), microseconds in measured_us.items():
        took = 1e6 * seconds(load_device("h100"), conv(512, channels, filters, size, compute="tf32"))[0]
        assert took == pytest.approx(microseconds, rel=0.25)


@pytest.mark.parametrize(
    ("key", "compute", "bytes_", "saves"),
    [
        ("rtx-a6000", "bf16", 2, 1.0),
        ("a100-80gb", "tf32", 4, 1.0),
        ("a100-80gb", "fp32", 4, 0.0),
        ("rtx-2080-ti", "fp16", 2, 1.0),
    ],
)
def test_channels_last_saves_the_copies_that_turn_the_layout(key, compute, bytes_, saves):
    first, half, last = seconds(
        load_device(key), *(conv(64, 256, 256, 56, compute=compute, channels_last=saved) for saved in (0, 0.5, 1))
    )
    turned = 2 * 2 * bytes_ * 64 * 256 * 56 * 56 / (0.82 * load_device(key).dram_bandwidth)  # both, read and written

    assert first - last == pytest.approx(saves * turned)
    assert half - last == pytest.approx(saves * turned / 2)


def test_sms_turn_no_more_elements_than_they_can_however_fast_the_memory_is():
    device = load_device("a100-80gb")
    first, last = seconds(device, *(conv(64, 256, 256, 56, compute="fp16", channels_last=saved) for saved in (0, 1)))

    assert first - last > 1.3 * 2 * 2 * 2 * 64 * 256 * 56 * 56 / (0.82 * device.dram_bandwidth)


@pytest.mark.parametrize("key", ["a100-40gb", "h100", "rtx-a6000"])
def test_no_convolution_comes_nearer_to_the_peak_than_the_fastest_measured_ones(key):
    device = load_device(key)
    (took,) = seconds(device, conv(256, 1024, 512, 38, compute="fp16", channels_last=1))

    assert 2 * 256 * 38 * 38 * 1024 * 512 * 9 / took < 0.751 * device.peak_flops["fp16"]


def test_groups_without_a_gemm_take_many_times_as_long_and_less_so_the_wider_they_are():
    device = load_device("rtx-3090")
    shapes = [(64 * groups, 64 * groups, groups) for groups in (2, 4)] + [(512, 512, 2)]
    ratio = [
        np.divide(*seconds(device, *(
            conv(64, channels, filters, 28, compute="fp16", groups=groups, channels_last=1, direct=direct)
            for direct in (1, 0)
        )))
        for channels, filters, groups in shapes
    ]  # fmt: skip
    assert ratio[0] > 8 and ratio[1] > 8
    assert ratio[2] < ratio[0]


def test_channels_that_do_not_fill_an_instruction_are_padded_in_channels_last():
    device = load_device("rtx-3090")
    whole, odd = seconds(device, *(conv(64, c, 256, 56, 1, compute="fp16", channels_last=1) for c in (256, 250)))
    assert odd > 1.5 * whole


@pytest.mark.parametrize("compute", ["fp16", "tf32"])
def test_wide_windows_over_channels_that_do_not_fill_loads_are_fed_slowly(compute):
    """Class scores of detectors: 81 classes of 4 boxes."""
    device = load_device("a100-40gb")
    whole, odd = seconds(device, *(conv(64, 1024, f, 38, compute=compute, channels_last=1) for f in (320, 324)))
    cycles = device.num_sms * 1e6 * device.boost_clock_mhz

    assert odd > 2 * whole
    assert 200 < 2 * 64 * 38 * 38 * 9 * 1024 * 324 / (odd * cycles) < 280


def test_units_that_wait_for_their_sums_come_near_their_peak_in_pointwise_convolutions():
    device = load_device("rtx-3090")
    (took,) = seconds(device, conv(256, 1024, 1024, 28, 1, compute="fp16", channels_last=1))
    flops = 2 * 256 * 28 * 28 * 1024 * 1024
    assert 0.9 < flops / took / device.peak_flops["fp16"] < 1.0


@pytest.mark.parametrize("key", ["t4", "v100", "a100-40gb", "p100"])
def test_one_more_sm_makes_no_convolution_slower(key):
    device = load_device(key)
    sms = device.num_sms + 1
    peaks = {name: rate * sms / device.num_sms for name, rate in device.peak_flops.items()}
    more = replace(device, num_sms=sms, peak_flops=peaks)
    for compute in ("fp32", "fp16"):
        calls = many(90, compute)
        ratio = (
            load_shipped_model("conv").predict(calls, more).seconds
            / load_shipped_model("conv").predict(calls, device).seconds
        )
        assert ratio.max() < 1.02, (compute, ratio.max(), np.mean(ratio > 1.01))


@pytest.mark.parametrize("kind", CONV.kinds)
def test_no_convolution_beats_what_winograd_saves(kind):
    device = load_device("v100-sxm3")
    for batch, channels, size in ((64, 512, 28), (256, 512, 28), (256, 256, 56), (128, 512, 14)):
        (took,) = seconds(device, conv(batch, channels, channels, size, kind=kind))
        assert 2 * batch * size**2 * channels**2 * 9 / took <= 2.2501 * device.peak_flops["fp32"]


def test_a_chip_that_nobody_measured_runs_the_kernels_of_its_generation():
    """ResNet-50 in fp32 on five Turing boards of Lambda's table was 11 to 21 % long with the weights of all chips."""
    trained, t4 = load_shipped_model("conv").parameters_, load_device("t4")
    for mine, others in zip(trained.weights(load_device("rtx-2080-ti")), trained.weights(t4), strict=True):
        assert mine.tolist() == others.tolist()
    assert trained.weights(load_device("rtx-3090"))[0].tolist() == trained.pooled_plain.tolist()


def test_a_chip_without_units_for_fp16_multiplies_as_in_fp32():
    device = load_device("gtx-1080-ti")
    wide = [conv(32, 256, 256, 56, compute=compute) for compute in ("fp32", "fp16")]
    plain, half = seconds(device, *wide)
    assert 0.6 * plain < half <= plain
    (without,) = seconds(device, conv(32, 256, 256, 56, compute="fp16", winograd=0))
    assert 1.5 * half < without
    strided = [conv(32, 256, 256, 56, stride=2, kind="backward_data", compute=each) for each in ("fp32", "fp16")]
    plain, half = seconds(device, *strided)
    assert 2 * plain < half
