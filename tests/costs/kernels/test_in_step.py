"""What a step adds to kernels that were measured alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.costs.kernels.signatures import lowered, tensor
from traincast.costs.in_step import SHIPPED, make_in_step
from traincast.costs.kernels.attention import ATTENTION
from traincast.costs.kernels.contract import Calls, KernelCall
from traincast.costs.kernels.conv import CONV
from traincast.costs.kernels.cost import convert_seconds_in_step
from traincast.costs.kernels.gemm import GEMM
from traincast.costs.kernels.registry import LoweringContext
from traincast.hardware.platform import load_platform
from traincast.ir.ops import BATCHED, FLASH2, GROUPED, GROUPED_NARROW, RING, ROWWISE, TUNED

H100 = load_platform("h100").device
NUMBERS = replace(
    SHIPPED,
    sustained={"hopper 16": 1.4, "hopper 8": 1.2, "hopper attention": 1.5, "cdna attention": 1.5, "cdna 16": 0.9,
               "blackwell 8": 0.99},
    grouped=1.6, grouped_narrow=0.7, batched=0.5, rowwise=1.8, untuned=1.7, ring=1.25, flash2=0.5,
)  # fmt: skip


def gemm(compute: str = "bf16", *, size: float = 8192, variant: str = "") -> KernelCall:
    fields = dict.fromkeys(GEMM.fields, 0.0) | {"batch": 1.0, "m": size, "n": size, "k": size}
    return replace(GEMM.call(GEMM.kinds[0], compute, **fields), variant=variant)


def factor(call: KernelCall, alone: float, device=H100) -> float:
    """How many times as long as `alone` seconds per call takes in a step."""
    after = convert_seconds_in_step(Calls.of(call.family, [call]), [call], np.array([alone]), device, NUMBERS)
    return float(after[0]) / alone


def at_share(share: float, compute: str = "bf16", size: float = 8192) -> float:
    """Seconds in which a GEMM reaches this share of the peak rate."""
    return 2 * size**3 / (share * H100.get_peak_flops(compute))


def test_a_gemm_near_the_peak_runs_at_the_sustained_clock() -> None:
    assert factor(gemm(), at_share(0.7)) == pytest.approx(1.4)
    assert factor(gemm("fp8"), at_share(0.7, "fp8")) == pytest.approx(1.2)


def test_a_gemm_that_waits_for_memory_leaves_power_to_spare() -> None:
    half, tenth = (factor(gemm(), at_share(share)) for share in (0.25, 0.05))
    assert half == pytest.approx(1.2) and tenth == pytest.approx(1.04)


def test_fp32_does_not_reach_the_power_limit() -> None:
    assert factor(gemm("fp32"), at_share(0.9, "fp32")) == 1.0


def test_tf32_takes_the_clock_of_hopper_s_boards() -> None:
    assert factor(gemm("tf32"), at_share(0.7, "tf32")) == pytest.approx(1.4)
    assert factor(gemm("tf32"), at_share(0.2, "tf32")) == pytest.approx(1.16)
    a100, numbers = load_platform("a100-80gb").device, replace(NUMBERS, sustained={"ampere 16": 1.1})
    after = convert_seconds_in_step(Calls.of(GEMM, [gemm("tf32")]), [gemm("tf32")], np.array([0.01]), a100, numbers)
    assert after[0] == 0.01


def test_a_locked_clock_leaves_power_to_spare() -> None:
    locked = H100.with_clock(H100.boost_clock_mhz / 1.4)
    seconds = 2 * 8192.0**3 / (0.7 * locked.get_peak_flops("bf16"))
    assert factor(gemm(), seconds, locked) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("variant", "compute", "expected"),
    [
        (GROUPED, "bf16", 1.6), (GROUPED_NARROW, "bf16", 0.7), (BATCHED, "bf16", 0.5),
        (ROWWISE, "fp8", 1.2 * 1.8), (f"{ROWWISE} {TUNED}", "fp8", 1.2 * 1.8), (TUNED, "bf16", 1.4),
    ],
)  # fmt: skip
def test_an_implementation_has_its_own_factor(variant: str, compute: str, expected: float) -> None:
    assert factor(gemm(compute, variant=variant), at_share(0.7, compute)) == pytest.approx(expected)


def test_only_amds_gemms_that_nobody_tuned_are_slower() -> None:
    mi300 = load_platform("mi300x-platform").device
    seconds = 2 * 8192.0**3 / (0.7 * mi300.get_peak_flops("bf16"))
    assert factor(gemm(), seconds, mi300) == pytest.approx(0.9 * 1.7)
    assert factor(gemm(variant=TUNED), seconds, mi300) == pytest.approx(0.9)


def test_attention_is_held_to_the_rate_of_its_implementation() -> None:
    sizes = {"batch": 1.0, "q_heads": 32.0, "q_len": 8192.0, "kv_len": 8192.0, "head_dim": 128.0, "causal": 1.0}
    plain = ATTENTION.call("forward", "bf16", **(dict.fromkeys(ATTENTION.fields, 0.0) | sizes))
    assert factor(plain, 1e-3) == pytest.approx(1.5)
    assert factor(replace(plain, variant=RING), 1e-3) == pytest.approx(1.5 * 1.25)
    flops = 4 * 32 * 8192.0**2 * 128 / 2
    rate = 0.5 * H100.num_sms * H100.boost_clock_mhz * 1e6 * 2048
    assert 1e-4 * factor(replace(plain, variant=FLASH2), 1e-4) == pytest.approx(flops / rate)


def test_attention_on_amds_chips_takes_as_much_longer_as_on_hopper() -> None:
    sizes = {"batch": 1.0, "q_heads": 32.0, "q_len": 8192.0, "kv_len": 8192.0, "head_dim": 128.0, "causal": 1.0}
    call = ATTENTION.call("forward", "bf16", **(dict.fromkeys(ATTENTION.fields, 0.0) | sizes))
    assert factor(call, 1e-2, load_platform("mi300x-platform").device) == pytest.approx(1.5)
    assert SHIPPED.sustained["cdna attention"] == SHIPPED.sustained["hopper attention"]


def test_numbers_survive_the_way_through_names() -> None:
    assert make_in_step(SHIPPED.by_name()) == SHIPPED


def test_boards_of_one_architecture_share_a_law_of_power_and_differ_by_their_watts() -> None:
    def on(device):
        return factor(gemm(), 2 * 8192.0**3 / (0.7 * device.get_peak_flops("bf16")), device)

    assert on(H100.with_power_limit(350)) == pytest.approx(
        1.4 * 2**0.5 * 0.813, rel=0.01
    )  # kernels alone slow down too
    assert on(load_platform("h20").device) == 1.0
    assert on(load_platform("h100-pcie").device) > on(H100) == pytest.approx(1.4)
    assert on(load_platform("rtx-3090").device) == 1.0


@pytest.mark.parametrize("compute", ["fp8", "fp4"])
def test_narrow_gemms_of_a_board_with_more_power_for_its_units_run_faster(compute: str) -> None:
    grace_200, grace_300 = (factor(gemm(compute), 200e-6, load_platform(name).device) for name in ("gb200", "gb300"))
    assert grace_300 < grace_200 < 1.0


def test_turing_s_gemms_take_longer_whether_or_not_its_units_wait_for_their_sums() -> None:
    numbers = replace(SHIPPED, sustained={"turing 16": 1.3, "ampere 16": 1.1})
    call = gemm("fp16")
    for key, expected in (("titan-rtx", 1.3), ("rtx-2080-ti", 1.3), ("rtx-3090", 1.0)):
        device = load_platform(key).device
        alone = np.array([2 * 8192.0**3 / (0.7 * device.get_peak_flops("fp16"))])
        after = convert_seconds_in_step(Calls.of(GEMM, [call]), [call], alone, device, numbers)
        assert after[0] / alone[0] == pytest.approx(expected, rel=1e-3)


def test_convolutions_near_the_peak_share_the_power_limit_since_ampere() -> None:
    fields = dict.fromkeys(CONV.fields, 1.0) | {"batch": 256.0, "in_channels": 512.0, "out_channels": 512.0}
    call = CONV.call("forward", "fp16", **fields | {"in_h": 56.0, "in_w": 56.0, "pad_h": 0.0, "pad_w": 0.0})
    flops = 2 * 256 * 56 * 56 * 512 * 512
    for key, expected in (("h100", 1.4), ("t4", 1.0)):
        device = load_platform(key).device
        alone = np.array([flops / (0.6 * device.get_peak_flops("fp16"))])
        after = convert_seconds_in_step(Calls.of(CONV, [call]), [call], alone, device, NUMBERS)
        assert after[0] / alone[0] == pytest.approx(expected, rel=1e-2)


def test_element_wise_kernels_of_an_old_pytorch_load_halves_one_by_one() -> None:
    half, single = (tensor(1 << 20, dtype=dtype) for dtype in ("float16", "float32"))
    old, new = LoweringContext(framework_version=(1, 4)), LoweringContext(framework_version=(1, 5))
    factors = []
    for spec, context in ((half, old), (half, new), (single, old)):
        (call,) = lowered("aten::relu", {"self": spec}, spec, context)
        factors.append(factor(call, 1e-3))
    assert factors == [SHIPPED.narrow_loads, 1.0, 1.0]
