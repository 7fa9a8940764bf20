"""Families of kernels by their names."""

from __future__ import annotations

from pathlib import Path

import pytest

from traincast.traces.classify import find_kernel_family


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
        ("void vllm::concat_and_cache_mla_kernel<__nv_bfloat16>", "index"),
        ("void vllm::moe::moe_align_block_size_kernel<int>", "index"),
        ("void at::native::sbtopk::gatherTopK<c10::BFloat16, unsigned int, 2, false>", "index"),
        ("void vllm::cross_device_reduce_1stage<__nv_bfloat16, 8>", "communication"),
        ("void flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_oneshot_lamport<...>", "communication"),
        ("void aiter::cross_device_reduce_2stage<opus::bf16_t, 8>", "communication"),
        ("void c10d::symmetric_memory::multimem_all_reduce_kernel<16>", "communication"),
        ("ncclDevKernel_Generic_1(ncclDevKernelArgsStorage<4096ul>)", "communication"),
        ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNT", "gemm"),
        ("void deep_gemm::sm90_fp8_gemm_1d2d_impl<0u, 4096u>", "gemm"),
        ("fused_moe_kernel", "gemm"),
        ("_ZN5aiter36fmoe_bf16_blockscaleFp8_g1u1_vs_silu_1tg_32x256E", "gemm"),
        ("Cijk_Ailk_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT256x256x64_MI16x16x1", "gemm"),
        ("void ck::kernel_gemm_xdl_cshuffle_v3<ck::GridwiseGemm>", "gemm"),
        ("void marlin::Marlin<1125899906909960l, 256, 1, 8>", "gemm"),
        ("void wvSplitK_hf_sml_<__hip_bfloat16, 64, 4, 16, 8, 2, 2>", "gemm"),
        ("triton_tem_fused_addmm_relu_3", "gemm"),
        ("triton_tem_fused_flex_attention_0", "attention"),
        ("triton_poi_fused_convolution_relu_2", "elementwise"),
        ("triton_poi_fused__softmax_add_bmm_3", "elementwise"),
        ("triton_per_fused__softmax_1", "softmax"),
        ("triton_red_fused_native_layer_norm_4", "norm"),
        ("triton_red_fused_all_reduce_sum_9", "reduction"),
        ("void flashinfer::norm::FusedAddRMSNormKernel<8u, __nv_bfloat16>", "norm"),
        ("void flashinfer::activation::act_and_mul_kernel<__nv_bfloat16, &silu>", "elementwise"),
        ("void flashinfer::BatchQKApplyRotaryPosIdsCosSinCacheKernel<true, 128u>", "elementwise"),
        ("void flashinfer::BatchPrefillWithPagedKVCacheKernel<flashinfer::KernelTraits>", "attention"),
        ("void flashinfer::PersistentVariableLengthMergeStatesKernel<8u, 16u>", "attention"),
        ("void flash::flash_fwd_splitkv_kernel<Flash_fwd_kernel_traits<128, 64, 128, 4>>", "attention"),
        ("void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90>>", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128", "attention"),
        ("void cudnn::fusion::compute_dot_do_o_specialized<true, __nv_bfloat16>", "attention"),
        ("_fwd_grouped_kernel_stage1", "attention"),
        ("kernel_unified_attention_2d", "attention"),
        ("_ZN5aiter36mla_a16w16_qh16_m16x4_n16x1_coex0_mask1E", "attention"),
        ("void ck_tile::kentry<256, 2, ck_tile::FmhaFwdKernel<ck_tile::BlockFmhaPipelineQRKSVSAsync>>", "attention"),
        ("void paged_attention_ll4mi_QKV_mfma16_kernel<__hip_bfloat16>", "attention"),
        ("void transformer_engine::normalization::rmsnorm_fwd_tuned_kernel<>", "norm"),
        ("void transformer_engine::ln_fwd_tuned_kernel<>", "norm"),
        ("void transformer_engine::fused_rope_forward_kernel<__nv_bfloat16>", "elementwise"),
        ("void transformer_engine::cast_transpose_fused_kernel_notaligned<>", "copy"),
        ("void vllm::dynamic_per_token_scaled_fp8_quant_kernel<c10::BFloat16>", "elementwise"),
        ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_128x2_tn_align8>", "gemm"),
        ("void selective_scan_fwd_kernel<Selective_Scan_fwd_kernel_traits<128, 16, 1>>", "other"),
        ("miopenSp3AsmConv_v30_3_1_gfx94x_fp16_dot2_edc_dilation2", "conv"),
        ("void ck::kernel_grouped_conv_fwd_multiple_abd_xdl_cshuffle<>", "conv"),
        ("igemm_wrw_gtcx3_nhwc_fp16_bx0_ex1_bt256x256x32", "conv"),
        ("MIOpenBatchNormFwdTrainSpatial", "norm"),
    ],
)
def test_names_that_contain_those_of_other_families(name, family):
    assert find_kernel_family(name) == family


def _table():
    """(name, family) of names as public code and profiles print them: `[family]`, then one name a line."""
    family = ""
    for line in (Path(__file__).parent / "kernel_names.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            family = line.strip("[]")
        elif line:
            yield line, family


def test_names_of_the_libraries_people_use():
    table = dict(_table())
    assert len(table) > 350
    wrong = {
        name: (find_kernel_family(name), family) for name, family in table.items() if find_kernel_family(name) != family
    }
    assert not wrong
