"""All options x all kinds of step: a field that is given is used, or it is an error that names it."""

from __future__ import annotations

import json

import pytest

import traincast
from traincast.app.cli.main import main
from traincast.models.catalog import load_model
from traincast.models.placement.plan import Placement, Plan, convert_plan_to_json
from traincast.simulator.scenario.kinds import KINDS, USED, check_used, choose_step_kind
from traincast.simulator.scenario.predict import predict
from traincast.simulator.scenario.resolved import resolve
from traincast.simulator.scenario.scenario import Scenario, list_scenario_fields
from traincast.utils.errors import TraincastError

TABLES = "tables:\n  - {name: user, rows: 2000000, dim: 64}\n  - {name: item, rows: 500000, dim: 64}\n"
PLAN = json.dumps(convert_plan_to_json(Plan(("user", "item"), (Placement.make_row_wise(2),) * 2, 2)))
VALUES = {
    "gpus": 2, "clock_mhz": 900.0, "power_limit_w": 150.0, "batch_size": 3, "seq_len": 64, "micro_batch": 3,
    "global_batch": 24,
    "dtype": "tf32", "fp8_scaling": "row", "mode": "training", "optimizer": "none", "optimizer_impl": "foreach",
    "attention": "eager",
    "embedding": "bag", "kernels": "compiled", "program": "torchrec-pipelined", "checkpoint": "full",
    "checkpoint_every": 2, "checkpoint_layers": 1, "expert_imbalance": 1.0, "tp": 2,
    "pp": 2, "vp": 2, "cp": 2, "ep": 1, "etp": 1, "fsdp": 2, "zero": 1,
    "shard_group": 2, "schedule": "zero-bubble", "stage_layers": "5,7", "cp_exchange": "gather", "dispatch": "once",
    "graph_modules": "attention",
    "overlap": "none", "lora_rank": 8, "frozen_layers": 2, "document_len": 256, "plan": PLAN, "dense": "dense.yaml",
    "host": "study-2022", "skew_ms": 5.0, "jitter": 0.2, "seed": 3, "loader_ms": 90.0, "workers": 2,
    "costs": "costs.toml", "allocator": "expandable_segments:True", "optimizer_state": "bf16", "lora_base": "nf4",
    "lora_targets": "all",
    "offload": "optimizer", "loss": "chunked",
}  # fmt: skip
"""A value of every field that is not its default."""
BESIDE = {
    "seed": {"jitter": 0.2}, "workers": {"loader_ms": 900.0}, "fp8_scaling": {"dtype": "fp8"},
    "fp8_gather": {"dtype": "fp8", "fsdp": 2, "gpus": 8}, "checkpoint_every": {"checkpoint": "full"},
    "checkpoint_layers": {"checkpoint": "full"}, "expert_imbalance": {"ep": 1},
    "vp": {"pp": 2, "gpus": 8, "global_batch": 64}, "schedule": {"pp": 2, "gpus": 8, "global_batch": 64},
    "stage_layers": {"pp": 2, "gpus": 8, "global_batch": 64}, "pp": {"gpus": 8, "global_batch": 64},
    "shard_group": {"fsdp": 2, "gpus": 8}, "no_reshard": {"fsdp": 2, "gpus": 8}, "fsdp": {"gpus": 8},
    "zero": {"gpus": 8}, "no_sequence_parallel": {"tp": 2, "gpus": 8}, "tp": {"gpus": 8}, "cp": {"gpus": 8},
    "cp_exchange": {"cp": 2, "gpus": 8}, "dispatch": {"ep": 1}, "no_overlap": {"gpus": 8, "zero": 1},
    "overlap": {"gpus": 8, "zero": 1}, "global_batch": {"gpus": 8},
    "lora_base": {"lora_rank": 8}, "lora_targets": {"lora_rank": 8}, "graph_modules": {"kernels": "fused"},
}  # fmt: skip
"""Fields that stand alongside one, so that it has something to say."""
SAME = {
    "ep": "mpt has no experts", "etp": "likewise", "dispatch": "likewise", "expert_imbalance": "likewise",
    "mode": "training is the default",
    "dtype": "of some steps tf32 is as slow", "no_overlap": "the step may hide nothing",
    "allocator": "only what is reserved may change", "update_in_backward": "the peak may be elsewhere",
    "loss": "likewise", "cp_exchange": "both may be hidden", "checkpoint_every": "only fuller memory may change",
}  # fmt: skip
"""Fields whose value here may leave the step as it is, and why."""


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    """A small step of every kind."""
    folder = tmp_path_factory.mktemp("used")
    (folder / "tables.yaml").write_text(TABLES)
    (folder / "costs.toml").write_text('["aten::addmm"]\nseconds = 0.01\n["aten::convolution"]\nseconds = 0.01\n'
                                       '["aten::mm"]\nseconds = 0.01\n')  # fmt: skip
    (folder / "deepfm.yaml").write_text(f"recommender: deepfm\n{TABLES}")
    (folder / "dense.yaml").write_text("bottom_mlp: [13, 64]\ntop_mlp: [64, 1]\n")
    return folder, {
        "model": {"workload": "vgg13", "on": "dgx-a100", "batch_size": 2},
        "workload": {"workload": load_model("vgg13"), "on": "dgx-a100", "batch_size": 2},
        "recommender": {"workload": str(folder / "deepfm.yaml"), "on": "dgx-a100", "batch_size": 64},
        "dlrm": {"workload": "dlrm-ddp", "on": "dgx-a100", "batch_size": 64},
        "transformer": {"workload": "mpt-125m", "on": "dgx-a100", "seq_len": 512, "mode": "inference"},
        "parallel": {"workload": "mpt-125m", "on": "dgx-a100", "seq_len": 512, "tp": 1},
        "program": {"workload": "nvidia-dlrm", "on": "dgx-a100", "batch_size": 512},
        "tables": {"workload": str(folder / "tables.yaml"), "on": "dgx-a100", "gpus": 2, "batch_size": 64,
                   "plan": PLAN},
    }  # fmt: skip


def asked(steps, kind, name):
    """A step of a kind with one more field, and the step without it."""
    folder, known = steps
    value = VALUES.get(name, True)
    if name in ("costs", "dense"):
        value = str(folder / value)
    base = {**known[kind], **(BESIDE.get(name, {}) if name in USED[kind] else {})}
    return Scenario(**base), Scenario(**{**base, name: value})


def figures(result):
    document = result.to_dict()
    return [document[key] for key in ("iteration_ms", "interval_ms", "memory_gb", "per_family", "warnings", "gpus")]


@pytest.mark.parametrize("name", [name for name in list_scenario_fields() if name not in ("workload", "on")])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "here"])
def test_a_field_that_is_given_is_used_or_an_error_that_names_it(steps, kind, name):
    # given a step of a kind without and with a field
    without, given = asked(steps, kind, name)

    # when the kind of step does not declare it, then it is rejected by name
    if name not in USED[choose_step_kind("transformer" if kind == "parallel" else kind, given)]:
        with pytest.raises(TraincastError, match=f"`{name}` is not used here"):
            predict(given)
        return

    # else the step is another one, or what this model cannot have of it is an error
    try:
        after = figures(predict(given))
    except TraincastError as error:
        refusal = str(error)
        if not ("leave" in refusal or "give" in refusal):
            pytest.fail(f"no remedy: {refusal}")
        return
    if name not in SAME and given != without:
        assert figures(predict(without)) != after, f"{name} changes nothing of {kind}"


@pytest.mark.parametrize("name", [name for name in list_scenario_fields() if name not in USED["here"]])
def test_the_machine_at_hand_rejects_what_it_does_not_use(name):
    scenario = Scenario(**{"workload": "vgg13", "on": "here", name: VALUES.get(name, True)})
    with pytest.raises(TraincastError, match=f"`{name}` is not used here: vgg13 is a step on the machine at hand"):
        check_used(scenario, "here")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("mpt-125m --on dgx-h100 --gpus 8 --fsdp --costs nonexistent.toml", "no file nonexistent.toml"),
        ("resnet50 --on dgx-a100 --gpus 1,2 --costs /nonexistent.toml", "no file /nonexistent.toml"),
        ("dlrm-default --on here --cuda-graph", "--cuda-graph is not used here"),
        ("dlrm-default --on here --jitter 0.1", "--jitter is not used here"),
        ("gpt2-large --on dgx-h100 --gpus 8 --tp 2", "gpt2-large is a captured model, and --tp is for described"),
        ("gpt2-large --on dgx-h100 --gpus 8 --pp 2", "do not show how its layers could be divided"),
        ("hstu --on dgx-h100 --gpus 8 --fsdp", "hstu divides its embedding tables among GPUs by their plan"),
        ("hstu --on dgx-h100 --gpus 8 --program torchrec --zero 1", "leave out --zero"),
        ("gpt2-large --on dgx-h100 --gpus 8 --zero 1 --no-reshard", "give --fsdp, or leave it out"),
        ("gpt2-large --on dgx-h100 --gpus 8 --fsdp --shard-group 3", "does not divide 8 GPUs"),
        ("resnet50 --on dgx-h100 --gpus 8 --global-batch 100", "no multiple of the 256 samples of 8 GPUs with 32 each"),
        ("resnet50 --on v100 --seed 3", "--seed is used with --skew-ms or --jitter only"),
    ],
)
def test_options_that_were_dropped_without_a_word_are_errors(capsys, monkeypatch, tmp_path, line, said):
    monkeypatch.setenv("TRAINCAST_HOME", str(tmp_path))
    assert main(["predict", *line.split()]) == 2
    assert said in capsys.readouterr().err


def test_a_switch_of_parallelism_changes_nothing_else():
    plain = resolve(Scenario(workload="llama3-8b", on="dgx-h100", gpus=8)).layout
    sharded = resolve(Scenario(workload="llama3-8b", on="dgx-h100", gpus=8, fsdp=2)).layout
    same = ("precision", "micro_batch", "kernels", "joined", "attention", "optimizer", "reduce_bytes")
    assert {name: getattr(plain, name) for name in same} == {name: getattr(sharded, name) for name in same}


def test_one_name_is_one_model():
    names = [model.info.name for model in traincast.list_models()]
    assert len(names) == len(set(names))
