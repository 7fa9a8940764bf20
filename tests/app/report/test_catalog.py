"""Lists of what is built in, exactly as rendered."""

from __future__ import annotations

from dataclasses import replace

from traincast.app.report.catalog import format_coverage, format_models, format_platforms
from traincast.costs.kernels.lower import OpCoverage
from traincast.hardware.platform import load_platform
from traincast.models.catalog import list_published_programs
from traincast.models.embeddings.documents import BUILTIN_SETS
from traincast.models.transformers.reading import list_built_in_names
from traincast.simulator.scenario.catalog import CoverageList, ModelList, PlatformList, list_built_in_models


def test_models_have_sizes_and_what_they_are():
    models = {model.info.name: model for model in list_built_in_models()}
    shown = format_models(ModelList([models["bert-large"], models["resnet50"]])).splitlines()

    header, _, _, captured, language, _, vision, image = shown
    assert header.split() == ["model", "parameters", "batch", "tokens", "what", "it", "is"]
    assert (captured, vision) == ("Transformers, captured", "vision (CNNs)")
    assert image.split()[:5] == ["resnet50", "25.6", "M", "32", "-"]
    assert image.endswith(models["resnet50"].info.description)
    assert language.split()[4] == str(models["bert-large"].workload.seq_len)


def test_everything_with_a_name_is_listed_and_found_by_a_part_of_it():
    models = list_built_in_models()
    names = [model.info.name for model in models]

    assert set(names) >= {*list_built_in_names(), *BUILTIN_SETS, *list_published_programs()}
    assert len(names) == len(set(names))
    found = [model.info.name for model in models.select("LLAMA3")]
    assert found == ["llama3-8b", "llama3-70b", "llama3-405b", "llama3.2-1b", "llama3.2-3b"]
    assert models.to_dict()[names.index("llama3-8b")]["parameters"] == 8030261248


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
    measured = ["gemm", "(half),", "conv,", "embedding"]
    assert first.split() == ["v100", *old.device.name.split(), "1", "16", "900", "15.7", "-", *measured]
    assert second.split()[-8:] == ["80", "3,430", "66.9", "989", "gemm", "(fp8,", "half),", "attention"]


def test_a_platform_of_your_own_is_a_row_like_any_other():
    mine = replace(load_platform("v100"), key="my-gpu")

    (row,) = PlatformList([mine]).to_dict()
    assert (row["platform"], row["memory_gb"], row["gpus_per_node"]) == ("my-gpu", mine.device.memory_bytes / 1e9, 1)
