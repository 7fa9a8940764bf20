"""The declaration of a scenario: every field has its words, its range and its default, and bad values are rejected."""

from __future__ import annotations

import msgspec
import pytest

from traincast.simulator.scenario.kinds import USED
from traincast.simulator.scenario.resolved import make_scenario, read_scenario
from traincast.simulator.scenario.scenario import GROUPS, Scenario, list_scenario_fields
from traincast.utils.errors import TraincastError

FIELDS = list(list_scenario_fields().values())


@pytest.mark.parametrize("info", FIELDS, ids=lambda info: info.name)
def test_every_field_has_a_group_help_and_range(info):
    assert info.group in GROUPS and info.help
    assert info.kind in ("integer", "number", "flag", "choice", "text")
    if info.kind in ("integer", "number"):
        assert info.least <= info.most < float("inf")
    if info.kind != "flag" and info.name not in ("workload", "on"):
        assert info.default, "help says what stands for a value that is not given"
    assert any(info.name in used for used in USED.values()), "no kind of step uses it"
    assert set(info.needs) <= set(list_scenario_fields())


def test_a_scenario_has_a_json_schema_with_all_its_fields():
    properties = msgspec.json.schema(Scenario)["$defs"]["Scenario"]["properties"]
    assert list(properties) == list(list_scenario_fields())
    assert properties["tp"]["anyOf"][0]["minimum"] == 1


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"batch_size": 0}, "`batch_size` 0 is out of range; give 1 to"),
        ({"batch_size": 2.5}, "give an integer"),
        ({"gpus": True}, "give an integer"),
        ({"clock_mhz": float("nan")}, "give a number"),
        ({"dtype": "fp31"}, "unknown dtype 'fp31'. Did you mean fp32"),
        ({"compiled": 1}, "give true or false"),
        ({"zero": 4}, "Choose from 1, 2, 3"),
        ({"batchsize": 4}, "unknown keyword 'batchsize'. Did you mean batch_size"),
    ],
)
def test_values_that_a_field_cannot_have_are_rejected(values, said):
    with pytest.raises(TraincastError, match=said):
        make_scenario(values)


@pytest.mark.parametrize("info", FIELDS, ids=lambda info: info.name)
def test_text_is_read_as_the_value_that_python_takes(info):
    text = {"integer": "3", "number": "1.5", "flag": "1", "text": "x"}.get(info.kind, str((*info.choices, "")[0]))
    value = info.parse(text)
    assert getattr(make_scenario({info.name: value}), info.name) == value
    assert str(value) == text or value is True


def test_kernels_have_one_default_and_flags_that_contradict_are_rejected():
    assert Scenario().launches == "eager"
    assert Scenario(compiled=True).launches == Scenario(kernels="compiled").launches == "compiled"
    assert Scenario(cuda_graph=True).launches == "graph"
    with pytest.raises(TraincastError, match="contradict"):
        _ = Scenario(compiled=True, kernels="fused").launches


def test_a_file_has_fields_by_name(tmp_path):
    file = tmp_path / "scenario.yaml"
    file.write_text("workload: dlrm-v2\non: dgx-h100\ngpus: 8\nbatch-size: 4096\n")
    scenario = make_scenario(read_scenario(file))
    assert scenario == Scenario(workload="dlrm-v2", on="dgx-h100", gpus=8, batch_size=4096)
    file.write_text("workload: dlrm-v2\nbatches: 3\n")
    with pytest.raises(TraincastError, match=r"scenario.yaml: unknown field 'batches'. Did you mean batch_size"):
        read_scenario(file)
    file.write_text("[1, 2]")
    with pytest.raises(TraincastError, match="not a scenario"):
        read_scenario(file)
