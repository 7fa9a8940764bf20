"""A DLRM that trains for real on CPU ranks: EmbeddingBags placed by a plan, MLPs on every rank, SGD.

One process is the plan of one rank: every table whole, nothing exchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from traincast.calibration.bench.collectives import DifferentiableAllToAll, Summed
from traincast.models.dlrm.config import DlrmConfig
from traincast.models.layers.optimizers import LEARNING_RATE
from traincast.models.placement.plan import Placement, Plan, Shard, ShardingKind
from traincast.models.sharded_dlrm.step import make_dlrm_tables
from traincast.utils.arrays import IntArray
from traincast_evaluation.trials.inputs import Bags, draw_lookups, make_bags, make_shard_bags
from traincast_evaluation.trials.tasks import DlrmTask
from traincast_evaluation.zoo.define.dlrm import make_mlp

Step = Callable[[], object]
_FILL = 0.01  # of table entries; random ones would take longer to draw than to train on
EXCHANGED = (ShardingKind.TABLE_WISE, ShardingKind.COLUMN_WISE)


@dataclass(frozen=True, slots=True)
class Division:
    """A plan from the view of one rank: whole tables and slices of columns by the rank that holds them, tables of which
    every rank holds a block of rows, and tables of which every rank has a copy."""

    rank: int
    ranks: int
    exchanged: tuple[tuple[Shard, ...], ...]
    by_rows: tuple[Shard, ...]
    copied: tuple[int, ...]

    @staticmethod
    def of(plan: Plan, config: DlrmConfig, rank: int) -> Division:
        """The division under a plan; on one rank nothing is exchanged."""
        shards = plan.make_shards(make_dlrm_tables(config))
        kinds = [placement.kind for placement in plan.placements]
        alone = plan.world_size == 1
        moved = [shard for shard in shards if kinds[shard.table] in EXCHANGED and not alone]
        return Division(
            rank=rank,
            ranks=plan.world_size,
            exchanged=tuple(
                tuple(shard for shard in moved if shard.rank == holder) for holder in range(plan.world_size)
            ),
            by_rows=tuple(shard for shard in shards if kinds[shard.table].by_rows and shard.rank == rank),
            copied=tuple(number for number, kind in enumerate(kinds) if kind.copied or alone),
        )


def make_one_rank_plan(config: DlrmConfig) -> Plan:
    """Every table whole on the only rank."""
    names = tuple(table.name for table in make_dlrm_tables(config))
    return Plan(names, (Placement(ShardingKind.TABLE_WISE, (0,)),) * len(names), 1)


def _make_embedding_bag(height: int, width: int, *, sparse: bool) -> nn.EmbeddingBag:
    return nn.EmbeddingBag(height, width, mode="sum", sparse=sparse, _weight=torch.full((height, width), _FILL))


class HybridDlrm(nn.Module):
    """Tables divided between ranks, MLPs under DDP where there are several."""

    pairs: torch.Tensor

    def __init__(self, config: DlrmConfig, division: Division) -> None:
        super().__init__()
        self.config, self.division = config, division
        several = division.ranks > 1
        self.moved = nn.ModuleList(
            _make_embedding_bag(shard.height, shard.width, sparse=True) for shard in division.exchanged[division.rank]
        )
        self.blocks = nn.ModuleList(
            _make_embedding_bag(shard.height, shard.width, sparse=True) for shard in division.by_rows
        )
        rows, dim = config.rows_per_table, config.embedding_dim
        # a copied table's gradient is summed over ranks as a whole; alone, only the rows that were looked up change
        copies = nn.ModuleList(_make_embedding_bag(rows[table], dim, sparse=not several) for table in division.copied)
        self.copies = copies
        self.bottom: nn.Module = make_mlp(config.bottom_mlp)
        self.top: nn.Module = make_mlp((config.top_input, *config.top_mlp), sigmoid_last=True)
        if several:
            self.bottom, self.top = DistributedDataParallel(self.bottom), DistributedDataParallel(self.top)
            self.copies = nn.ModuleList(DistributedDataParallel(copy) for copy in copies)
        pairs = torch.tril_indices(config.num_tables + 1, config.num_tables + 1, -1)
        self.register_buffer("pairs", pairs)

    def forward(
        self, dense: torch.Tensor, moved: Sequence[Bags], blocks: Sequence[Bags], copied: Sequence[Bags]
    ) -> torch.Tensor:
        """Click probabilities [samples of this rank, 1]."""
        pieces: list[tuple[tuple[int, int], torch.Tensor]] = []  # by table and first column
        if any(self.division.exchanged):
            pieces += self._exchanged(moved)
        if self.blocks:
            pieces += self._pool_row_shards(blocks)
        for table, copy, bags in zip(self.division.copied, self.copies, copied, strict=True):
            pieces.append(((table, 0), copy(bags.indices, bags.offsets)))
        x = self.bottom(dense)
        pooled = [piece for _, piece in sorted(pieces, key=lambda keyed: keyed[0])]
        probabilities: torch.Tensor = self.top(self._interact(x, pooled))
        return probabilities

    def _exchanged(self, moved: Sequence[Bags]) -> list[tuple[tuple[int, int], torch.Tensor]]:
        """Tables that are whole, or in slices of columns, on one rank: it looks up the samples of all."""
        division, holders = self.division, self.division.exchanged
        looked_up = [bag(bags.indices, bags.offsets) for bag, bags in zip(self.moved, moved, strict=True)]
        batch = self.batch_size
        nothing = torch.zeros(0, requires_grad=True)  # of a rank without tables, which still takes part
        flat = torch.cat(looked_up, dim=1).view(-1) if looked_up else nothing
        widths = [[shard.width for shard in shards] for shards in holders]
        sent = [batch * sum(widths[division.rank])] * division.ranks
        received = [batch * sum(width) for width in widths]
        arrived: torch.Tensor = DifferentiableAllToAll.apply(flat, sent, received)  # type: ignore[no-untyped-call]
        pieces = []
        for shards, width, part in zip(holders, widths, torch.split(arrived, received), strict=True):
            columns = torch.split(part.view(batch, sum(width)), width, dim=1) if shards else ()
            pieces += [((shard.table, shard.columns[0]), piece) for shard, piece in zip(shards, columns, strict=True)]
        return pieces

    def _pool_row_shards(self, blocks: Sequence[Bags]) -> list[tuple[tuple[int, int], torch.Tensor]]:
        """Tables of which every rank holds a block of rows: partial sums of all samples, added up."""
        partial = [bag(bags.indices, bags.offsets) for bag, bags in zip(self.blocks, blocks, strict=True)]
        summed: torch.Tensor = Summed.apply(torch.cat(partial, dim=1))  # type: ignore[no-untyped-call]
        pieces = torch.split(summed, [shard.width for shard in self.division.by_rows], dim=1)
        return [((shard.table, 0), piece) for shard, piece in zip(self.division.by_rows, pieces, strict=True)]

    def _interact(self, x: torch.Tensor, pooled: Sequence[torch.Tensor]) -> torch.Tensor:
        joined = torch.cat([x, *pooled], dim=1)
        if self.config.interaction == "cat":
            return joined
        features = joined.view(x.shape[0], -1, x.shape[1])
        products = torch.bmm(features, features.transpose(1, 2))
        return torch.cat([x, products[:, self.pairs[0], self.pairs[1]]], dim=1)

    batch_size: int = 0
    """Samples of this rank, set before the first step."""


def build_dlrm_step(task: DlrmTask, plan: Plan) -> Callable[..., Step]:
    """`make_step(batch_size, *, rank, world_size)` of a task under a plan; on one rank the last two may be left out."""

    def make_step(batch_size: int, *, rank: int = 0, world_size: int = 1) -> Step:
        division = Division.of(plan, task.config, rank)
        torch.manual_seed(task.seed)  # the same MLPs on all ranks
        model = HybridDlrm(task.config, division)
        model.batch_size = batch_size
        wanted = draw_lookups(task.config, batch_size * world_size, task.seed)
        lookups = _divide_lookups(wanted, division, batch_size)
        mine = slice(rank * batch_size, (rank + 1) * batch_size)
        dense = torch.rand(batch_size * world_size, task.config.bottom_mlp[0])[mine]
        target = torch.rand(batch_size * world_size, 1)[mine]
        optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, foreach=False)
        criterion: nn.Module = nn.MSELoss() if task.config.loss == "mse" else nn.BCELoss()

        def step() -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = criterion(model(dense, *lookups), target)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            return loss

        return step

    return make_step


def _divide_lookups(wanted: Sequence[IntArray], division: Division, batch_size: int) -> tuple[list[Bags], ...]:
    """The lookups of this rank's parts for the samples of all ranks, and of its copies for its own."""
    mine = slice(division.rank * batch_size, (division.rank + 1) * batch_size)
    return (
        [make_bags(wanted[shard.table]) for shard in division.exchanged[division.rank]],
        [make_shard_bags(wanted[shard.table], shard) for shard in division.by_rows],
        [make_bags(wanted[table][mine]) for table in division.copied],
    )
