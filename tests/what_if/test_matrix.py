"""Edits on built-in models: a slice here; scripts/check_edits.py goes through all of them."""

from __future__ import annotations

import pytest

from tests.what_if.matrix import check_edit, models, texts

SMALL = ("dlrm-default", "dlrm-ddp", "dlrm-v2", "din", "wide-deep", "vgg13", "nvidia-dlrm")


@pytest.mark.parametrize("model", SMALL)
def test_every_edit_gives_a_sound_step_or_says_why_not(model):
    # given a model and every edit but the search for plans, which takes seconds
    wanted = [text for text in texts() if text != "plan=search"]

    # when each is applied
    reasons = {text: check_edit(model, text) for text in wanted}

    # then those of hardware work on every model, and the others have told why where they do not
    assert not any(reasons[text] for text in ("on=a100-80gb", "host-speed=2", "memory-speed=2", "speed:gemm=2"))
    assert sum(not reason for reason in reasons.values()) >= 12


def test_the_list_of_models_is_whole():
    assert len(models()) > 30 and len(set(models())) == len(models())
