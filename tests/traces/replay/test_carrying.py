"""Kernels that nobody modelled: carried from one GPU to another by what both are known for."""

from __future__ import annotations

import numpy as np
import pytest

from traincast.hardware.platform import load_device
from traincast.traces.kineto import read_kineto
from traincast.traces.link import link_trace
from traincast.traces.replay.carrying import (
    SIGMA,
    Grids,
    carry_kernels,
    count_elements,
    find_compute_type,
    read_grids,
)


def carry(seconds, family, name, source="a100-80gb", target="h100", blocks=0.0, threads=0.0, shared=0.0):
    grids = Grids(np.array([blocks]), np.array([threads]), np.array([shared]))
    found = carry_kernels(np.array([seconds]), [family], [name], grids, *(load_device(key) for key in (source, target)))
    return float(found.seconds[0]), float(found.sigma[0])


@pytest.mark.parametrize(
    ("name", "compute"),
    [
        ("ampere_sgemm_128x64_tn", "fp32"),
        ("void cutlass::Kernel<cutlass_80_tensorop_s1688gemm_64x64_32x6_tn_align4>", "tf32"),
        ("ampere_fp16_s16816gemm_fp16_128x128_ldg8_f2f", "fp16"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n", "bf16"),
        ("sm80_xmma_fprop_implicit_gemm_indexed_tf32f32_tf32f32", "tf32"),
        ("Cijk_Ailk_Bljk_SB_MT64x16x32", "fp32"),
        ("Cijk_Alik_Bljk_BBS_BH_MT128x128x32", "bf16"),
        ("volta_dgemm_64x64_nn", "fp64"),
    ],
)
def test_names_say_the_type_that_a_product_computes_in(name, compute):
    assert find_compute_type(name) == compute


def test_a_product_in_fp32_gains_by_the_rate_of_fp32_and_not_of_half_precision():
    full, half = (carry(10e-3, "gemm", name)[0] for name in ("ampere_sgemm_128x64_tn", "ampere_bf16_s16816gemm"))
    a100, h100 = load_device("a100-80gb"), load_device("h100")
    for seconds, compute in ((full, "fp32"), (half, "bf16")):
        ratio = a100.get_sustained_flops(compute) / h100.get_sustained_flops(compute)
        assert seconds == pytest.approx(10e-3 * ratio, rel=0.45)


def test_a_long_stream_follows_the_memory_and_a_short_one_does_not():
    memory = load_device("a100-80gb").dram_bandwidth / load_device("h100").dram_bandwidth
    assert carry(5e-3, "elementwise", "triton_poi_fused")[0] == pytest.approx(5e-3 * memory, rel=0.1)
    assert carry(3e-6, "elementwise", "triton_poi_fused")[0] > 3e-6 * memory * 1.1


def test_an_element_wise_kernel_is_as_large_as_its_grid_says():
    known = carry(20e-6, "elementwise", "vectorized_elementwise_kernel<4>", target="t4", blocks=1024.0, threads=128.0)
    by_time = carry(20e-6, "elementwise", "triton_poi_fused", target="t4")
    assert known[0] < by_time[0]


def test_threads_take_as_many_elements_as_the_kernels_name_says():
    assert count_elements("void at::native::elementwise_kernel<128, 2, at::native::add>", 10.0, 128.0) == 2560.0
    assert count_elements("void at::native::vectorized_elementwise_kernel<4, at::native::add>", 10.0, 128.0) == 5120.0


def test_a_duration_tells_whether_inputs_lay_in_the_cache_of_the_traced_device():
    """A million sums (13 MB): A100's L2 holds them and V100's does not."""
    name, grid = "vectorized_elementwise_kernel<4>", (2048.0, 128.0)
    cached, loaded = (carry(seconds, "elementwise", name, "a100-80gb", "v100", *grid) for seconds in (7e-6, 10e-6))
    assert loaded[0] == pytest.approx(cached[0], rel=0.1), "both come from memory there"
    assert cached[1] == loaded[1] == SIGMA["memory"]


def test_where_only_the_other_devices_cache_holds_the_inputs_the_interval_is_wider():
    name = "vectorized_elementwise_kernel<4>"
    middle, large = (
        carry(s, "elementwise", name, "v100", "a100-80gb", b, 128.0) for s, b in ((16e-6, 2048.0), (1.6e-3, 204800.0))
    )
    assert middle[1] > 1.2 * SIGMA["memory"]
    assert large[1] == pytest.approx(SIGMA["memory"], rel=0.01)


@pytest.mark.parametrize(
    ("trace", "name", "most"),
    [
        ("luatil_3060_06", "triton_poi_fused_gelu_view_10", 8),
        ("luatil_3060_06", "triton_poi_fused_gelu_gelu_backward_view_2", 12),
        ("luatil_3060_05", "triton_poi_fused_gelu_gelu_backward_view_4", 12),
    ],
)
def test_the_grid_of_a_compiled_kernel_says_how_much_it_moves(shared_data, trace, name, most):
    """fp32 tensors that are read and written once, at the rate of the memory."""
    linked = link_trace(read_kineto(shared_data / "traces" / "public_mixed" / f"{trace}.json.gz"))
    row = next(row for row in linked.device.tolist() if linked.get_name(row) == name)
    grid = read_grids(linked, np.array([row]))
    moved = most * count_elements(name, float(grid.blocks[0]), float(grid.threads[0]))
    rate = moved / (1e-9 * linked.events["duration"][row])
    assert 0.85 < rate / load_device("rtx-3060").dram_bandwidth < 1.0


def test_a_compiled_kernel_that_is_only_numbered_is_what_its_op_is_called(shared_data):
    linked = link_trace(read_kineto(shared_data / "traces" / "public_mixed" / "sam_asdf_a100.json.gz"))
    rows = np.array([row for row in linked.device.tolist() if linked.get_name(row).startswith("triton__")])
    names = [linked.trace.names[number] for number in linked.find_telling_names(rows).tolist()]
    families = dict(zip(names, linked.find_families(rows).tolist(), strict=True))
    assert len(rows) > 300
    assert families["triton_poi_fused_gelu_8"] == "elementwise"
    assert families["triton_red_fused_add_native_layer_norm_9"] == "norm"
    assert "other" not in families.values()


def test_a_compiled_kernel_without_an_op_streams_memory_unless_it_keeps_tiles():
    name = "triton__0d1d2d3d4de"
    stream, product = (carry(1e-3, "other", name, shared=shared) for shared in (1024.0, 65536.0))
    assert stream == carry(1e-3, "reduction", name)
    assert product == carry(1e-3, "gemm", name)


def test_amds_grids_are_the_most_that_a_kernel_can_have():
    """They count threads where they say blocks: one element is not the megabytes that take as long on MI300X."""
    name = "vectorized_elementwise_kernel<4>"
    assert carry(3.8e-6, "elementwise", name, source="mi300x", target="t4")[0] > 20e-6
    assert carry(3.8e-6, "elementwise", name, source="mi300x", target="t4", blocks=1.0, threads=256.0)[0] < 6e-6
    assert carry(1e-3, "elementwise", name, "mi300x", "t4", 1e6, 256.0) == carry(
        1e-3, "elementwise", name, "mi300x", "t4"
    )


def test_the_same_device_keeps_what_was_measured_and_another_vendor_is_less_sure():
    assert carry(1e-4, "gemm", "sgemm", target="a100-80gb") == (1e-4, 0.0)
    near, far = (carry(1e-4, "gemm", "sgemm", target=target)[1] for target in ("h100", "mi300x"))
    assert near == SIGMA["arithmetic"] < far
