"""GEMMs: `torch.mm`, linear layers, batched GEMMs."""

from __future__ import annotations

from traincast.costs.kernels.contract import Family, FamilyRecord

GEMM = Family(
    "gemm",
    # accumulate: onto a gradient kept in fp32; looped: `batch` GEMMs of their own sizes' mean, launched one after
    # the other (experts, one by one); grouped: the same in one kernel
    ("mm", "linear", "bmm", "accumulate", "looped", "looped_accumulate", "grouped"),
    # C[m,n] = A[m,k] B[k,n], `batch` times; trans_* 1 when the operand is read transposed; bias 1 when added
    ("batch", "m", "n", "k", "trans_a", "trans_b", "bias"),
)
RECORD = FamilyRecord(
    family=GEMM,
    package=__name__,
    roofline="physics:gemm_seconds",
    model="model:GemmModel",
    profile="gemm",
)
