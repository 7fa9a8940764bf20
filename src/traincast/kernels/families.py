"""Every kernel family: its kinds and the numbers that describe one call.

Sizes are elements unless the name says bytes. This table is the language between lowering (ops to calls) and the
cost models (calls to seconds).
"""

from __future__ import annotations

from traincast.embeddings.load import FIELDS as LOAD_FIELDS
from traincast.kernels.call import Family

GEMM = Family(
    "gemm",
    ("mm", "linear", "bmm"),
    # C[m,n] = A[m,k] B[k,n], `batch` times; trans_* 1 when the operand is read transposed; bias 1 when added
    ("batch", "m", "n", "k", "trans_a", "trans_b", "bias"),
)
CONV = Family(
    "conv",
    ("forward", "backward_data", "backward_weights"),
    (
        "batch", "in_channels", "out_channels", "in_h", "in_w", "kernel_h", "kernel_w",
        "stride_h", "stride_w", "pad_h", "pad_w", "dilation_h", "dilation_w", "groups",
    ),
)  # fmt: skip
ELEMENTWISE = Family(
    "elementwise",
    # the arithmetic class; "copy" also stands for casts and fills, "dropout" draws random numbers, "strided" is cheap
    # arithmetic on operands of unlike layout (one is broadcast, say), whose offsets cost more than the arithmetic
    (
        "add",
        "mul",
        "div",
        "pow",
        "tanh",
        "relu",
        "gelu",
        "exp",
        "copy",
        "fill",
        "dropout",
        "compare",
        "optimizer",
        "loss",
        "strided",
    ),
    # bytes that must be moved, elements of the output, and how many tensors take part (foreach: all lists together)
    ("elements", "bytes_read", "bytes_written", "tensors"),
)
COPY = Family(
    "copy",
    # layout: a strided or transposing copy; cat: concatenation or split
    ("layout", "cat"),
    ("elements", "bytes_read", "bytes_written", "tensors"),
)
INDEX = Family(
    "index",
    # gather reads rows at random; scatter adds with atomics; sort is one pass of a radix sort of `elements` keys;
    # put is index_put's accumulation after a sort (one warp a distinct index, `row_elements` contiguous)
    ("gather", "scatter", "sort", "put"),
    ("elements", "row_elements", "bytes_read", "bytes_written"),
)
REDUCTION = Family(
    "reduction",
    # over the last (contiguous) dimension, over an outer one (column sums), or over everything
    ("inner", "outer", "full"),
    ("elements", "outputs", "bytes_read", "bytes_written"),
)
SOFTMAX = Family("softmax", ("forward", "backward", "log_forward", "log_backward"), ("rows", "cols"))
NORM = Family(
    "norm",
    # layer: rows x cols normalised over cols; batch: rows = channels, cols = batch * positions of one channel
    (
        "layer_forward",
        "layer_backward",
        "layer_backward_weights",
        "batch_forward",
        "batch_backward",
        "batch_inference",
    ),
    ("rows", "cols"),
)
POOL = Family("pool", ("forward", "backward"), ("elements", "window", "bytes_read", "bytes_written"))
ATTENTION = Family(
    "attention",
    ("forward", "backward"),
    ("batch", "q_heads", "kv_heads", "q_len", "kv_len", "head_dim", "causal"),
)
EMBEDDING = Family(
    "embedding",
    # bag: one EmbeddingBag; lookup: plain row gather; batched: the papers' table-batched kernel; tbe: FBGEMM.
    # backward kinds name the optimizer fused into them ("dense" writes a gradient); row_sums adds a row a lookup to
    # its sum with atomics
    (
        "bag_forward", "bag_backward_dense", "lookup_forward", "lookup_backward_dense",
        "batched_forward", "batched_backward_sgd",
        "tbe_forward", "tbe_backward_sgd", "tbe_backward_adagrad", "tbe_backward_rowwise_adagrad", "tbe_backward_adam",
        "tbe_backward_dense", "row_sums",
    ),
    # what a batch of `batch` samples asks of all tables together (see `embeddings.load`); lookups of the longest bag,
    # or of the hottest row (row_sums); `sorted` 1 when the indices of every bag ascend; `host` 1 when the rows are in
    # host memory, 2 when only the optimizer state is
    ("batch", *LOAD_FIELDS, "longest_bag", "index_bytes", "row_item_bytes", "weighted", "sorted", "host"),
)  # fmt: skip
MEMCPY = Family(
    "memcpy",
    ("h2d_pinned", "h2d_pageable", "d2h_pinned", "d2h_pageable", "d2d", "memset"),
    ("bytes",),
)

COLLECTIVE = Family(
    "collective",
    (
        "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "all_to_all_v",
        "broadcast", "reduce", "send_recv", "barrier",
    ),
    # `bytes` is the larger buffer of one rank (all_gather: the gathered output; reduce_scatter: the input; all_to_all:
    # the whole send buffer; all_to_all_v: see `collectives.even_bytes`); `ranks` take part, spread evenly over `nodes`
    ("bytes", "ranks", "nodes"),
)  # fmt: skip

# what one device runs by itself
FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        GEMM, CONV, ELEMENTWISE, COPY, INDEX, REDUCTION, SOFTMAX, NORM, POOL, ATTENTION, EMBEDDING, MEMCPY,
    )
}  # fmt: skip
