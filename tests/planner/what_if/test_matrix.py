"""Every edit on some models and some edits on every model; `scripts/check_edits.py` does all of both."""

from __future__ import annotations

import pytest

from tests.planner.what_if.matrix import MACHINE, VALUES, check_edit, drawn, models, texts
from traincast.planner.what_if.edits.registry import list_edits

WHOLE = ("dlrm-ddp", "din", "mpt-125m laid out")
"""Small models that every edit is tried on; together with the few below, each edit applies to one of them."""
ELSEWHERE = {"attention=sdpa": "bert-large", "program=torchrec-pipelined": "dlrm-ddp", "seq-len=64": "bert-large",
             "checkpoint=layers": "bert-large",
             "bucket-mb=4": "vgg13", "overlap=none": "vgg13", "bottom-mlp=512-256-64": "dlrm-default"}  # fmt: skip

BESIDE_OTHERS = {"checkpoint-every", "checkpoint-layers", "costs", "cp-exchange", "dense", "dispatch", "ep",
                 "expert-imbalance", "graph-modules", "fp8-gather", "fp8-scaling", "lora-base", "lora-targets",
                 "no-reshard", "schedule", "seed", "shard-group", "stage-layers", "vp", "workers"}  # fmt: skip
"""Fields that mean something only beside others (`dispatch` beside `ep`), or that name a file."""


@pytest.fixture(scope="module")
def reasons():
    """Why not, by model and edit."""
    return {model: {text: check_edit(model, text) for text in texts(model) if text != "plan=search"} for model in WHOLE}


def test_every_edit_gives_a_sound_step_or_says_why_not(reasons):
    applied = {text.partition("=")[0].partition(":")[0] for said in reasons.values() for text in said if not said[text]}
    for text, model in ELSEWHERE.items():
        assert check_edit(model, text) == ""
        applied.add(text.partition("=")[0])
    missing = set(list_edits()) - applied
    assert missing == {"plan"} | BESIDE_OTHERS, "the search for plans takes seconds and has tests of its own"


def test_edits_of_the_machine_apply_to_every_step_of_ops(reasons):
    for model in ("dlrm-ddp", "din"):
        assert not any(reason for text, reason in reasons[model].items() if text.partition("=")[0] in MACHINE)


@pytest.mark.parametrize("model", sorted(set(models()) - set(WHOLE)))
def test_edits_drawn_for_every_model(model):
    for text in drawn(model, 1, seed=1):
        check_edit(model, text)


def test_the_lists_are_whole():
    assert len(models()) > 60 and len(set(models())) == len(models())
    assert {name for name, edit in list_edits().items() if edit.takes} <= set(VALUES)
