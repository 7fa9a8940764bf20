"""Which family a kernel belongs to, told from its name. The families are those of `traincast.kernels.families`."""

from __future__ import annotations

import re
from functools import cache

COMMUNICATION = "communication"
OTHER = "other"

# the first that matches counts: the telling names stand before the general ones
_RULES: tuple[tuple[str, str], ...] = (
    # what a compiler made is named after all that it put together: how it goes through memory tells more
    ("gemm", r"^triton_tem_fused(?!.*(?:attention|conv))|^triton_mm"),
    ("embedding", r"^triton_poi_fused.*embedding(?!_dense_backward)"),
    ("elementwise", r"^triton_(?:poi|for|unk)_"),
    ("norm", r"^triton_(?:red|per)_.*norm"),
    ("softmax", r"^triton_(?:red|per)_.*softmax"),
    ("reduction", r"^triton_(?:red|per)_"),
    (COMMUNICATION, r"nccl|rccl|msccl|oneccl|all_?reduce|cross_device|(?:one|two)_?shot|multimem|nvshmem"
                    r"|symmetric_memory|deep_ep|hybrid_?ep|internode|intranode|Ep(?:Dispatch|Combine)|userbuffers"
                    r"|all_?gather_|reduce_?scatter|all_?to_?all|A2A(?:Dispatch|Combine|Prepare)|quickreduce"),
    ("memcpy", r"^memcpy|^memset|copyBuffer|fillBuffer|__amd_rocclr|^Copy(?:Host|Device)To(?:Host|Device)|^gpu_mem"),
    ("index", r"permute_pooled_embs|and_cache|kv_?cache_(?:store|copy)|store_?kv_?cache|kv_indices|req_to_token"
              r"|moe_align|moe_?(?:un)?permute|moe_sum|expert_tokens|topk(?!GatingSoftmax|_?softmax|\w*Sampling)"
              r"|expandInputRows|finalizeMoe|ep_(?:scatter|gather)|routing::"),
    ("norm", r"rms_?norm|layer_?norm|fused_rms|[:_]ln_(?:fwd|bwd|mul)"),
    ("elementwise", r"rotary|(?<!p)rope|act_and_mul|^(?!.*(?:gemm|matmul)).*(?<!de)quant(?:ize)?_|cvt_fp16_to_fp4"),
    (OTHER, r"selective_scan|selective_state|chunk_scan|chunk_state|state_passing|delta_rule|gated_delta|sampling"),
    ("norm", r"flashinfer.*norm"),
    ("attention", r"flash(?!infer)|fmha|attention|attn_|sdpa|dot_do_o|PagedKVCache|RaggedKVCache|MergeState"
                  r"|(?:Batch|Single)(?:Decode|Prefill)|_fwd_(?:grouped_)?kernel_stage[12]|[:_\d]mla_|_mha|mqa_logits"
                  r"|[:_\d]pa_(?:bf|fp)|bwd_(?:kernel_)?(?:dk|dq|fuse)|bwd_preprocess|hstu_(?:fwd|bwd)|^_fwd_kernel"
                  r"|^_bwd_kernel|^_splitK_reduce|^reduce_segments"),
    ("embedding", r"embedding|split_embedding|EmbeddingBag|batched_unary|lookup|linearize_index|bounds_check_indices"
                  r"|l[rfx]u_cache|uvm_cach"),
    ("norm", r"batch_?norm|bn_(?:fw|bw)|MIOpenBatchNorm|GammaBeta|RowwiseMoments|welford_kernel"
             r"|group_?norm|InternalGradients|ComputeFused|cuCompute\w*Grad"),
    ("pool", r"pool|adaptive_average|upsample"),
    ("softmax", r"soft_?max"),
    ("conv", r"conv(?!ert)|cudnn|fft[12]d|flip_filter|winograd|wgrad(?!_gemm)|dgrad|fprop|scudnn"
             r"|xdlops.*(?:fwd|bwd|wrw)|igemm_|Im2|(?:im|vol)2col|col2(?:im|vol)|SubTensorOp"
             r"|OpTensor|nchw|nhwc|computeOffsets|miopen|naive_"),
    ("gemm", r"(?<!fb)gemm|gemv|matmul|cutlass|cublas|nvjet|splitK|Cijk_|xmma|dot_kernel|_mm_|[:_]bmm_|marlin|machete"
             r"|fused_moe|fmoe|^bmm_|addmm|w\da\d|flatmm|int\d_?mm|lora_(?:shrink|expand)|[sb]gmv|trsm|persistRNN"),
    ("copy", r"tensorTransform"),
    ("index", r"index|gather|scatter|sort|permute|block_bucketize|segment|radix|cub::|jagged|take_|nonzero"
              r"|unique|cumsum|scan|krn_partial|compute_grad_weight|sum_and_scatter|expand_into|recat|asynchronous_|reorder_"
              r"|rocprim|thrust"),
    ("copy", r"CatArray|transpose|direct_copy|copy_kernel|copy_device|sizes_copy|batched_transpose|cat_"),
    ("reduction", r"reduce_|reduce_kernel|reduction|welford|nll_loss|NLLCriterion|bce|loss|cross_?entropy|l2norm"),
    ("elementwise", r"elementwise|multi_tensor_apply|FusedAdam|adagrad|lpnorm|threshold|dropout|distribution_|fill|add_"
                    r"|mul_|triu|tril|kernelPointwise|vectorized|relu|gelu|silu|[sg][ew]i?glu|amp_|lamb|arange|clamp"
                    r"|Functor|quant|cast|gated_|kOptimizer|where_|op_generic_tensor|grid_sampler|_pad\d?d?_|cell|activation"),
)  # fmt: skip
_COMPILED = tuple((family, re.compile(pattern, re.IGNORECASE)) for family, pattern in _RULES)


@cache
def kernel_family(name: str) -> str:
    """The family of a kernel, e.g. "gemm"; "communication" for collectives, "other" for names nobody knows."""
    for family, pattern in _COMPILED:
        if pattern.search(name):
            return family
    return OTHER
