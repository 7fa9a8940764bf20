"""Which tensors travel together: PyTorch's `_compute_bucket_assignment_by_size`, without PyTorch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from traincast.ir.ops import TensorSpec

MIB = 1 << 20
BUCKET_BYTES = (MIB, 25 * MIB)
"""DDP's defaults: bytes of the first bucket, which should be on its way early, and of all others."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Tensors of one type in one flat buffer. `members` are indices into what was given, `offsets` count elements."""

    members: tuple[int, ...]
    offsets: tuple[int, ...]
    numel: int
    dtype: str

    @property
    def flat(self) -> TensorSpec:
        """The buffer's form."""
        return TensorSpec((self.numel,), (1,), self.dtype)


def assign_buckets(
    specs: Sequence[TensorSpec], limits_bytes: Sequence[float], *, sort: bool = False
) -> tuple[Bucket, ...]:
    """Fills a bucket per type in the order given until it reaches its limit: the first limit for the first bucket of
    a type, and so on; the last limit for all further ones. `sort`: in the order of their first members.

    >>> one = TensorSpec((256,), (1,), "float32")
    >>> [bucket.members for bucket in assign_buckets([one] * 5, [1024, 2048])]
    [(0,), (1, 2), (3, 4)]
    """
    open_buckets: dict[str, list[int]] = {}
    open_bytes: Counter[str] = Counter()
    filled: Counter[str] = Counter()
    closed: list[list[int]] = []
    for index, spec in enumerate(specs):
        open_buckets.setdefault(spec.dtype, []).append(index)
        open_bytes[spec.dtype] += spec.nbytes
        if open_bytes[spec.dtype] >= limits_bytes[min(filled[spec.dtype], len(limits_bytes) - 1)]:
            closed.append(open_buckets.pop(spec.dtype))
            del open_bytes[spec.dtype]
            filled[spec.dtype] += 1
    closed += open_buckets.values()
    if sort:
        closed.sort()
    return tuple(_make_bucket(specs, members) for members in closed)


def _make_bucket(specs: Sequence[TensorSpec], members: Sequence[int]) -> Bucket:
    offsets, numel = [], 0
    for index in members:
        offsets.append(numel)
        numel += specs[index].numel
    return Bucket(tuple(members), tuple(offsets), numel, specs[members[0]].dtype)
