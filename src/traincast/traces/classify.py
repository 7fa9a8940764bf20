"""Which family a kernel belongs to, told from its name. The families are those of `traincast.kernels.families`."""

from __future__ import annotations

import re
from functools import cache

COMMUNICATION = "communication"
OTHER = "other"

# the first that matches counts: the telling names stand before the general ones
_RULES: tuple[tuple[str, str], ...] = (
    (COMMUNICATION, r"nccl|rccl|all_?reduce_kernel|one_shot|multimem|deep_ep|internode|intranode"),
    ("memcpy", r"^memcpy|^memset|copyBuffer|fillBuffer|__amd_rocclr"),
    ("index", r"permute_pooled_embs|reshape_and_cache"),
    ("elementwise", r"rotary|rope_kernel"),
    ("attention", r"flash|fmha|attention|AttentionKernel|attn_"),
    ("embedding", r"embedding|split_embedding|EmbeddingBag|batched_unary|lookup|linearize_index|bounds_check_indices"),
    ("norm", r"batch_?norm|bn_(?:fw|bw)|MIOpenBatchNorm|layer_?norm|LayerNorm|GammaBeta|cuApplyLayerNorm|RowwiseMoments"
             r"|rms_?norm|group_?norm|InternalGradients|fp32_ComputeFused"),
    ("pool", r"pool|adaptive_average"),
    ("softmax", r"soft_?max"),
    ("conv", r"conv(?!ert)|cudnn|fft[12]d|flip_filter|winograd|wgrad|dgrad|fprop|scudnn"
             r"|xdlops.*(?:fwd|bwd|wrw)|igemm_|Im2|im2col|SubTensorOp"
             r"|OpTensor|nchw|nhwc|computeOffsets|miopen|naive_"),
    ("gemm", r"gemm|gemv|matmul|cutlass|cublas|splitK|Cijk_|xmma|dot_kernel|_mm_"),
    ("index", r"index|gather|scatter|sort|permute|block_bucketize|segment|RadixSort|cub::|jagged|take_|masked|nonzero"
              r"|unique|cumsum|scan|krn_partial|compute_grad_weight|sum_and_scatter|expand_into|recat|asynchronous_"),
    ("copy", r"CatArray|transpose|direct_copy|copy_kernel|tensorTransform|batched_transpose|cat_"),
    ("reduction", r"reduce_|reduce_kernel|reduction|welford|nll_loss|NLLCriterion|bce|loss"),
    ("elementwise", r"elementwise|multi_tensor_apply|FusedAdam|adagrad|lpnorm|threshold|dropout|distribution_|fill|add_"
                    r"|mul_|triu|tril|kernelPointwise|vectorized|relu|amp_|lamb|arange|clamp|Functor"),
)  # fmt: skip
_COMPILED = tuple((family, re.compile(pattern, re.IGNORECASE)) for family, pattern in _RULES)


@cache
def kernel_family(name: str) -> str:
    """The family of a kernel, e.g. "gemm"; "communication" for collectives, "other" for names nobody knows."""
    for family, pattern in _COMPILED:
        if pattern.search(name):
            return family
    return OTHER
