"""Which family a kernel belongs to, told from its name. Families are those of `traincast.costs.kernels.families`."""

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
                    r"|symm(?:etric)?_mem|deep_ep|hybrid_?ep|internode|intranode|Ep(?:Dispatch|Combine)|userbuffers"
                    r"|all_?gather_|reduce_?scatter|all_?to_?all|a2a_?(?:Dispatch|Combine|Prepare|send|recv)"
                    r"|quickreduce"),
    ("memcpy", r"^memcpy|^memset|copyBuffer|fillBuffer|__amd_rocclr|^Copy(?:Host|Device)To(?:Host|Device)|^gpu_mem"),
    ("index", r"permute_pooled_embs|and_cache|kv_?cache_(?:store|copy)|store_?kv_?cache|kv_indices|kv_buffer"
              r"|slot_mapping|req_to_token"
              r"|moe_align|moe_?(?:un)?permute|moe_sum|expert_tokens|topk(?!GatingSoftmax|_?softmax|\w*Sampling)"
              r"|expandInputRows|finalizeMoe|ep_(?:scatter|gather)|routing::|moe_fused_gate|row_id_map"),
    ("norm", r"rms_?norm|layer_?norm|fused_rms|[:_]ln_(?:fwd|bwd|mul)|qk_?norm|l2norm_(?:fwd|bwd)"),
    ("elementwise", r"rotary|(?<!p)rope|act_and_mul|^(?!.*(?:gemm|matmul)).*(?<!de)quant(?:ize)?_|cvt_fp16_to_fp4"),
    (OTHER, r"selective_scan|selective_state|chunk_scan|chunk_state|state_passing|delta_rule|gated_delta"
            r"|sampling(?!.*softmax)"),
    ("norm", r"flashinfer.*norm"),
    ("attention", r"flash(?!infer)|fmha|attention|attn_|sdpa|dot_do_o|PagedKVCache|RaggedKVCache|Merge_?State|flex_"
                  r"|(?:Batch|Single)(?:Decode|Prefill)|_fwd_(?:grouped_)?kernel_stage[12]|(?:\b|[_\d])mla_"
                  r"|(?:\b|_)mha|mqa_logits|[:_\d]pa_(?:bf|fp)|bwd_(?:kernel_)?(?:dk|dq|fuse)|bwd_preprocess"
                  r"|hstu_(?:fwd|bwd)|^_(?:fwd|bwd)_(?:\w+_)?kernel|^_splitK_reduce|^reduce_segments"),
    ("embedding", r"embedding|split_embedding|EmbeddingBag|batched_unary|lookup|linearize_index|bounds_check_indices"
                  r"|l[rfx]u_cache|uvm_cach|\btbe_"),
    ("norm", r"batch_?norm|bn_(?:fw|bw)|MIOpenBatchNorm|GammaBeta|RowwiseMoments|welford_kernel"
             r"|(?:group|instance)_?norm|InternalGradients|ComputeFused|cuCompute\w*Grad"),
    ("pool", r"pool|adaptive_average|upsample"),
    ("softmax", r"soft_?max"),
    ("elementwise", r"op_(?:generic_)?tensor_|MIOpen(?:Neuron|Activ)"),
    ("conv", r"conv(?!ert)|cudnn|fft[12]d|flip_filter|winograd|wgrad(?!_gemm)|dgrad|fprop|scudnn"
             r"|xdlops.*(?:fwd|bwd|wrw)|igemm_|Im2|(?:im|vol)2col|col2(?:im|vol)|SubTensorOp"
             r"|OpTensor|nchw|nhwc|computeOffsets|miopen|naive_"),
    ("gemm", r"(?<!fb)gemm|gemv|matmul|cutlass|cublas|nvjet|splitK|Cijk_|xmma|dot_kernel|_mm(?:_|\b)|[:_]bmm_|marlin"
             r"|machete|fused_moe|fmoe|^bmm_|addmm|w\da\d|flatmm|int\d_?mm|lora_(?:shrink|expand)|[sb]gmv|trsm"
             r"|persistRNN"),
    ("copy", r"tensorTransform"),
    ("reduction", r"Device(?:Segmented)?Reduce(?!ByKey)"),
    ("index", r"index|gather|scatter|sort|permute|block_bucketize|segment|radix|cub::|jagged|take_|nonzero"
              r"|unique|cumsum|scan|krn_partial|compute_grad_weight|sum_and_scatter|expand_into|recat|asynchronous_"
              r"|reorder_|rocprim|thrust"),
    ("copy", r"CatArray|transpose|direct_copy|copy_kernel|copy_device|roll_cuda|sizes_copy|batched_transpose|cat_"),
    ("reduction", r"reduce_|reduce_kernel|reduction|welford|nll_loss|NLLCriterion|bce|loss|cross_?entropy|l2norm"),
    ("elementwise", r"elementwise|multi_tensor_apply|adam|adagrad|sgd|sigmoid|tanh|softplus|lpnorm|threshold|dropout"
                    r"|distribution_|fill|add_|mul_|triu|tril|kernelPointwise|vectorized|unary_kernel|relu|gelu"
                    r"|silu|[sg][ew]i?glu|amp_|lamb|arange|clamp|Functor|quant|cast|gated_|kOptimizer|where_|grid_sampler"
                    r"|_pad\d?d?_|cell|activation"),
)  # fmt: skip
BARE_TRITON = re.compile(r"triton_(?:_[\dcde]*)?$")
"""Names of compiled kernels that say nothing but how their arguments are aligned."""
_COMPILED = tuple((family, re.compile(pattern, re.IGNORECASE)) for family, pattern in _RULES)


@cache
def find_kernel_family(name: str) -> str:
    """The family of a kernel, e.g. "gemm"; "communication" for collectives, "other" for names nobody knows."""
    for family, pattern in _COMPILED:
        if pattern.search(name):
            return family
    return OTHER
