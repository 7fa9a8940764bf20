"""Descriptions: built in, from YAML, from Hugging Face configurations; their parameters."""

from __future__ import annotations

import json

import pytest

from traincast.models.transformers.description import count_active_parameters, count_all_parameters, count_model_flops
from traincast.models.transformers.reading import list_built_in_names, load_transformer, make_transformer
from traincast.utils.errors import TraincastError

# parameters as their authors count them: model cards and papers
PUBLISHED = {
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "mixtral-8x7b": 46_702_792_704,
    "mistral-7b": 7_241_732_096,
    "qwen3-8b": 8_190_735_360,
    "gpt2-xl": 1_557_611_200,
    "pythia-6.9b": 6_857_302_016,
    "falcon-40b": 41_303_293_952,
    "mistral-small-24b": 23_572_403_200,
    "qwen2.5-0.5b": 494_032_768,
    "qwen3-4b": 4_022_468_096,
    "gemma2-27b": 27_227_128_320,
    "gemma3-1b": 999_885_952,
    "phi4-14b": 14_659_507_200,
    "smollm3-3b": 3_075_098_624,
    "starcoder2-15b": 15_957_889_024,
    "granite-8b": 8_170_848_256,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_the_published_ones(name: str) -> None:
    assert count_all_parameters(load_transformer(name)) == PUBLISHED[name]


@pytest.mark.parametrize(
    ("name", "whole", "active"),
    [
        ("deepseek-v3", 671.0, 37.0),
        ("qwen3-235b-a22b", 235.0, 22.0),
        ("gpt-oss-120b", 116.8, 5.1),
        ("deepseek-v2", 236.0, 21.0),
    ],
)
def test_mixtures_use_few_of_their_parameters(name: str, whole: float, active: float) -> None:
    model = load_transformer(name)
    assert count_all_parameters(model) == pytest.approx(1e9 * whole, rel=0.005)
    assert count_active_parameters(model) == pytest.approx(1e9 * active, rel=0.03)


def test_every_built_in_name_is_described() -> None:
    assert len(list_built_in_names()) >= 28
    assert all(load_transformer(name).layers for name in list_built_in_names())
    assert "dlrm-default" not in list_built_in_names()


@pytest.mark.parametrize("name", ["gemma2-2b", "gemma3-12b", "gpt-oss-20b"])
def test_windows_leave_out_every_last_layer_of_a_pattern(name: str) -> None:
    model = load_transformer(name)
    whole = [layer for layer in range(model.layers) if not model.window_of(layer)]
    assert whole == list(range(model.full_every - 1, model.layers, model.full_every))
    assert model.full_every == {"gemma2-2b": 2, "gemma3-12b": 6, "gpt-oss-20b": 2}[name]


def test_flops_are_six_a_weight_and_token_plus_attention() -> None:
    model = load_transformer("llama3-8b")
    # published: 8B at 8,192 tokens is 6 * 7.5e9 + 6 * 32 layers * 4096 * 8192 a token
    assert count_model_flops(model, 1, 8192) / 8192 == pytest.approx(6 * 7_504_924_672 + 6 * 32 * 4096 * 8192, rel=1e-9)


def test_yaml_and_hugging_face_describe_the_same(tmp_path) -> None:
    short = tmp_path / "tiny.yaml"
    short.write_text(
        "layers: 2\nhidden: 64\nheads: 4\nkv_heads: 2\nffn: 128\nvocab: 100\nseq_len: 32\nnorm: rms_by_ops\n"
    )
    folder = tmp_path / "tiny"
    folder.mkdir()
    config = {
        "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 100, "max_position_embeddings": 32,
        "hidden_act": "silu", "tie_word_embeddings": False,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    assert load_transformer(str(short)) == load_transformer(str(folder / "config.json"))


def test_hugging_face_mixtures_and_latent_attention(tmp_path) -> None:
    config = {
        "model_type": "deepseek_v3", "num_hidden_layers": 61, "hidden_size": 7168, "num_attention_heads": 128,
        "num_key_value_heads": 128, "intermediate_size": 18432, "moe_intermediate_size": 2048, "vocab_size": 129280,
        "n_routed_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1, "first_k_dense_replace": 3,
        "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "max_position_embeddings": 4096, "hidden_act": "silu", "tie_word_embeddings": False, "moe_layer_freq": 1,
    }  # fmt: skip
    path = tmp_path / "v3.json"
    path.write_text(json.dumps(config))
    assert count_all_parameters(load_transformer(str(path))) == pytest.approx(
        count_all_parameters(load_transformer("deepseek-v3")), rel=0.006
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": 0}, "'layers' is 0; give an integer from 1"),
        ({"hidden": 65}, "'hidden' 65 is no multiple of 'heads' 4"),
        ({"kv_heads": 3}, "'heads' 4 is no multiple of 'kv_heads' 3"),
        ({"norm": "batch"}, "'norm' is 'batch'; choose from rms, rms_by_ops, layer"),
        ({"tied": 1}, "'tied' is 1; give true or false"),
        ({"width": 3}, "unknown field 'width'"),
        ({"experts": {"count": 4, "top_k": 8, "ffn": 8}}, "each token goes to 8 of 4 experts"),
        ({"experts": {"count": 4}}, "'experts' has no 'top_k'"),
        ({"latent": 3}, "'latent' is 3; give a table"),
    ],
)
def test_wrong_descriptions_are_refused_by_name(change, message: str) -> None:
    with pytest.raises(TraincastError, match="model 'tiny'") as caught:
        make_transformer("tiny", {"layers": 2, "hidden": 64, "heads": 4, "vocab": 100, **change})
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_unknown_family_and_a_missing_field_are_refused(tmp_path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "mamba"}))
    with pytest.raises(TraincastError, match="model_type 'mamba' is not known"):
        load_transformer(str(path))
    path.write_text(json.dumps({"model_type": "llama", "hidden_size": 64}))
    with pytest.raises(TraincastError, match="'layers' is missing"):
        load_transformer(str(path))
    with pytest.raises(TraincastError, match=r"unknown Transformer 'llama3-9b'\. Did you mean llama3-8b"):
        load_transformer("llama3-9b")


_QWEN = {
    "model_type": "qwen2", "num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 100,
    "use_sliding_window": True, "sliding_window": 16,
}  # fmt: skip
_SLIDES, _SEES_ALL = "sliding_attention", "full_attention"


@pytest.mark.parametrize(
    ("types", "windows"),
    [
        (None, [16, 16, 16, 16]),
        ([_SLIDES, _SEES_ALL] * 2, [16, 0, 16, 0]),
        ([_SLIDES] * 4, [16, 16, 16, 16]),
        ([_SEES_ALL] * 4, [0, 0, 0, 0]),
    ],
)
def test_layer_types_say_which_layers_have_windows(types, windows, tmp_path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**_QWEN, "layer_types": types}))
    model = load_transformer(str(path))
    assert [model.window_of(layer) for layer in range(4)] == windows


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_types": [_SEES_ALL, _SEES_ALL, _SLIDES, _SLIDES]}, "'layer_types' repeats no pattern"),
        (
            {"hidden_act": "xielu"},
            "the activation 'xielu' is not known of gated feed-forward networks; choose from silu",
        ),
        ({"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}}, "give its 'text_config' as a file"),
    ],
)
def test_what_a_configuration_says_and_nobody_knows_is_refused(change, message: str, tmp_path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**_QWEN, **change}))
    with pytest.raises(TraincastError, match=message):
        load_transformer(str(path))


@pytest.mark.parametrize(
    ("config", "normed"),
    [
        ({"model_type": "olmo2"}, True),
        ({"model_type": "glm4_moe", "use_qk_norm": True}, True),
        ({"model_type": "glm4_moe", "use_qk_norm": False}, False),
        ({"model_type": "llama"}, False),
    ],
)
def test_norms_of_queries_and_keys_are_the_class_s_or_the_configuration_s(config, normed, tmp_path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**_QWEN, "use_sliding_window": False, **config}))
    assert load_transformer(str(path)).qk_norm is normed
