"""Recommenders by their description: tables, their widths and lookups, MLPs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from traincast.errors import TraincastError
from traincast.questions.dlrm_file import MAX_LAYERS, MAX_LOOKUPS, MAX_ROWS, MAX_TABLES, MAX_WIDTH
from traincast.what_if.edits.registry import Value, edit
from traincast.what_if.scene import Scene

_MOST_DIM = 1 << 16


def _described(scene: Scene, **changes: Any) -> Scene:
    return replace(scene, dlrm=replace(scene.of_dlrm(), **changes))


@edit("embedding-dim", "width of all embedding tables", takes="N", risk="accuracy: another model")
def embedding_dim(scene: Scene, value: Value) -> Scene:
    """Tables of another width; where features are multiplied with each other, the bottom MLP ends at it too."""
    config, dim = scene.of_dlrm(), value.whole(most=_MOST_DIM)
    bottom = config.bottom_mlp
    if bottom[-1] == config.embedding_dim:
        bottom = (*bottom[:-1], dim)
    return _described(scene, embedding_dim=dim, bottom_mlp=bottom)


@edit(
    "pooling", "lookups of a sample: N of every table, or xN times as many", takes="N|xN", risk="accuracy: other data"
)
def pooling(scene: Scene, value: Value) -> Scene:
    """Other numbers of lookups."""
    config = scene.of_dlrm()
    if value.text.startswith("x"):
        factor = value.factor()
        lookups = tuple(min(MAX_LOOKUPS, max(1, round(n * factor))) for n in config.lookups_per_table)
    else:
        lookups = (value.whole(most=MAX_LOOKUPS),) * config.num_tables
    return _described(scene, lookups_per_table=lookups)


@edit("tables", "number of tables: the last are dropped, or repeated", takes="N", risk="accuracy: another model")
def tables(scene: Scene, value: Value) -> Scene:
    """Fewer or more tables; more are copies of the present ones, in turn."""
    config, number = scene.of_dlrm(), value.whole(most=MAX_TABLES)

    def cut(entries: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(entries[i % len(entries)] for i in range(number)) if entries else ()

    return _described(
        scene,
        rows_per_table=cut(config.rows_per_table),
        lookups_per_table=cut(config.lookups_per_table),
        access=cut(config.access),
    )


@edit("rows", "rows of every table: N, or xN times as many", takes="N|xN", risk="accuracy: another hashing")
def rows(scene: Scene, value: Value) -> Scene:
    """Other heights of tables."""
    config = scene.of_dlrm()
    if value.text.startswith("x"):
        factor = value.factor(least=1e-6, most=1e6)
        heights = tuple(min(MAX_ROWS, max(1, round(n * factor))) for n in config.rows_per_table)
    else:
        heights = (value.whole(most=MAX_ROWS),) * config.num_tables
    if config.access and heights != config.rows_per_table:
        raise TraincastError(f"{config.name} says which rows are wanted; describe other rows in its file")
    return _described(scene, rows_per_table=heights)


@edit("mlp-width", "hidden layers of both MLPs N times as wide", takes="N", risk="accuracy: another model",
      excludes=("bottom-mlp", "top-mlp"))  # fmt: skip
def mlp_width(scene: Scene, value: Value) -> Scene:
    """Hidden widths scaled to multiples of eight; features, output and the width of embeddings stay."""
    config, factor = scene.of_dlrm(), value.factor()

    def scaled(width: int) -> int:
        return width if factor == 1 else min(MAX_WIDTH, max(8, round(width * factor / 8) * 8))

    bottom = config.bottom_mlp
    return _described(
        scene,
        bottom_mlp=(bottom[0], *map(scaled, bottom[1:-1]), bottom[-1]),
        top_mlp=(*map(scaled, config.top_mlp[:-1]), config.top_mlp[-1]),
    )


@edit(
    "bottom-mlp", "widths of the bottom MLP, from features to output", takes="N-N-...", risk="accuracy: another model"
)
def bottom_mlp(scene: Scene, value: Value) -> Scene:
    """Another bottom MLP."""
    config, widths = scene.of_dlrm(), _widths(value)
    if len(widths) < 2 or widths[0] != config.bottom_mlp[0]:
        first = config.bottom_mlp[0]
        raise TraincastError(f"{config.name} has {first} dense features; write {first}-...-{config.bottom_mlp[-1]}")
    return _described(scene, bottom_mlp=widths)


@edit("top-mlp", "widths of the top MLP after the interaction", takes="N-N-...-1", risk="accuracy: another model")
def top_mlp(scene: Scene, value: Value) -> Scene:
    """Another top MLP."""
    widths = _widths(value)
    if widths[-1] != 1:
        raise TraincastError(f"the top MLP ends in 1 (one click probability), not {widths[-1]}; write ...-1")
    return _described(scene, top_mlp=widths)


def _widths(value: Value) -> tuple[int, ...]:
    parts = value.text.split("-")
    if len(parts) > MAX_LAYERS:
        raise TraincastError(f"{len(parts)} layers are too many; give at most {MAX_LAYERS}")
    return tuple(Value(text=part, edit=value.edit).whole(most=MAX_WIDTH) for part in parts)
