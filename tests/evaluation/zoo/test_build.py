"""From recipes to data files: which variants there are, what is written, what is left alone."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

from tests.evaluation.zoo.captured import capture_once
from traincast.capturing import capture_step
from traincast.ir import Phase
from traincast.ir.workload import DEFAULT_FRAMEWORK, STUDY_FRAMEWORK
from traincast.models.catalog import file_name, list_models
from traincast.models.dlrm.config import DLRM_DDP
from traincast.utils.errors import TraincastError
from traincast_evaluation.zoo.build import files
from traincast_evaluation.zoo.build.legacy import split_engine_ops
from traincast_evaluation.zoo.build.recipes import (
    RECIPES,
    Recipe,
    count_parameters,
    make_classes,
    make_images,
    make_token_ids,
)
from traincast_evaluation.zoo.build.steps import Setting, make_host_batch, make_modern_step

TRAINING = Setting(mode="training", optimizer="sgd", precision="fp32", choice="plain")


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(12, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.first(torch.flatten(x, 1))))


def tiny(**fields) -> Recipe:
    def make(setting: Setting):
        return make_modern_step(setting, Tiny, make_images(2, setting), nn.functional.cross_entropy, make_classes)

    fields = {"optimizers": ("sgd",), **fields}
    return Recipe(
        name="tiny", description="a tiny model", batch_size=4, make=make,
        parameters=lambda: count_parameters(Tiny), **fields,
    )  # fmt: skip


@pytest.fixture
def data(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "DATA", tmp_path)
    monkeypatch.setattr(files, "INDEX", tmp_path / "catalog.json")
    monkeypatch.setattr(files, "RECIPES", {"tiny": tiny()})
    return tmp_path


def test_every_recipe_has_its_row_in_the_index():
    assert list(RECIPES) == [info.name for info in list_models()]
    for info in list_models():
        recipe = RECIPES[info.name]
        assert (info.batch_size, info.seq_len, info.axis) == (recipe.batch_size, recipe.seq_len, recipe.axis)
        assert (info.choices, info.optimizers) == (recipe.choices, recipe.optimizers)
        assert set(info.files) == {
            file_name(mode=s.mode, choice=s.choice, optimizer=s.optimizer, precision=s.precision)
            for s in recipe.settings()
        }


def test_the_studies_models_follow_the_pytorch_of_the_studies():
    old = {name for name, recipe in RECIPES.items() if recipe.framework_version == STUDY_FRAMEWORK}
    assert old == {"dlrm-default", "dlrm-mlperf", "dlrm-ddp", "resnet50", "inception-v3"}
    assert {recipe.framework_version for recipe in RECIPES.values()} == {STUDY_FRAMEWORK, DEFAULT_FRAMEWORK}
    assert all(RECIPES[name].synchronised for name in old)


def test_variants_are_every_choice_but_those_that_do_not_exist():
    recipe = tiny(choices=("a", "b"), optimizers=("sgd", "adam"), without=(("b", "adam"),))
    names = [file_name(mode=s.mode, choice=s.choice, optimizer=s.optimizer, precision=s.precision)
             for s in recipe.settings()]  # fmt: skip
    assert names == [
        "training-a-sgd-fp32.tc", "training-a-adam-fp32.tc", "inference-a-fp32.tc",
        "training-a-sgd-half.tc", "training-a-adam-half.tc", "inference-a-half.tc",
        "training-b-sgd-fp32.tc", "inference-b-fp32.tc", "training-b-sgd-half.tc", "inference-b-half.tc",
    ]  # fmt: skip


def test_building_writes_every_variant_and_removes_what_is_stale(data):
    (data / "tiny").mkdir()
    (data / "tiny" / "training-gone-sgd-fp32.tc").write_bytes(b"old")

    built = dict(files.build_model(tiny()))

    there = {path.name for path in (data / "tiny").iterdir()}
    assert there == {path.name for path in built} == {
        "training-plain-sgd-fp32.tc", "training-plain-sgd-half.tc", "inference-plain-fp32.tc",
        "inference-plain-half.tc",
    }  # fmt: skip
    assert all(ops > 0 for ops in built.values())


def test_only_missing_files_are_captured_when_asked(data):
    list(files.build_model(tiny()))
    kept = data / "tiny" / "inference-plain-fp32.tc"
    missing = data / "tiny" / "inference-plain-half.tc"
    before = kept.read_bytes()
    missing.unlink()

    built = [path.name for path, _ in files.build_model(tiny(), only_missing=True)]

    assert built == ["inference-plain-half.tc"]
    assert kept.read_bytes() == before


def test_the_same_code_writes_the_same_bytes(data):
    list(files.build_model(tiny()))
    first = {path.name: path.read_bytes() for path in (data / "tiny").iterdir()}
    list(files.build_model(tiny()))
    assert {path.name: path.read_bytes() for path in (data / "tiny").iterdir()} == first


def test_the_index_says_what_was_built(data):
    list(files.build_model(tiny()))
    files.write_index()

    (entry,) = json.loads((data / "catalog.json").read_text())["models"]

    assert (entry["name"], entry["batch_size"], entry["parameters"]) == ("tiny", 4, 12 * 8 + 8 + 8 * 4 + 4)
    assert len(entry["files"]) == 4
    assert entry["ops"] > 0


def test_a_variant_says_what_it_is():
    workload = files.capture_variant(tiny(axis="attention", choices=("eager",)), replace(TRAINING, choice="eager"))
    assert dict(workload.meta) == {
        "description": "a tiny model", "precision": "fp32", "optimizer": "sgd", "attention": "eager",
    }  # fmt: skip
    assert (workload.name, workload.mode) == ("tiny", "training")


def test_a_model_whose_sizes_follow_no_rule_is_refused():
    class Odd(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.zeros(1 + x.shape[0] % 3, device=x.device).repeat(x.shape[0] ** 3 % 7 + 1)

    recipe = replace(
        tiny(),
        make=lambda setting: make_modern_step(
            setting, Odd, make_images(2, setting), nn.functional.mse_loss, make_classes
        ),
    )
    with pytest.raises(TraincastError, match="tiny"):
        files.capture_variant(recipe, replace(TRAINING, mode="inference", optimizer=""))


def test_engine_ops_get_scopes_of_their_own():
    # Given a training step as today's profiler shows it: the bias gradient's sum is in its node's scope
    make = make_modern_step(TRAINING, Tiny, make_images(2, TRAINING), nn.functional.cross_entropy, make_classes)
    today = capture_once(make, 4)

    split = split_engine_ops(today)

    assert [op.signature for op in split.ops] == [op.signature for op in today.ops]
    names = [scope.name for scope in split.scopes]
    assert names.count("aten::sum") == names.count("aten::view") - [s.name for s in today.scopes].count("aten::view")
    node = names.index("AddmmBackward0")
    assert names[node : node + 3] == ["AddmmBackward0", "aten::sum", "aten::view"]
    assert {scope.phase for scope in split.scopes[node : node + 3]} == {Phase.BACKWARD}
    assert sum(scope.num_ops for scope in split.scopes) == today.num_ops


def test_scopes_that_waited_for_a_split_one_wait_for_its_last_piece():
    make = make_modern_step(TRAINING, Tiny, make_images(2, TRAINING), nn.functional.cross_entropy, make_classes)
    split = split_engine_ops(capture_once(make, 4))

    for scope in split.scopes:
        if scope.after >= 0:
            assert split.scopes[scope.after].thread != scope.thread
            assert scope.after < scope.index


@pytest.mark.parametrize(
    ("embedding", "tensors", "indices", "offsets"),
    [("batched", 1, 8 * 8 * 10, (8 * 8 + 1,)), ("bag", 8, 8 * 10, (8, 8))],
)
def test_a_batch_of_a_dlrm_is_pinned_and_as_large_as_its_lookups(embedding, tensors, indices, offsets):
    batches = []

    def make(batch_size: int):
        batches.append(make_host_batch(replace(DLRM_DDP, embedding=embedding), batch_size, torch.float32))
        return lambda: torch.ones(1, device="cuda")

    capture_step(make, batch_size=8, name="x", mode="inference", rebatch=False)
    batch = batches[0]
    assert len(batch.indices) == tensors
    assert {tensor.numel() for tensor in batch.indices} == {indices}
    assert tuple(batch.offsets.shape) == offsets
    assert {tensor.dtype for tensor in (*batch.indices, batch.offsets)} == {torch.int32}
    assert (batch.dense.shape, batch.target.shape) == ((8, 128), (8, 1))


@pytest.mark.parametrize(
    ("mode", "precision", "dtype"),
    [
        ("training", "half", torch.float32),
        ("inference", "half", torch.bfloat16),
        ("inference", "fp32", torch.float32),
    ],
)
def test_inputs_are_of_the_weights_type(mode, precision, dtype):
    assert Setting(mode=mode, optimizer="", precision=precision, choice="plain").input_dtype is dtype


def test_parameters_that_are_shared_count_once():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.head = nn.Embedding(10, 4), nn.Linear(4, 10, bias=False)
            self.head.weight = self.tokens.weight

    assert count_parameters(Tied) == 40


def test_token_ids_are_as_many_tensors_as_asked_for():
    shapes: list[tuple[int, ...]] = []

    def make(batch: int):
        given = make_token_ids(2)(batch, 7)
        shapes.extend(tuple(tensor.shape) for tensor in given)
        return lambda: given[0] + given[1]

    capture_step(make, batch_size=3, name="x", mode="inference", rebatch=False)
    assert set(shapes) == {(3, 7)}
