"""What a DLRM with a low-rank cross network is, in numbers: DCNv2, as MLPerf trains it from v3.0 on."""

from __future__ import annotations

from dataclasses import dataclass

from traincast.models.dlrm.config import RESIDENT_ROWS_CAP, DlrmConfig


@dataclass(frozen=True, kw_only=True)
class DcnConfig(DlrmConfig):
    """A DLRM whose bottom output and pooled embeddings, side by side, go through a low-rank cross network.

    `cross_layers` layers, each through `cross_rank` columns; the top MLP after it ends in a logit.
    """

    cross_layers: int
    cross_rank: int

    @property
    def parameters(self) -> int:
        """Parameters of the whole model, every row of every table counted."""
        width = self.top_input
        return super().parameters + self.cross_layers * (2 * width * self.cross_rank + width)


DLRM_V2 = DcnConfig(
    name="dlrm-v2",
    bottom_mlp=(13, 512, 256, 128),
    top_mlp=(1024, 1024, 512, 256, 1),
    rows_per_table=(
        40000000, 39060, 17295, 7424, 20265, 3, 7122, 1543, 63, 40000000, 3067956, 405282, 10,
        2209, 11938, 155, 4, 976, 14, 40000000, 40000000, 40000000, 590152, 12973, 108, 36,
    ),
    embedding_dim=128,
    lookups_per_table=(3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1),
    interaction="cat",
    embedding="fbgemm",
    batch_size=8192,
    index_dtype="int64",
    resident_rows=RESIDENT_ROWS_CAP,
    cross_layers=3,
    cross_rank=512,
)  # fmt: skip
