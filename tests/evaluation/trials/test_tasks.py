"""Random DLRMs: the same for a seed, inside the limits of the paper's generator as scaled."""

from __future__ import annotations

import pytest

from traincast.models.embeddings.access import Uniform, parse_access
from traincast.utils.errors import TraincastError
from traincast_evaluation.trials.tasks import BATCHES, DIMS, MEMORY_BYTES, POOLING, ROWS, draw_dlrms


def test_a_task_is_the_same_however_many_are_drawn_and_another_for_another_seed():
    few, many = draw_dlrms(3, seed=7), draw_dlrms(9, seed=7)
    assert many[:3] == few
    assert draw_dlrms(3, seed=8)[0].config != few[0].config


@pytest.mark.parametrize("ranks", [1, 2])
def test_tasks_stay_inside_the_limits(ranks):
    for task in draw_dlrms(60, seed=0, ranks=ranks):
        config = task.config
        assert round(0.7 * 13 * ranks) <= config.num_tables <= round(1.3 * 13 * ranks)
        assert config.embedding_dim in DIMS and config.bottom_mlp[-1] == config.embedding_dim
        assert all(ROWS[0] <= rows <= ROWS[1] for rows in config.rows_per_table)
        assert all(POOLING[0] <= pooling <= POOLING[1] for pooling in config.lookups_per_table)
        assert 4 * config.embedding_dim * sum(config.rows_per_table) <= 1.01 * ranks * MEMORY_BYTES
        assert len(set(task.batch_sizes)) == 2 and all(ranks * size in BATCHES for size in task.batch_sizes)
        assert config.top_mlp[-1] == 1 and list(config.top_mlp) == sorted(config.top_mlp, reverse=True)


def test_every_kind_of_task_is_drawn():
    tasks = draw_dlrms(40, seed=0)
    assert {task.config.interaction for task in tasks} == {"dot", "cat"}
    assert {task.config.embedding_dim for task in tasks} == set(DIMS)
    accesses = [parse_access(text) for task in tasks for text in task.config.access]
    assert 0.1 < sum(isinstance(access, Uniform) for access in accesses) / len(accesses) < 0.4


@pytest.mark.parametrize(
    ("count", "seed", "message"),
    [
        (0, 0, "0 random DLRMs; give an integer from 1 to 10000"),
        (10_001, 0, "10001 random DLRMs; give an integer from 1 to 10000"),
        (1, -1, "seed -1; give an integer, 0 or more"),
    ],
)
def test_senseless_numbers_are_refused(count, seed, message):
    with pytest.raises(TraincastError, match=message):
        draw_dlrms(count, seed=seed)
