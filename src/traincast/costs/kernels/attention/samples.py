"""Measured attention."""

from __future__ import annotations

from dataclasses import dataclass

from traincast.costs.kernels.samples import Samples


@dataclass(frozen=True, eq=False, slots=True)
class AttentionSamples(Samples):
    """Measured attention in bfloat16."""

    def names(self) -> list[str]:
        """Batch, heads of queries and keys, positions, head dimension."""
        return ["b{0:.0f} h{1:.0f}/{2:.0f} s{3:.0f} d{5:.0f}".format(*values) for values in self.calls.values]
