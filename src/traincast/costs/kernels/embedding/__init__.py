"""Embedding tables: lookups, and updates of the rows looked up."""

from __future__ import annotations

from traincast.costs.kernels.contract import Family, FamilyRecord
from traincast.models.embeddings.table import FIELDS as LOAD_FIELDS

EMBEDDING = Family(
    "embedding",
    # bag: one EmbeddingBag; lookup: ATen's index_select; batched: the papers' table-batched kernel; tbe: FBGEMM.
    # backward kinds name the optimizer fused into them ("dense" writes a gradient); row_sums adds a row per lookup to
    # its sum with atomics; row_gather copies whole rows, 16 bytes per thread; cache_fill brings the rows that FBGEMM's
    # cache lacks, `row_bytes` of them, and takes back those they replace
    (
        "bag_forward", "bag_backward_dense", "lookup_forward", "lookup_backward_dense",
        "batched_forward", "batched_backward_sgd",
        "tbe_forward", "tbe_backward_sgd", "tbe_backward_adagrad", "tbe_backward_rowwise_adagrad", "tbe_backward_adam",
        "tbe_backward_dense", "row_sums", "row_gather", "cache_fill",
    ),
    # what a batch of `batch` samples asks of all tables together (see `embeddings.load`); lookups of the longest bag,
    # or of the hottest row (row_sums); `sorted` 1 when the indices of every bag ascend; `host` 1 when the rows are in
    # host memory, 2 when only the optimizer state is, 3 when they are in the memory of GPUs next door
    ("batch", *LOAD_FIELDS, "longest_bag", "index_bytes", "row_item_bytes", "weighted", "sorted", "host"),
)  # fmt: skip
RECORD = FamilyRecord(
    family=EMBEDDING,
    package=__name__,
    lowering=tuple(f"lowering.{name}" for name in ("lookups", "inputs", "stored")),
    roofline="physics:sheet_seconds",
    model="model:EmbeddingModel",
    profile="embedding",
)
