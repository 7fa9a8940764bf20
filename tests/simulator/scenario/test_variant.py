"""What can be asked of a workload, and what is refused."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest

from traincast.simulator.scenario.variant import (
    ATTENTIONS,
    DTYPES,
    EMBEDDINGS,
    MODES,
    OPTIMIZERS,
    Variant,
    check_held,
    variant_of,
)
from traincast.utils.errors import TraincastError


def test_the_default_variant_leaves_everything_to_the_workload():
    assert variant_of({}) == Variant()
    assert Variant().trains_eagerly


@pytest.mark.parametrize(
    ("name", "choices"),
    [
        ("dtype", DTYPES),
        ("mode", MODES),
        ("optimizer", OPTIMIZERS),
        ("attention", ATTENTIONS),
        ("embedding", EMBEDDINGS),
    ],
)
def test_every_choice_is_taken_and_others_are_refused(name, choices):
    for choice in choices:
        assert getattr(variant_of({name: choice}), name) == choice
    with pytest.raises(TraincastError, match=f"unknown {name} '{choices[-1]}x'. Did you mean .*{choices[-1]}"):
        variant_of({name: f"{choices[-1]}x"})


@pytest.mark.parametrize("options", [{"mode": "inference"}, {"mode": "inference", "compiled": True}])
def test_only_eager_training_can_be_sharded(options):
    assert not variant_of(options).trains_eagerly


def test_a_variant_is_a_value():
    with pytest.raises(FrozenInstanceError):
        Variant().dtype = "bf16"  # type: ignore[misc]
    assert hash(Variant(batch_size=3)) == hash(Variant(batch_size=3))


@pytest.mark.parametrize(
    ("variant", "said"),
    [
        (Variant(mode="inference"), r"mine.tc holds a step of training, not inference; capture it again for inference"),
        (Variant(optimizer="adam"), r"mine.tc holds its own optimizer; only `optimizer='none'` can change it"),
        (Variant(dtype="bf16"), r"capture it under autocast for bf16"),
        (Variant(attention="sdpa"), r"mine.tc keeps the ops .*; leave out `attention`, or capture the model with sdpa"),
        (Variant(embedding="bag"), r"mine.tc keeps the ops .*; leave out `embedding`, or capture the model with bag"),
    ],
)
def test_what_a_captured_step_holds_cannot_be_chosen(variant, said):
    with pytest.raises(TraincastError, match=said):
        check_held("mine.tc", "training", variant)


@pytest.mark.parametrize("variant", [Variant(mode="training", optimizer="none", dtype="tf32"), Variant(batch_size=2)])
def test_what_a_captured_step_can_still_be_asked_for(variant):
    check_held("mine.tc", "training", variant)
