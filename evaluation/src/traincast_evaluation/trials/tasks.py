"""Random DLRMs as the second paper draws its tasks, scaled from a GPU to a CPU thread."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from traincast.models.dlrm.config import DlrmConfig
from traincast.utils.errors import TraincastError

TABLES_PER_RANK = 13
"""The second paper's; a task has 0.7 to 1.3 times as many per rank."""
SPREAD = (0.7, 1.3)
DIMS = (16, 32, 64, 128)
ROWS = (1_000, 1_000_000)
"""The shortest and the tallest table; heights are drawn evenly between their logarithms."""
POOLING = (1, 40)
"""Lookups per sample, drawn as heights are; the paper's index data sets pool 1 to some hundred."""
BATCHES = (128, 256, 512, 1024)
"""Samples of all ranks together. The paper's 512 to 4096, a quarter of it: a step takes 5 to 300 ms of a CPU thread."""
MEMORY_BYTES = 768 << 20
"""Of all tables on a rank; the paper fills at most 80 % of a GPU, and a share of a common machine is less."""
UNIFORM_SHARE = 0.25  # of tables; the others follow Zipf's law
EXPONENTS = (0.6, 1.2)  # of Zipf's law, around what public index data sets show
BOTTOM_WIDTHS = (64, 128, 256, 512)
TOP_WIDTHS = (128, 256, 512, 1024)
DENSE_FEATURES = (13, 64, 256)
MAX_TASKS = 10_000
"""More than anyone would measure: a larger number is a mistake."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DlrmTask:
    """A DLRM to train with EmbeddingBags and SGD on `ranks` ranks, at each of `batch_sizes` samples per rank. `seed`
    draws what its lookups want."""

    name: str
    config: DlrmConfig
    batch_sizes: tuple[int, ...]
    ranks: int
    seed: int


def draw_dlrms(count: int, *, seed: int, ranks: int = 1, batches: int = 2) -> tuple[DlrmTask, ...]:
    """Tasks 0 to `count` - 1 of a seed: each the same whatever the count, at `batches` different batch sizes."""
    if not 1 <= count <= MAX_TASKS:
        raise TraincastError(f"{count} random DLRMs; give an integer from 1 to {MAX_TASKS}")
    if seed < 0:
        raise TraincastError(f"seed {seed}; give an integer, 0 or more")
    return tuple(_draw_dlrm(number, seed, ranks, batches) for number in range(count))


def _draw_dlrm(number: int, seed: int, ranks: int, batches: int) -> DlrmTask:
    random = np.random.default_rng((seed, ranks, number))
    tables = max(2, round(TABLES_PER_RANK * ranks * random.uniform(*SPREAD)))
    dim = int(random.choice(DIMS))
    rows = _limit_to_memory(_draw_log_uniform(random, ROWS, tables), dim, MEMORY_BYTES * ranks)
    pooling = _draw_log_uniform(random, POOLING, tables)
    access = tuple(_draw_access(random) for _ in range(tables))
    name = f"random-{seed}-{number}" if ranks == 1 else f"random-{seed}-{number}-on-{ranks}"
    config = DlrmConfig(
        name=name,
        bottom_mlp=(int(random.choice(DENSE_FEATURES)), *_draw_widths(random, BOTTOM_WIDTHS, (1, 3))[::-1], dim),
        top_mlp=(*_draw_widths(random, TOP_WIDTHS, (1, 4))[::-1], 1),
        rows_per_table=rows,
        embedding_dim=dim,
        lookups_per_table=pooling,
        interaction="dot" if random.random() < 0.5 else "cat",
        embedding="bag",
        index_dtype="int64",
        access=access,
    )
    # a rank looks up the samples of all ranks: as many in all
    sizes = sorted(int(size) // ranks for size in random.choice(BATCHES, size=batches, replace=False))
    config = replace(config, batch_size=sizes[0])
    return DlrmTask(name=name, config=config, batch_sizes=tuple(sizes), ranks=ranks, seed=int(random.integers(1 << 31)))


def _draw_log_uniform(random: np.random.Generator, limits: tuple[int, int], count: int) -> tuple[int, ...]:
    low, high = np.log(limits)
    return tuple(round(float(value)) for value in np.exp(random.uniform(low, high, count)))


def _limit_to_memory(rows: tuple[int, ...], dim: int, memory_bytes: float) -> tuple[int, ...]:
    """Heights lowered alike until all tables fit; fp32."""
    held = 4.0 * dim * sum(rows)
    shrink = min(1.0, memory_bytes / held)
    return tuple(max(ROWS[0], int(shrink * height)) for height in rows)


def _draw_access(random: np.random.Generator) -> str:
    if random.random() < UNIFORM_SHARE:
        return "uniform"
    return f"zipf:{random.uniform(*EXPONENTS):.2f}"


def _draw_widths(random: np.random.Generator, choices: tuple[int, ...], layers: tuple[int, int]) -> tuple[int, ...]:
    """Widths of hidden layers, growing."""
    count = int(random.integers(layers[0], layers[1] + 1))
    return tuple(sorted(int(width) for width in random.choice(choices, size=count)))
