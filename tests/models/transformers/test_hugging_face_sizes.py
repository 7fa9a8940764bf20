"""Every supported Hugging Face family has the parameters of its own class; odd configurations are rejected by field."""

from __future__ import annotations

import json

import pytest

from traincast.models.transformers.description import count_all_parameters
from traincast.models.transformers.reading import load_families, load_transformer
from traincast.utils.errors import TraincastError

# what cards and papers count; configurations as their authors published them, fields left out included
PUBLISHED = {
    "falcon-7b": (
        6_921_720_704,
        {"model_type": "falcon", "bias": False, "hidden_size": 4544, "multi_query": True, "num_attention_heads": 71,
         "new_decoder_architecture": False, "num_hidden_layers": 32, "vocab_size": 65024},
    ),
    "falcon-40b": (
        41_303_293_952,
        {"model_type": "falcon", "bias": False, "hidden_size": 8192, "num_kv_heads": 8, "num_attention_heads": 128,
         "new_decoder_architecture": True, "num_hidden_layers": 60, "vocab_size": 65024},
    ),
    "gemma-2b": (
        2_506_172_416,
        {"model_type": "gemma", "head_dim": 256, "hidden_act": "gelu", "hidden_size": 2048, "intermediate_size": 16384,
         "num_attention_heads": 8, "num_hidden_layers": 18, "num_key_value_heads": 1, "vocab_size": 256000},
    ),
}  # fmt: skip


def _load(tmp_path, config):
    path = tmp_path / "model.json"
    path.write_text(json.dumps(config, default=str))
    return load_transformer(str(path))


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_the_published_ones(name: str, tmp_path) -> None:
    parameters, config = PUBLISHED[name]
    assert count_all_parameters(_load(tmp_path, config)) == pytest.approx(parameters, rel=2e-4)


@pytest.mark.parametrize("family", list(load_families()))
@pytest.mark.parametrize("whole", [True, False], ids=["every field", "only fields that differ from the class"])
def test_parameters_are_those_of_the_class(family: str, whole: bool, tmp_path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    if family not in transformers.CONFIG_MAPPING:
        pytest.skip(f"the installed transformers has no class of {family}")
    layers = next(
        k for k in ("num_hidden_layers", "n_layer", "n_layers", "num_layers") if _has(transformers, family, k)
    )
    config = transformers.AutoConfig.for_model(family, **_make_shallow(family, layers))
    kind = (
        "ImageClassification" if family == "vit" else "MaskedLM" if not load_families()[family].get("causal", True)
        else "Seq2SeqLM" if family in ("t5", "mt5") else "CausalLM"
    )  # fmt: skip
    with torch.device("meta"):
        model = getattr(transformers, f"AutoModelFor{kind}").from_config(config)
    counted = sum(p.numel() for p in model.parameters())
    fields = config.to_dict()
    if not whole:
        names = [
            "hidden_size",
            "hidden_dim",
            "n_embd",
            "d_model",
            "heads",
            "n_head",
            "vocab_size",
            "intermediate_size",
            "d_ff",
            "ffn_dim",
            "num_decoder_layers",
        ]
        fields = {
            **config.to_diff_dict(),
            **{k: v for k, v in fields.items() if k == layers or any(name in k for name in names)},
        }
    # heads for masked words have a layer more, and so much is a bias for every word of so few layers
    within = 0.03 if kind == "MaskedLM" else 0.002
    assert count_all_parameters(_load(tmp_path, {**fields, "model_type": family})) == pytest.approx(counted, rel=within)


def _has(transformers, family: str, field: str) -> bool:
    return hasattr(transformers.AutoConfig.for_model(family), field)


def _make_shallow(family: str, layers: str) -> dict[str, object]:
    shallow: dict[str, object] = {layers: 4}
    if family == "gpt_neo":
        shallow["attention_types"] = [[["global", "local"], 2]]
    if family.startswith(("deepseek", "dots", "glm4_moe")):
        shallow["n_routed_experts"] = 16
    if family == "dots1":
        shallow |= {"n_shared_experts": 2, "num_experts_per_tok": 6}
    if family in ("ministral", "hunyuan_v1_dense", "glm4_moe"):  # their classes take no head's width from the others
        shallow["head_dim"] = 128
    if family == "nemotron":
        shallow["num_key_value_heads"] = 8
    return shallow


@pytest.mark.parametrize(
    ("field", "value"),
    [("patch_size", -1), ("patch_size", [16, 16]), ("image_size", 8), ("num_labels", "many"), ("image_size", 1 << 30)],
)
def test_odd_sizes_of_images_are_rejected_by_name(field, value, tmp_path) -> None:
    config = {"model_type": "vit", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, field: value}
    with pytest.raises(TraincastError, match=field):
        _load(tmp_path, config)


def test_more_layers_than_anybody_writes_are_rejected(tmp_path) -> None:
    config = {
        "model_type": "llama",
        "num_hidden_layers": 1 << 22,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "vocab_size": 9,
    }
    with pytest.raises(TraincastError, match="'layers' is 4194304; give an integer from 1 to 1024"):
        _load(tmp_path, config)


def test_latent_attention_without_heads_says_what_is_missing(tmp_path) -> None:
    config = {"model_type": "deepseek_v3", "num_hidden_layers": 2, "hidden_size": 64, "vocab_size": 9}
    with pytest.raises(TraincastError, match="'heads' is missing"):
        _load(tmp_path, config)
