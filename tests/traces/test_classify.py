"""Families of kernels by their names."""

from __future__ import annotations

import pytest

from traincast.traces.classify import kernel_family


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("void deep_ep::internode::dispatch<false, 8>", "communication"),
        ("_matmul_ogs_NNT_bf16xbf16xmxfp4", "gemm"),
        ("void vllm::rotary_embedding_kernel<c10::BFloat16, true>", "elementwise"),
        ("void vllm::fused_add_rms_norm_kernel<c10::BFloat16, 8>", "norm"),
        ("void fft2d_r2c_32x32<float, false, 0u, false>", "conv"),
        ("void cudnn::cnn::flip_filter<float, float>", "conv"),
        ("void permute_pooled_embs_kernel<float>", "index"),
        ("void vllm::reshape_and_cache_flash_kernel<unsigned short>", "index"),
    ],
)
def test_names_that_contain_those_of_other_families(name, family):
    assert kernel_family(name) == family
