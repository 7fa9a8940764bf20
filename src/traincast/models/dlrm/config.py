"""What a DLRM is, in numbers, with plain interaction or a low-rank cross network (DCNv2, as MLPerf trains it from v3.0
on)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from traincast.utils.errors import TraincastError

EMBEDDINGS = ("batched", "bag", "fbgemm")
INTERACTIONS = ("dot", "cat")
LOSSES = ("mse", "bce")
OPTIMIZERS = ("sgd", "adagrad", "adam")
INDEX_DTYPES = ("int32", "int64")

RESIDENT_ROWS_CAP = 2_000_000
"""Rows of one table that the built-in Criteo models keep on the device; the true heights stay in the op's `rows`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DlrmConfig:
    """One DLRM and how it is trained.

    `bottom_mlp` runs from the number of dense features to the width of its output, `top_mlp` lists layer outputs
    after the interaction. `rows_per_table` and `lookups_per_table` (lookups per sample) have one entry per table.
    `resident_rows` caps the rows of a table that occupy device memory (0: all of them). `access` says for each table
    which rows are wanted (`embeddings.access.parse_access` reads it); without it all alike, and tables share lookups.
    """

    name: str
    bottom_mlp: tuple[int, ...]
    top_mlp: tuple[int, ...]
    rows_per_table: tuple[int, ...]
    embedding_dim: int
    lookups_per_table: tuple[int, ...]
    interaction: str = "dot"
    loss: str = "bce"
    optimizer: str = "sgd"
    embedding: str = "batched"
    batch_size: int = 2048
    index_dtype: str = "int32"
    resident_rows: int = 0
    access: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.bottom_mlp[-1] != self.embedding_dim and self.interaction == "dot":
            raise TraincastError(
                f"bottom_mlp ends at {self.bottom_mlp[-1]} but embedding_dim is {self.embedding_dim}; "
                "the dot interaction needs them equal"
            )
        if len(self.lookups_per_table) != self.num_tables:
            raise TraincastError(
                f"lookups_per_table has {len(self.lookups_per_table)} entries for {self.num_tables} tables; "
                "give one number or one per table"
            )
        if self.access and len(self.access) != self.num_tables:
            raise TraincastError(
                f"access has {len(self.access)} entries for {self.num_tables} tables; give one, or one per table"
            )

    @property
    def num_tables(self) -> int:
        """Number of embedding tables."""
        return len(self.rows_per_table)

    @property
    def lookups(self) -> int:
        """Lookups of one sample over all tables."""
        return sum(self.lookups_per_table)

    @property
    def table_rows(self) -> tuple[int, ...]:
        """Rows of each table that occupy device memory."""
        cap = self.resident_rows
        return tuple(min(rows, cap) if cap else rows for rows in self.rows_per_table)

    @property
    def top_input(self) -> int:
        """Width of the interaction's output."""
        if self.interaction == "cat":
            return self.bottom_mlp[-1] + self.num_tables * self.embedding_dim
        features = self.num_tables + 1
        return features * (features - 1) // 2 + self.bottom_mlp[-1]

    @property
    def parameters(self) -> int:
        """Parameters of the whole model, every row of every table counted."""
        widths = [*zip(self.bottom_mlp, self.bottom_mlp[1:], strict=False)]
        top = (self.top_input, *self.top_mlp)
        widths += [*zip(top, top[1:], strict=False)]
        return sum(i * o + o for i, o in widths) + sum(self.rows_per_table) * self.embedding_dim

    def replace_options(self, *, embedding: str, optimizer: str) -> DlrmConfig:
        """The same model with another embedding operator and optimizer."""
        return replace(self, embedding=embedding, optimizer=optimizer)


CRITEO_ROWS = (
    39884406, 39043, 17289, 7420, 20263, 3, 7120, 1543, 63, 38532951, 2953546, 403346, 10,
    2208, 11938, 155, 4, 976, 14, 39979771, 25641295, 39664984, 585935, 12972, 108, 36,
)  # fmt: skip

DLRM_DEFAULT = DlrmConfig(
    name="dlrm-default",
    bottom_mlp=(512, 512, 64),
    top_mlp=(1024, 1024, 1024, 1),
    rows_per_table=(1_000_000,) * 8,
    embedding_dim=64,
    lookups_per_table=(100,) * 8,
    loss="mse",
)
DLRM_MLPERF = DlrmConfig(
    name="dlrm-mlperf",
    bottom_mlp=(13, 512, 256, 128),
    top_mlp=(1024, 1024, 512, 256, 1),
    rows_per_table=CRITEO_ROWS,
    embedding_dim=128,
    lookups_per_table=(1,) * 26,
    resident_rows=RESIDENT_ROWS_CAP,
)
DLRM_DDP = DlrmConfig(
    name="dlrm-ddp",
    bottom_mlp=(128, 128, 128, 128),
    top_mlp=(512, 512, 512, 256, 1),
    rows_per_table=(80_000,) * 8,
    embedding_dim=128,
    lookups_per_table=(10,) * 8,
)
STUDY_DLRMS = {config.name: config for config in (DLRM_DEFAULT, DLRM_MLPERF, DLRM_DDP)}


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
