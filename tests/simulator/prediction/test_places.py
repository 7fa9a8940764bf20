"""Kernel time by module, layer and op."""

from __future__ import annotations

import pytest

import traincast
from tests.simulator.rank_programs import RankProgram, predict
from traincast.app.report.chrome import make_chrome_trace
from traincast.app.report.prediction import format_prediction
from traincast.ir.ops import find_layer


@pytest.fixture(scope="module")
def bert():
    return traincast.predict("bert-large", on="v100", batch_size=2, seq_len=128)


def test_every_view_adds_up_to_the_kernel_time(bert):
    kernels = sum(bert.by_family.values())

    for view in (bert.by_module, bert.by_layer, bert.by_op):
        assert sum(view.values()) == pytest.approx(kernels)
        assert list(view.values()) == sorted(view.values(), reverse=True)


def test_layers_of_one_kind_take_the_same_time(bert):
    layers = {name: seconds for name, seconds in bert.by_layer.items() if ".layers." in name}

    assert len(layers) == 24
    assert max(layers.values()) == pytest.approx(min(layers.values()), rel=0.01)
    numbered = sum(seconds for name, seconds in bert.by_module.items() if ".layers.*" in name)
    assert numbered == pytest.approx(sum(layers.values()))


def test_what_no_module_runs_is_named_by_its_phase(bert):
    assert bert.by_module["(optimizer)"] == pytest.approx(bert.by_phase["optimizer"])
    assert bert.by_layer["(optimizer)"] == bert.by_module["(optimizer)"]


def test_products_are_the_gemm_family(bert):
    products = sum(seconds for name, seconds in bert.by_op.items() if name in ("aten::mm", "aten::addmm", "aten::bmm"))

    assert products == pytest.approx(bert.by_family["gemm"])


def test_json_has_them_in_milliseconds(bert):
    document = bert.to_dict()

    assert document["by_op"]["aten::addmm"] == pytest.approx(1e3 * bert.by_op["aten::addmm"])
    assert document.keys() >= {"by_module", "by_layer", "by_op"}
    assert bert.records()["modules"][0]["ms"] == pytest.approx(1e3 * next(iter(bert.by_module.values())))


@pytest.mark.parametrize(
    ("path", "layer"),
    [
        ("Bert.encoder.layers.3.mlp.fc1", "Bert.encoder.layers.3"),
        ("ResNet.layer1.0.conv1", "ResNet.layer1.0"),
        ("Net.10", "Net.10"),
        ("Dlrm.tables.a.b", "Dlrm.tables"),
        ("Linear", "Linear"),
        ("", ""),
    ],
)
def test_a_layer_ends_with_the_first_number(path, layer):
    assert find_layer(path) == layer


def test_the_page_shows_the_largest_and_the_rest(bert):
    page = format_prediction(bert, by="layer")

    (rest,) = [line for line in page.splitlines() if " more  " in line]
    assert rest.startswith(f"{len(bert.by_layer) - 25} more")
    assert "layer  " not in format_prediction(bert)
    assert format_prediction(predict(RankProgram().compute(64)), by="op").count("aten::mm") == 1


def test_trace_names_the_module_of_a_kernel(bert):
    modules = {
        event["args"].get("module") for event in make_chrome_trace(bert)["traceEvents"] if event.get("cat") == "gemm"
    }

    assert "BertForPreTraining.bert.layers.0.attention.query" in modules
