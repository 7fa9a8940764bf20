"""Models by their description: tables and MLPs of recommenders, sizes of Transformers and how they are distributed over
GPUs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, get_args

from traincast.models.dlrm.config import DlrmConfig
from traincast.models.embeddings.access import Uniform, format_access
from traincast.planner.what_if.edits.registry import Trial, Value, register_edit
from traincast.simulator.scenario.dlrm_file import MAX_LAYERS, MAX_LOOKUPS, MAX_ROWS, MAX_TABLES, MAX_WIDTH
from traincast.simulator.scenario.layouts import SHARDING
from traincast.simulator.scenario.resolved import Resolved
from traincast.simulator.scenario.scenario import Checkpoint
from traincast.utils.errors import TraincastError, make_unknown_error

if TYPE_CHECKING:
    from fractions import Fraction


_MOST_DIM = 1 << 16


_UNIFORM = format_access(Uniform())


def _change_description(resolved: Resolved, **changes: Any) -> Resolved:
    """The step with another description; tables with lookups of their own each say that they want all rows alike."""
    config = replace(resolved.of_dlrm(), **changes)
    if not config.access and len(set(config.lookups_per_table)) > 1:
        config = replace(config, access=(_UNIFORM,) * config.num_tables)
    return replace(resolved, dlrm=config)


def _holds_ops(resolved: Resolved) -> bool:
    """Whether a step has ops and no description of tables."""
    return resolved.dlrm is None and resolved.source in ("workload", "model")


@register_edit("embedding-dim", "width of all embedding tables", takes="N", risk="accuracy: another model")
def change_embedding_dim(resolved: Resolved, value: Value) -> Resolved:
    """Tables of another width; where features are multiplied with each other, the bottom MLP ends at it too."""
    config, dim = resolved.of_dlrm(), value.whole(most=_MOST_DIM)
    bottom = config.bottom_mlp
    if bottom[-1] == config.embedding_dim:
        bottom = (*bottom[:-1], dim)
    return _change_description(resolved, embedding_dim=dim, bottom_mlp=bottom)


@register_edit(
    "pooling", "lookups of a sample: N of every table, or xN times as many", takes="N|xN", risk="accuracy: other data"
)
def change_pooling(resolved: Resolved, value: Value) -> Resolved:
    """Other numbers of lookups."""
    change = _parse_change(value, MAX_LOOKUPS)
    if _holds_ops(resolved):
        from traincast.transforms.table_edits import set_lookups  # only captures need it

        return resolved.edited(f"pooling={value.text}", lambda step: set_lookups(step, change))
    return _change_description(resolved, lookups_per_table=tuple(map(change, resolved.of_dlrm().lookups_per_table)))


def _parse_change(
    value: Value, most: int, *, least: float = 0.01, largest: float = 100.0
) -> Callable[[Fraction | int], int]:
    """What makes a new number of an old one: N, or xN times it."""
    if value.text.startswith("x"):
        factor = value.factor(least=least, most=largest)
        return lambda old: min(most, max(1, round(old * factor)))
    number = value.whole(most=most)
    return lambda _: number


@register_edit(
    "tables", "number of tables: the last are dropped, or repeated", takes="N", risk="accuracy: another model"
)
def change_tables(resolved: Resolved, value: Value) -> Resolved:
    """Fewer or more tables; more are copies of the present ones, in turn."""
    config, number = resolved.of_dlrm(), value.whole(most=MAX_TABLES)

    def cut(entries: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(entries[i % len(entries)] for i in range(number)) if entries else ()

    return _change_description(
        resolved,
        rows_per_table=cut(config.rows_per_table),
        lookups_per_table=cut(config.lookups_per_table),
        access=cut(config.access),
    )


@register_edit("drop-table", "tables left out: by number from 0 or name (table3; of captures a module), several with +",
      takes="TABLE[+TABLE...]", excludes=("tables",), risk="accuracy: another model")  # fmt: skip
def drop_table(resolved: Resolved, value: Value) -> Resolved:
    """Chosen tables less."""
    if _holds_ops(resolved):
        from traincast.transforms.table_edits import drop_tables  # only captures need it

        return resolved.edited(f"drop-table={value.text}", lambda step: drop_tables(step, value.text.split("+")))
    config = resolved.of_dlrm()
    gone = {_find_table_number(text, config) for text in value.text.split("+")}
    kept = [number for number in range(config.num_tables) if number not in gone]
    if not kept:
        raise TraincastError(f"{config.name} has {config.num_tables} tables, and one of them must stay")

    def left(entries: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(entries[number] for number in kept) if entries else ()

    return _change_description(
        resolved,
        rows_per_table=left(config.rows_per_table),
        lookups_per_table=left(config.lookups_per_table),
        access=left(config.access),
    )


def _find_table_number(text: str, config: DlrmConfig) -> int:
    from traincast.models.sharded_dlrm.step import TABLE_NAME, make_dlrm_tables  # only names of tables need them

    digits = text.strip().removeprefix(TABLE_NAME)
    if not (digits.isascii() and digits.isdecimal() and len(digits) <= 9):
        known = [table.name for table in make_dlrm_tables(config)]
        raise make_unknown_error(
            "table", text.strip(), known, f"Its tables are {known[0]} to {known[-1]}; or give a number."
        )
    if int(digits) >= config.num_tables:
        last = config.num_tables - 1
        raise TraincastError(f"{config.name} has tables 0 to {last}, not {int(digits)} (the nearest is {last})")
    return int(digits)


@register_edit("add-table", "one more table: its rows, and x its lookups of a sample", takes="ROWS[xLOOKUPS]",
      excludes=("tables",), risk="accuracy: another model")  # fmt: skip
def add_table(resolved: Resolved, value: Value) -> Resolved:
    """A table more, behind the others, as wide as they are; without LOOKUPS one of a sample."""
    first, _, second = value.text.partition("x")
    height = Value(text=first, edit=value.edit).whole(most=MAX_ROWS)
    lookups = Value(text=second or "1", edit=value.edit).whole(most=MAX_LOOKUPS)
    if _holds_ops(resolved):
        from traincast.transforms.table_edits import add_table  # only captures need it

        return resolved.edited(f"add-table={value.text}", lambda step: add_table(step, height, lookups))
    config = resolved.of_dlrm()
    return _change_description(
        resolved,
        rows_per_table=(*config.rows_per_table, height),
        lookups_per_table=(*config.lookups_per_table, lookups),
        access=(*config.access, _UNIFORM) if config.access else (),
    )


@register_edit("rows", "rows of every table: N, or xN times as many", takes="N|xN", risk="accuracy: another hashing")
def change_rows(resolved: Resolved, value: Value) -> Resolved:
    """Other heights of tables."""
    change = _parse_change(value, MAX_ROWS, least=1e-6, largest=1e6)
    if _holds_ops(resolved):
        from traincast.transforms.table_edits import set_row_counts  # only captures need it

        return resolved.edited(f"rows={value.text}", lambda step: set_row_counts(step, change))
    config = resolved.of_dlrm()
    row_counts = tuple(map(change, config.rows_per_table))
    if set(config.access) - {_UNIFORM} and row_counts != config.rows_per_table:
        raise TraincastError(f"{config.name} says which rows are wanted; describe other rows in its file")
    return _change_description(resolved, rows_per_table=row_counts)


@register_edit("mlp-width", "hidden layers of both MLPs N times as wide", takes="N", risk="accuracy: another model",
      excludes=("bottom-mlp", "top-mlp"))  # fmt: skip
def scale_mlp_width(resolved: Resolved, value: Value) -> Resolved:
    """Hidden widths scaled to multiples of eight; features, output and the width of embeddings stay."""
    config, factor = resolved.of_dlrm(), value.factor()

    def scaled(width: int) -> int:
        return width if factor == 1 else min(MAX_WIDTH, max(8, round(width * factor / 8) * 8))

    bottom = config.bottom_mlp
    return _change_description(
        resolved,
        bottom_mlp=(bottom[0], *map(scaled, bottom[1:-1]), bottom[-1]),
        top_mlp=(*map(scaled, config.top_mlp[:-1]), config.top_mlp[-1]),
    )


@register_edit(
    "bottom-mlp", "widths of the bottom MLP, from features to output", takes="N-N-...", risk="accuracy: another model"
)
def change_bottom_mlp(resolved: Resolved, value: Value) -> Resolved:
    """Another bottom MLP."""
    config, widths = resolved.of_dlrm(), _parse_widths(value)
    if len(widths) < 2 or widths[0] != config.bottom_mlp[0]:
        first = config.bottom_mlp[0]
        raise TraincastError(f"{config.name} has {first} dense features; write {first}-...-{config.bottom_mlp[-1]}")
    return _change_description(resolved, bottom_mlp=widths)


@register_edit(
    "top-mlp", "widths of the top MLP after the interaction", takes="N-N-...-1", risk="accuracy: another model"
)
def change_top_mlp(resolved: Resolved, value: Value) -> Resolved:
    """Another top MLP."""
    widths = _parse_widths(value)
    if widths[-1] != 1:
        raise TraincastError(f"the top MLP ends in 1 (one click probability), not {widths[-1]}; write ...-1")
    return _change_description(resolved, top_mlp=widths)


def _parse_widths(value: Value) -> tuple[int, ...]:
    parts = value.text.split("-")
    if len(parts) > MAX_LAYERS:
        raise TraincastError(f"{len(parts)} layers are too many; give at most {MAX_LAYERS}")
    return tuple(Value(text=part, edit=value.edit).whole(most=MAX_WIDTH) for part in parts)


_MOST_LAYERS, _MOST_WIDTH = 10_000, 1 << 20


def _get_description(resolved: Resolved, **changes: Any) -> Resolved:
    return replace(resolved, transformer=replace(resolved.of_transformer(), **changes))


@register_edit("layers", "number of layers of a described Transformer", takes="N", risk="accuracy: another model")
def change_layers(resolved: Resolved, value: Value) -> Resolved:
    """More or fewer layers."""
    return _get_description(resolved, layers=value.whole(most=_MOST_LAYERS))


@register_edit(
    "ffn", "width of the feed-forward layers of a described Transformer", takes="N", risk="accuracy: another model"
)
def change_ffn(resolved: Resolved, value: Value) -> Resolved:
    """Other feed-forward layers."""
    return _get_description(resolved, ffn=value.whole(most=_MOST_WIDTH))


@register_edit("vocab", "vocabulary of a described Transformer", takes="N", risk="accuracy: another tokenizer")
def change_vocab(resolved: Resolved, value: Value) -> Resolved:
    """Another vocabulary."""
    return _get_description(resolved, vocab=value.whole(most=1 << 24))


@register_edit(
    "sharding",
    "what data-parallel ranks share",
    takes="|".join(("none", *SHARDING.values())),
    trials=(Trial("zero1", "layouts", "all"), Trial("zero3", "layouts", "all")),
)
def change_sharding(resolved: Resolved, value: Value) -> Resolved:
    """Another sharding of optimizer, gradients, parameters."""
    names = {"none": None, **{name: number for number, name in SHARDING.items()}}
    number = names[value.choice(list(names))]
    return resolved.changed(zero=number, fsdp=None)


@register_edit(
    "recompute",
    "what backward computes again in a described Transformer",
    takes="|".join(get_args(Checkpoint)),
    excludes=("checkpoint",),
)
def change_recompute(resolved: Resolved, value: Value) -> Resolved:
    """Another selective recomputation."""
    return resolved.changed(checkpoint=value.choice(get_args(Checkpoint)))
