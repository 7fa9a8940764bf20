"""Built-in models against what is known of their architectures: parameters, layers, GEMMs, convolutions, memory."""

from __future__ import annotations

from collections import Counter

import pytest

from traincast.ir import Phase, StorageKind
from traincast.models.catalog import list_models, load_model

FORWARD_CONVOLUTIONS = ("aten::cudnn_convolution", "aten::convolution", "aten::_convolution")


def info_of(name):
    return next(info for info in list_models() if info.name == name)


def names_in(workload, *phases):
    program = workload.programs[0]
    bounds = program.columns.scope_ptr.tolist()
    ops = [op.name for op in program.ops]
    counts: Counter[str] = Counter()
    for number, scope in enumerate(program.scopes):
        if not phases or scope.phase in phases:
            counts.update(ops[bounds[number] : bounds[number + 1]])
    return counts


def bytes_of(workload, kind):
    program = workload.programs[0]
    kinds = program.columns.storage_kind == int(kind)
    return int(program.storage_nbytes[kinds].sum())


def gpt_parameters(layers, width, vocabulary=50257, positions=1024):
    """GPT-2: attention 4 w^2 + 4 w, MLP 8 w^2 + 5 w, two norms a layer; one more at the end; tied head."""
    return layers * (12 * width**2 + 13 * width) + 2 * width + (vocabulary + positions) * width


def dlrm_parameters(bottom, top, rows, dim):
    layers = list(zip(bottom, bottom[1:], strict=False)) + list(zip(top, top[1:], strict=False))
    return sum(a * b + b for a, b in layers) + sum(rows) * dim


def test_gpt2_large_has_its_published_parameters():
    assert info_of("gpt2-large").parameters == gpt_parameters(36, 1280) == 774_030_080


@pytest.mark.parametrize(("name", "layers", "width"), [("gpt3-xl", 24, 3072), ("gpt3-2.7b", 32, 2560)])
def test_gpt3_as_gpt2_has_the_parameters_of_its_shape(name, layers, width):
    assert info_of(name).parameters == pytest.approx(gpt_parameters(layers, width, positions=2048), rel=2e-3)


@pytest.mark.parametrize(
    ("name", "millions"), [("resnet50", 25.557), ("vgg13", 133.048), ("bert-large", 336.2), ("inception-v3", 27.161)]
)
def test_published_parameter_counts(name, millions):
    assert info_of(name).parameters == pytest.approx(1e6 * millions, rel=2e-3)


def test_the_default_dlrm_is_its_tables_and_two_mlps():
    parameters = dlrm_parameters([512, 512, 64], [], [1_000_000] * 8, 64)
    assert info_of("dlrm-default").parameters == pytest.approx(parameters, rel=0.01)


@pytest.mark.parametrize(("name", "convolutions"), [("resnet50", 53), ("vgg13", 10)])
def test_convolutions_run_once_forward_and_twice_backward(name, convolutions):
    workload = load_model(name)
    forward = names_in(workload, Phase.FORWARD)
    backward = names_in(workload, Phase.BACKWARD)

    assert sum(forward[op] for op in FORWARD_CONVOLUTIONS) == convolutions
    assert backward["aten::convolution_backward"] == convolutions


@pytest.mark.parametrize(("name", "layers", "products"), [("bert-large", 24, 6), ("gpt2-large", 36, 4)])
def test_a_transformer_layer_has_its_products(name, layers, products):
    """Linear layers of a block: query, key, value (one in GPT-2), output, two of the MLP; heads come on top."""
    forward = names_in(load_model(name, mode="inference"), Phase.FORWARD)

    assert layers * products <= forward["aten::addmm"] + forward["aten::mm"] <= layers * products + 4
    assert forward["aten::bmm"] == 2 * layers


@pytest.mark.parametrize("name", ["resnet50", "bert-large", "vgg13"])
def test_parameters_and_gradients_take_four_bytes_each(name):
    workload = load_model(name)
    parameters = bytes_of(workload, StorageKind.PARAMETER)

    assert parameters == pytest.approx(4 * info_of(name).parameters, rel=0.01)
    assert bytes_of(workload, StorageKind.GRADIENT) >= 0.9 * parameters


def test_adam_keeps_two_numbers_per_parameter():
    workload = load_model("bert-large", optimizer="adam")

    state = bytes_of(workload, StorageKind.OPTIMIZER_STATE)
    assert state == pytest.approx(2 * bytes_of(workload, StorageKind.PARAMETER), rel=0.01)


@pytest.mark.parametrize("name", ["bert-large", "resnet50", "dlrm-default"])
def test_a_step_without_its_optimizer_is_the_rest_of_it(name):
    whole, without = load_model(name), load_model(name, optimizer="none")

    rest = (Phase.FORWARD, Phase.LOSS, Phase.BACKWARD)
    assert names_in(whole, *rest) == names_in(without, *rest)
    assert not names_in(without, Phase.OPTIMIZER)
