"""Promise: an option that a step does not use is an error, never ignored."""

from __future__ import annotations

import pytest

from traincast.app.cli.main import main
from traincast.simulator.scenario.kinds import USED, check_used
from traincast.simulator.scenario.scenario import Scenario, list_scenario_fields
from traincast.utils.errors import TraincastError

UNUSED = [(kind, name) for kind, used in USED.items() for name in list_scenario_fields() if name not in used]
TRIES = len(UNUSED)
"""Fields of a scenario by the kinds of steps that do not use them."""


def _choose_value(name):
    info = list_scenario_fields()[name]
    if info.kind in ("integer", "number"):
        return (int if info.kind == "integer" else float)(max(info.least, 1))
    return {"flag": True, "choice": info.choices[-1] if info.choices else None, "text": "x"}[info.kind]


def _find_refusal(scenario, kind):
    try:
        check_used(scenario, kind)
    except TraincastError as error:
        return str(error)
    return ""


def test_every_field_is_used_or_refused():
    missed = []
    for kind, name in UNUSED:
        scenario = Scenario(workload="dlrm-ddp", on="v100").replace(**{name: _choose_value(name)})
        if _find_refusal(scenario, kind).startswith(f"`{name}` is not used here"):
            continue
        missed.append((kind, name))

    assert missed == []


@pytest.mark.parametrize("word", ["--batchsize", "--no-such-option"])
def test_a_word_that_is_no_option_is_refused(word, capsys):
    assert main(["predict", "dlrm-ddp", "--on", "v100", word, "3"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
