"""Transformers by their description, and how they are distributed over GPUs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

from traincast.planner.what_if.edits.registry import Trial, Value, register_edit
from traincast.simulator.scenario.layouts import SHARDING
from traincast.simulator.scenario.resolved import Resolved
from traincast.simulator.scenario.scenario import Checkpoint

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
