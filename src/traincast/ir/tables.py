"""Rows of embedding tables that a model has, but that a step does not hold."""

from __future__ import annotations

from traincast.ir.ops import DTYPE_BYTES, Signature
from traincast.ir.program import Program
from traincast.utils.errors import TraincastError


def count_bytes_left_out(program: Program) -> int:
    """Bytes of the table rows that lookups know of (`rows`, `dims`) and that occupy no memory of the step."""
    return sum(
        _count_left_out_of_lookup(signature) for signature in program.signatures if "embedding" in signature.name
    )


def _count_left_out_of_lookup(signature: Signature) -> int:
    rows, dims = signature.scalar("rows"), signature.scalar("dims")
    if "backward" in signature.name or not (isinstance(rows, tuple) and isinstance(dims, tuple) and signature.inputs):
        return 0
    weights = signature.inputs[0]
    if len(rows) != len(dims):
        raise TraincastError(
            f"op '{signature.name}' has {len(rows)} numbers of rows and {len(dims)} widths of its tables"
        )
    pairs = zip(rows, dims, strict=True)
    whole = sum(height * width for height, width in pairs if isinstance(height, int) and isinstance(width, int))
    return max(whole - weights.numel, 0) * DTYPE_BYTES[weights.dtype]
