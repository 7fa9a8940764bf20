"""Every public call: its type, its units, the same document as the command line, a short repr and escaped HTML."""

from __future__ import annotations

import importlib.util
import inspect
import json
import subprocess
import sys
import typing

import pytest

import traincast
import traincast.simulator.scenario.scenario as scenario_module
from traincast.app import keywords as keywords_module
from traincast.app.cli.main import main
from traincast.app.cli.registry import VERBS
from traincast.app.keywords import ScenarioFields
from traincast.ir.workload import Workload
from traincast.planner.sharding.result import ShardingResult
from traincast.simulator.prediction.result import Prediction
from traincast.simulator.scenario.catalog import Exported, ModelList, PlatformList, list_built_in_models
from traincast.simulator.scenario.scaling import ScalingCurve
from traincast.simulator.scenario.scenario import list_scenario_fields
from traincast.traces.replay.results import TraceReport
from traincast.utils.errors import TraincastError

STEP = """
import torch
def make_step(batch):
    layer = torch.nn.Linear(64, 8, device="cuda")
    return lambda: layer(torch.ones(batch, 64, device="cuda")).sum().backward()
"""


def document(capsys, *arguments):
    assert main([*map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def plain(result):
    """The result's document, which must be JSON as it stands."""
    text = json.dumps(result.to_dict(), allow_nan=False)
    assert json.loads(text) == result.to_dict()
    return result.to_dict()


def check_shown(result, *, starts):
    """A short repr, and HTML whose text is that of the repr."""
    lines = repr(result).splitlines()
    assert lines[0].startswith(starts)
    assert len(lines) <= 12
    html = result._repr_html_()
    assert html.startswith("<p>")
    assert "<script" not in html


def test_prediction_is_that_of_the_command_line(capsys):
    result = traincast.predict("dlrm-default", on="v100", batch_size=512, dtype="tf32", clock_mhz=1297)

    assert isinstance(result, Prediction)
    asked = ("--batch-size", 512, "--dtype", "tf32", "--clock-mhz", 1297)
    assert plain(result) == document(capsys, "predict", "dlrm-default", "--on", "v100", *asked)
    assert result.to_dict()["iteration_ms"] == 1e3 * result.iteration
    check_shown(result, starts="Prediction: dlrm-default (training) on Tesla V100-SXM2-16GB, SM clock locked")


def test_prediction_on_many_gpus_is_that_of_the_command_line(capsys):
    result = traincast.predict("dlrm-default", on="dgx-a100", gpus=4, batch_size=256, skew_ms=1.0, seed=3)

    asked = ("--gpus", 4, "--batch-size", 256, "--skew-ms", 1, "--seed", 3)
    assert plain(result) == document(capsys, "predict", "dlrm-default", "--on", "dgx-a100", *asked)
    assert result.gpus == 4


def test_prediction_has_frames_with_units():
    frames = traincast.predict("resnet50", on="dgx-a100", gpus=2, batch_size=8).frames()

    kernel_time = {"families", "phases", "sources", "modules", "layers", "ops"}
    assert set(frames) == kernel_time | {"memory", "critical_path", "ranks"}
    assert frames["families"].columns == ["family", "ms"]
    assert frames["memory"].columns == ["kind", "gb"]
    assert frames["ranks"]["ranks"].to_list() == ["ranks 0, 1"]
    assert {"iteration_ms", "waiting_ms", "memory_gb"} <= set(frames["ranks"].columns)


def test_families_of_a_frame_add_up_to_the_active_time():
    result = traincast.predict("dlrm-default", on="v100", batch_size=512)

    assert result.frames()["families"]["ms"].sum() == pytest.approx(1e3 * result.device_active)


def test_names_in_html_are_escaped():
    workload = traincast.load("resnet50")
    named = Workload(name="<b>net</b>", programs=workload.programs)

    html = traincast.predict(named, on="v100", batch_size=2)._repr_html_()

    assert "&lt;b&gt;net&lt;/b&gt; (training)" in html
    assert "<b>" not in html


def test_scaling_curve_is_that_of_the_command_line(capsys):
    result = traincast.scaling("vgg13", on="dgx-a100", gpus=(2, 1, 4), kind="strong", batch_size=32)

    assert isinstance(result, ScalingCurve)
    asked = ("--gpus", "1,2,4", "--scaling", "strong", "--batch-size", 32)
    assert plain(result) == document(capsys, "predict", "vgg13", "--on", "dgx-a100", *asked)
    assert [point.answer.workload.batch_size for point in result.points] == [32, 16, 8]
    assert result.frames()["points"]["gpus"].to_list() == [1, 2, 4]
    check_shown(result, starts="ScalingCurve: vgg13 (training) on NVIDIA A100-SXM4-40GB: strong scaling")
    assert repr(result).splitlines()[1].startswith("1 GPU: ")


def test_sharding_is_that_of_the_command_line(capsys, tmp_path):
    tables = tmp_path / "tables.yaml"
    tables.write_text("tables:\n  - {name: user, rows: 2000000, dim: 64}\n  - {name: <item>, rows: 500000, dim: 64}\n")
    result = traincast.shard(tables, on="dgx-a100", gpus=2, batch_size=256, torchrec=False)

    assert isinstance(result, ShardingResult)
    told = document(capsys, "shard", tables, "--on", "dgx-a100", "--gpus", 2, "--batch-size", 256, "--no-torchrec")
    assert plain(result) | {"seconds": 0} == told | {"seconds": 0}
    assert result.to_dict()["iteration_ms"] == 1e3 * result.best.seconds
    frames = result.frames()
    assert frames["plans"]["name"].to_list() == [plan.name for plan in result.plans]
    assert frames["ranks"]["rank"].to_list() == [0, 1]
    assert frames["tables"].columns == ["table", "gb", "kind", "kernel", "ranks"]
    assert "&lt;item&gt;" in result._repr_html_()
    check_shown(result, starts="ShardingResult: 2 tables, ")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"time_limit": -1.0}, "`time_limit=-1`; give seconds, 0 or more"),
        ({"seed": -3}, "`seed=-3`; give an integer, 0 or more"),
        ({"gpus": 0}, "`gpus=0`; give an integer from 1 to 1024"),
    ],
)
def test_sharding_refuses_what_makes_no_sense(wrong, said):
    with pytest.raises(TraincastError, match=said):
        traincast.shard("mlperf-dlrm", **{"on": "dgx-a100", "gpus": 2, **wrong})


@pytest.fixture(scope="module")
def built_in():
    """The built-in models, read once for all that is asked of them."""
    return list_built_in_models()


@pytest.fixture
def read_once(built_in, monkeypatch):
    monkeypatch.setattr("traincast.simulator.scenario.catalog.list_built_in_models", lambda: built_in)


def test_models_are_those_of_the_command_line(capsys, read_once):
    result = traincast.list_models()

    assert isinstance(result, ModelList)
    assert plain(result) == document(capsys, "models")
    assert result[0].info.name == "dlrm-default"
    assert result[0].workload.batch_size == result.to_dict()[0]["batch_size"]
    assert result.frames()["models"].height == len(result)
    check_shown(result, starts=f"ModelList: {len(result)} built-in models")


def test_coverage_is_that_of_the_command_line(capsys, read_once):
    result = traincast.list_models().coverage()

    assert plain(result) == document(capsys, "models", "--coverage")
    assert repr(result).startswith(f"CoverageList: {len(result)} ops of models, ")
    assert result.frames()["ops"].columns == ["model", "op", "count", "kernels", "lowered"]


def test_platforms_are_those_of_the_command_line(capsys):
    result = traincast.list_platforms()

    assert isinstance(result, PlatformList)
    assert plain(result) == document(capsys, "platforms")
    frame = result.frames()["platforms"]
    assert frame.filter(frame["platform"] == "v100")["fp32_tflops"].to_list() == [
        next(row["peak_tflops"]["fp32"] for row in result.to_dict() if row["platform"] == "v100")
    ]
    check_shown(result, starts=f"PlatformList: {len(result)} built-in platforms")


@pytest.mark.parametrize("to", ["pytorch", "chakra"])
def test_export_is_that_of_the_command_line(capsys, tmp_path, to):
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    result = traincast.export("resnet50", ours, to=to, batch_size=4)

    assert isinstance(result, Exported)
    told = document(capsys, "export", "resnet50", "-o", theirs, "--to", to, "--batch-size", 4)
    assert plain(result) == told | {"file": str(ours)}
    assert ours.read_bytes() == theirs.read_bytes()
    check_shown(result, starts=f"Exported: {ours}: {result.ops} ops of resnet50 as a {to} execution trace")


def test_an_unknown_format_is_refused(tmp_path):
    with pytest.raises(TraincastError, match="unknown format 'onnx'"):
        traincast.export("resnet50", tmp_path / "out", to="onnx")


def test_capture_is_that_of_the_command_line(capsys, tmp_path):
    pytest.importorskip("torch")
    script, file = tmp_path / "step.py", tmp_path / "mine.tc"
    script.write_text(STEP)
    result = traincast.capture(f"{script}:make_step", batch_size=16, out=file)

    assert isinstance(result, Workload)
    told = document(capsys, "capture", f"{script}:make_step", "-o", tmp_path / "other.tc", "--batch-size", 16)
    assert plain(result) == {name: value for name, value in told.items() if name != "file"}
    assert traincast.predict(file, on="v100").iteration == traincast.predict(result, on="v100").iteration
    check_shown(result, starts="Workload: step (training)")


def test_capture_takes_a_function():
    torch = pytest.importorskip("torch")

    def small_step(batch):
        return lambda: torch.ones(batch, 4, device="cuda") + 1

    result = traincast.capture(small_step, batch_size=8)

    assert (result.name, result.batch_size) == ("small_step", 8)
    assert result.frames()["ops"]["op"].to_list() == ["aten::ones", "aten::add"]


def test_a_trace_is_that_of_the_command_line(capsys, shared_data):
    file = shared_data / "traces" / "tracelens_h100" / "bert_small.json.gz"
    result = traincast.trace(file, on="t4")

    assert isinstance(result, TraceReport)
    assert plain(result) == document(capsys, "trace", file, "--on", "t4")
    assert {"steps", "kernels", "prediction"} <= set(result.frames())
    check_shown(result, starts="TraceReport: ")


def test_a_traced_step_is_a_workload(shared_data):
    file = shared_data / "traces" / "tracelens_h100" / "bert_small.json.gz"

    workload = traincast.load_trace(file)

    assert workload.name == "bert_small"
    assert traincast.predict(workload, on="h100").iteration > 0


@pytest.mark.parametrize("options", [{"host": "server-2022"}, {"host_scale": 2.0}])
def test_a_host_belongs_to_a_prediction(options):
    with pytest.raises(TraincastError, match="`host` and `host_scale` belong to a prediction: add `on`"):
        traincast.trace("nowhere.json", **options)


def test_load_gives_the_variant_asked_for():
    workload = traincast.load("bert-large", batch_size=2, seq_len=64, mode="inference")

    assert (workload.batch_size, workload.seq_len, workload.mode) == (2, 64, "inference")


def test_an_unknown_keyword_names_the_nearest():
    with pytest.raises(TraincastError, match=r"unknown keyword 'batchsize'. Did you mean batch_size"):
        traincast.predict("resnet50", on="v100", batchsize=8)


def test_keywords_are_the_fields_of_a_scenario():
    keywords = typing.get_type_hints(ScenarioFields, None, {**vars(keywords_module), **vars(scenario_module)})
    assert {"workload", "on", *keywords} == set(list_scenario_fields())


def test_types_are_there_when_they_are_named():
    scenario = traincast.Scenario(workload="vgg13", on="v100", batch_size=2)
    assert isinstance(traincast.predict("vgg13", on="v100", batch_size=2), traincast.Prediction)
    assert scenario.given() == {"workload": "vgg13", "on": "v100", "batch_size": 2}
    with pytest.raises(AttributeError, match="nothing"):
        _ = traincast.nothing


def test_every_verb_is_a_call_and_no_module_has_its_name():
    calls = {*traincast.__all__} - {"__version__"}
    other_names = {
        "fit": "fit_store", "report": "write_report", "models": "list_models", "platforms": "list_platforms"
    }  # fmt: skip
    of_the_terminal = {"mcp", "completion", "serve"}
    assert {other_names.get(command, command) for command in VERBS} - of_the_terminal <= calls
    for name in calls - {"callbacks"}:  # a namespace of classes, one per trainer
        assert callable(getattr(traincast, name))
        assert getattr(traincast, name).__doc__
        assert importlib.util.find_spec(f"traincast.{name}") is None


def test_importing_costs_little():
    code = (
        "import sys, traincast\n"
        "print([name for name in ('numpy', 'torch', 'polars', 'yaml', 'argparse') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_calls_name_their_keywords_and_the_module_what_it_offers():
    assert {"batch_size", "dtype", "gpus", "fsdp"} <= set(inspect.signature(traincast.predict).parameters)
    assert set(dir(traincast)) == set(traincast.__all__)
    changed = traincast.whatif("resnet50", ["dtype=fp16"], on="v100", power_limit_w=200)
    assert changed.cost_before.watts == 200


def test_a_step_of_one_gpu_loads_neither_planner_nor_writers_of_steps():
    code = (
        "import sys; from traincast.app.cli.main import main\n"
        "main(['predict', 'dlrm-mlperf', '--on', 'v100', '--json'])\n"
        "ours = [name.split('.', 1)[1] for name in sys.modules if name.startswith('traincast.')]\n"
        "unused = ('planner', 'traces', 'calibration', 'capturing', 'simulator.parallelism', 'models.transformers')\n"
        "print([name for name in ours if name.startswith(unused)], len(ours) < 130)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[] True"
