"""A DLRM small enough for tests."""

from __future__ import annotations

from traincast.models.dlrm.config import DlrmConfig
from traincast.models.sharded_dlrm.step import make_dlrm_tables
from traincast_evaluation.trials.plans import draw_candidate_plans
from traincast_evaluation.trials.tasks import DlrmTask

CONFIG = DlrmConfig(
    name="tiny", bottom_mlp=(5, 8, 8), top_mlp=(16, 1), rows_per_table=(50, 2000, 300, 9000), embedding_dim=8,
    lookups_per_table=(2, 5, 1, 3), embedding="bag", index_dtype="int64",
    access=("uniform", "zipf:1.1", "uniform", "zipf:0.9"),
)  # fmt: skip
TASK = DlrmTask(name="tiny", config=CONFIG, batch_sizes=(6,), ranks=2, seed=3)
PLANS = draw_candidate_plans(make_dlrm_tables(CONFIG), 2, seed=0)


def losses(step, count=3):
    """Losses of the first steps."""
    return [step().item() for _ in range(count)]
