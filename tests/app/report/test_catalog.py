"""Lists of what is built in, exactly as rendered."""

from __future__ import annotations

from dataclasses import replace

from traincast.app.report.catalog import format_coverage, format_models, format_platforms
from traincast.costs.kernels.lowered import OpCoverage
from traincast.hardware.platform import load_platform
from traincast.simulator.scenario.models import CoverageList, ModelList, list_built_in_models
from traincast.simulator.scenario.platforms import PlatformList


def test_models_have_sizes_and_what_they_are():
    models = {model.info.name: model for model in list_built_in_models()}
    header, _, vision, language = format_models(ModelList([models["resnet50"], models["bert-large"]])).splitlines()

    assert header.split() == ["model", "parameters", "batch", "tokens", "ops", "kernels", "what", "it", "is"]
    assert vision.split()[:5] == ["resnet50", "25.6", "M", "32", "-"]
    assert vision.endswith(models["resnet50"].info.description)
    assert language.split()[4] == str(models["bert-large"].workload.seq_len)
    assert language.split()[5] == str(models["bert-large"].workload.programs[0].num_ops)


def test_coverage_says_what_is_only_estimated():
    ops = CoverageList([("net", OpCoverage("aten::mm", 3, True, 3)), ("net", OpCoverage("my::op", 12, False, 24))])

    assert format_coverage(ops).splitlines() == [
        "model  op        count  kernels  lowered",
        "─────  ────────  ─────  ───────  ─────────",
        "net    aten::mm      3        3  yes",
        "net    my::op       12       24  estimated",
    ]
    assert ops.headline() == "2 ops of models, 1 of them estimated from their bytes and flops"


def test_platforms_have_the_figures_that_predictions_use():
    old, new = load_platform("v100"), load_platform("dgx-h100")

    header, _, first, second = format_platforms(PlatformList([old, new])).splitlines()

    assert header.split("  ")[0] == "platform"
    assert first.split() == ["v100", *old.device.name.split(), "1", "16", "900", "15.7", "-", "1530"]
    assert second.split()[-6:] == ["8", "80", "3,430", "66.9", "989", "1980"]


def test_a_platform_of_your_own_is_a_row_like_any_other():
    mine = replace(load_platform("v100"), key="my-gpu")

    (row,) = PlatformList([mine]).to_dict()
    assert (row["platform"], row["memory_gb"], row["gpus_per_node"]) == ("my-gpu", mine.device.memory_bytes / 1e9, 1)
