"""One question has one result: the command line, Python and the server give the same document for the same scenario."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

import traincast
from traincast.app.cli.main import main
from traincast.app.server.fields import parse_document
from traincast.app.server.responses import make_result_bytes
from traincast.simulator.prediction.document import PredictionDocument, make_document_schema
from traincast.simulator.scenario.resolved import format_predict_command, make_scenario
from traincast.simulator.scenario.scenario import list_scenario_fields

ASKED: list[dict[str, Any]] = [
    {"workload": "dlrm-default", "on": "v100"},
    {"workload": "dlrm-v2", "on": "dgx-h100", "gpus": 8, "batch_size": 2048},
    {"workload": "resnet50", "on": "dgx-a100", "gpus": 4, "batch_size": 8},
    {"workload": "vgg13", "on": "a100-80gb", "dtype": "bf16", "compiled": True},
    {"workload": "bert-large", "on": "h100", "batch_size": 2, "attention": "sdpa"},
    {"workload": "gpt2-large", "on": "a100-80gb", "batch_size": 1, "loader_ms": 5.0, "workers": 1},
    {"workload": "llama3-8b", "on": "dgx-h100", "gpus": 8, "tp": 2, "fsdp": 2},
    {"workload": "llama3-8b", "on": "dgx-h100", "batch_size": 1, "seq_len": 1024},
    {"workload": "mpt-1b", "on": "dgx-a100", "gpus": 16, "zero": 1, "micro_batch": 2, "kernels": "fused"},
    {"workload": "mixtral-8x7b", "on": "dgx-h100", "gpus": 32, "ep": 8, "pp": 4, "checkpoint": "full"},
]
"""2 DLRMs, 2 CNNs and Transformers, with and without fields of parallelism."""


def by_command_line(capsys, values):
    line = format_predict_command(make_scenario(values)).split()[1:]
    assert main([*line, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def by_server(values):
    asked = parse_document(values)
    return json.loads(make_result_bytes(asked.text, "answer", {}, lambda _: None))


@pytest.mark.parametrize("values", ASKED, ids=lambda values: f"{values['workload']}-{values.get('gpus', 1)}")
def test_command_line_python_and_server_give_one_document(capsys, values):
    # given a scenario, when it is asked for in all three ways
    told = by_command_line(capsys, values)

    # then all give the same document
    python = json.loads(json.dumps(traincast.predict(**values).to_dict(), allow_nan=False))
    assert python == told == by_server(values)

    # which is of the schema, says why parts are missing, and holds the settings that were used
    msgspec.convert(told, PredictionDocument)
    assert list(told) == list(PredictionDocument.__struct_fields__)
    assert set(told["reasons"]) == {name for name, value in told.items() if value is None}
    assert set(told["scenario"]) == set(list_scenario_fields())
    assert {name: told["scenario"][name] for name in values} == values


@pytest.mark.parametrize("values", ASKED[::3], ids=lambda values: values["workload"])
def test_a_scenario_file_is_the_same_as_options(capsys, tmp_path, values):
    file = tmp_path / "scenario.yaml"
    file.write_text(json.dumps(values))
    assert main(["predict", "--file", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == by_command_line(capsys, values)


GPUS = ("v100", "a100-80gb", "h100", "b200", "mi300x")
_BATCH = {"dlrm-default": 2048, "dlrm-mlperf": 2048, "resnet50": 32, "vgg13": 16, "bert-large": 4, "gpt2-large": 1}
_CAPTURED = {"gpus": 1, "dtype": "fp32", "mode": "training", "kernels": "eager"}
_LAID_OUT = {
    "gpus": 1, "dtype": "bf16", "mode": "training", "kernels": "eager", "optimizer": "adam", "optimizer_impl": "fused",
    "attention": "sdpa", "tp": 1, "pp": 1, "vp": 1, "cp": 1, "ep": 1, "etp": 1, "micro_batch": 1, "global_batch": 1,
    "checkpoint": "none", "checkpoint_every": 1, "schedule": "1f1b",
}  # fmt: skip
DEFAULTS: dict[str, dict[str, Any]] = {
    "dlrm-default": _CAPTURED, "dlrm-mlperf": _CAPTURED,
    **{name: {**_CAPTURED, "micro_batch": _BATCH[name], "global_batch": _BATCH[name]}
       for name in ("resnet50", "vgg13", "bert-large", "gpt2-large")},
    "llama3-8b": _LAID_OUT, "mpt-1b": _LAID_OUT,
}  # fmt: skip
"""2 DLRMs, 2 CNNs and 4 Transformers (two captured, two described), with every default that their kind of step has."""


@pytest.mark.parametrize("on", GPUS)
@pytest.mark.parametrize("model", DEFAULTS)
def test_eight_models_on_five_gpus_take_the_same_milliseconds_however_they_are_asked_for(capsys, model, on):
    # given a model on a GPU, and the same with all defaults of parallelism and program spelt out
    plain: dict[str, Any] = {"workload": model, "on": on}
    plain |= {"batch_size": _BATCH[model]} if model in _BATCH else {"seq_len": 2048}
    spelt = {**plain, **DEFAULTS[model]}
    if "micro_batch" in spelt:
        spelt.pop("batch_size", None)

    # then command line, Python and server give the same milliseconds for both
    milliseconds = {1e3 * traincast.predict(**values).iteration for values in (plain, spelt)}
    milliseconds |= {by_command_line(capsys, values)["iteration_ms"] for values in (plain, spelt)}
    assert milliseconds == {by_server(spelt)["iteration_ms"]}


@pytest.mark.parametrize("model", ["llama3-8b", "mixtral-8x7b", "qwen3-8b"])
def test_defaults_of_parallelism_given_are_defaults_left_out(model):
    plain = traincast.predict(model, on="dgx-h100", gpus=8, seq_len=2048)
    spelt = traincast.predict(model, on="dgx-h100", seq_len=2048, **{**_LAID_OUT, "gpus": 8, "global_batch": 8})
    assert plain.iteration == spelt.iteration and plain.to_dict()["memory_gb"] == spelt.to_dict()["memory_gb"]


def test_what_ifs_and_sweeps_begin_at_the_same_step():
    values = ASKED[6]
    step = traincast.predict(**values)
    changed = traincast.whatif(edits=["link-speed=1"], **values)
    swept = traincast.sweep(vary={"tp": [2]}, processes=1, **values)
    assert changed.before.iteration == step.iteration == changed.after.iteration
    assert swept.rows[0]["iteration_ms"] == 1e3 * step.iteration
    assert swept.to_dict()["rows"][0]["prediction"] == step.to_dict()
    side = changed.to_dict()["before"]
    assert side["prediction"] == step.to_dict()


def test_the_schema_describes_every_key():
    (name,) = (part.rpartition("/")[2] for part in [make_document_schema()["$ref"]])
    properties = make_document_schema()["$defs"][name]["properties"]
    assert list(properties) == list(PredictionDocument.__struct_fields__)
    for key, described in properties.items():
        kinds = [described, *described.get("anyOf", [])]
        assert any(kind.get("description") for kind in kinds), key
