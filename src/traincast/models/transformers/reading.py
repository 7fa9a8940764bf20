"""Descriptions read from tables: the built-in models, a short YAML file, or a `config.json` of Hugging Face."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from traincast.models.transformers.description import (
    ACTIVATIONS,
    ATTENTION,
    DENSE,
    MAMBA,
    MIXTURE,
    NORMS,
    POSITIONS,
    Experts,
    LatentAttention,
    StateSpace,
    Transformer,
)
from traincast.utils.errors import TraincastError, make_unknown_error, shorten_value
from traincast.utils.files.reading import format_path, parse_toml, read_document

_SIZES = {  # of a description: what configurations call it
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads"),
    "head_dim": ("head_dim", "d_kv"),
    "ffn": ("intermediate_size", "n_inner", "d_ff", "ffn_dim"),
    "vocab": ("vocab_size",),
}
_RMS_TYPES = (
    "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3", "kimi_k2",
    "gpt_oss", "t5", "phi3", "gemma", "gemma2", "olmo2",
)  # fmt: skip
_LAYER_TYPES = ("gpt2", "opt", "gpt_neox", "mpt", "bloom", "bert", "falcon", "gpt_neo", "gptj", "vit", "roberta")
_ENCODERS = ("bert", "roberta", "vit")
_ACTIVATION = {"silu": "swiglu", "swiglu": "swiglu", "gelu": "gelu", "relu": "relu"}
_JOINED = ("gpt2", "gpt_neox", "mpt", "bloom", "falcon", "phi3")
"""Families whose classes have one weight for query, key and value (Phi-3 also one for gate and up)."""
_GATED_GELU = ("gemma", "gemma2")
# whether the last projection is the token embedding where a configuration does not say: the defaults of the classes
_TIED = ("gemma", "gemma2", "t5", *(family for family in _LAYER_TYPES if family not in ("gpt_neox", "gptj")))


def is_hugging_face(document: Mapping[str, Any]) -> bool:
    """Whether a document is a configuration of Hugging Face."""
    return "model_type" in document or "architectures" in document


def read_hugging_face_config(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The fields of a description; a family nobody knows is rejected by name."""
    family = str(config.get("model_type", ""))
    if family not in (*_RMS_TYPES, *_LAYER_TYPES):
        known = ", ".join(sorted((*_RMS_TYPES, *_LAYER_TYPES)))
        raise TraincastError(
            f"{where}: model_type {shorten_value(family)} is not known ({known}); describe the model in a short YAML "
            "instead"
        )
    table = {field: value for field, names in _SIZES.items() if (value := _take_first_field(config, names)) is not None}
    if family == "falcon":
        table["kv_heads"] = _count_falcon_kv_heads(config, table)
    _add_kinds(table, config, family, where)
    positions = _take_first_field(config, ("max_position_embeddings", "n_positions", "max_seq_len"))
    if isinstance(positions, int):
        table["seq_len"] = min(positions, 8192)  # a context is longer than what a step trains with
    if config.get("use_sliding_window", True) and isinstance(config.get("sliding_window"), int):
        table["window"] = config["sliding_window"]
        table["window_every"] = 2 if family in ("gpt_oss", "gemma2") else 1
    if family.startswith(("deepseek", "kimi")):
        _add_latent(table, config)
    _add_experts(table, config, where)
    return table


def _count_falcon_kv_heads(config: Mapping[str, Any], table: Mapping[str, Any]) -> Any:
    """Heads of keys and values: `num_kv_heads` counts in the newer architecture only, else there is one or one each."""
    if config.get("new_decoder_architecture"):
        return table.get("kv_heads", table.get("heads"))
    return 1 if config.get("multi_query", True) else table.get("heads")


def _add_kinds(table: dict[str, Any], config: Mapping[str, Any], family: str, where: str) -> None:
    """Norm, activation, positions, biases, masks and tied tables of a family."""
    layer = family in _LAYER_TYPES
    table["norm"] = "layer" if layer else "rms_by_ops"
    hidden_act = str(_take_first_field(config, ("hidden_act", "activation_function", "hidden_activation")) or "")
    gelu = "gelu" in hidden_act or (not hidden_act and layer)
    by_ops = hidden_act in ("gelu_new", "gelu_fast") or (not hidden_act and family in ("gpt2", "gpt_neo", "gptj"))
    plain = "gelu_new" if by_ops else "gelu" if gelu else _ACTIVATION.get(hidden_act, "swiglu")
    table["activation"] = "geglu" if family in _GATED_GELU else plain
    if family == "t5":
        gated = "gated" in str(config.get("feed_forward_proj", "relu"))
        table |= {"activation": "geglu" if gated else "relu", "position": "relative"}
        table["encoder_layers"] = table.get("layers", 0)
        table["layers"] = config.get("num_decoder_layers") or table["encoder_layers"]
    elif family in ("gpt2", "opt", "bert", "roberta", "vit", "gpt_neo"):
        table["position"] = "learned"
    elif family in ("mpt", "bloom"):
        table["position"] = "alibi"
    table["bias"] = bool(config.get("bias", config.get("attention_bias", layer and family != "mpt")))
    table["qkv_bias"] = table["bias"] or family in ("qwen2", "qwen2_moe")
    table["joined"] = family in _JOINED
    table["qk_norm"] = family in ("qwen3", "qwen3_moe")
    table["tied"] = bool(config.get("tie_word_embeddings", family in _TIED))
    table["causal"] = family not in _ENCODERS
    if family == "vit":
        patch, image = _read_size(config, "patch_size", 16, where), _read_size(config, "image_size", 224, where)
        if image < patch:
            raise TraincastError(
                f"{where}: 'image_size' {image} is smaller than 'patch_size' {patch}; give a larger one"
            )
        table["patch_inputs"] = 3 * patch * patch
        table["seq_len"] = (image // patch) ** 2 + 1
        table.setdefault("vocab", _read_size(config, "num_labels", 1000, where))


def _add_latent(table: dict[str, Any], config: Mapping[str, Any]) -> None:
    table["latent"] = {
        "q_rank": config.get("q_lora_rank") or 0,
        "kv_rank": config.get("kv_lora_rank", 512),
        "nope_dim": config.get("qk_nope_head_dim", 128),
        "rope_dim": config.get("qk_rope_head_dim", 64),
        "value_dim": config.get("v_head_dim", 128),
    }
    table["head_dim"] = table["latent"]["nope_dim"]
    if "heads" in table:
        table["kv_heads"] = table["heads"]


def _add_experts(table: dict[str, Any], config: Mapping[str, Any], where: str) -> None:
    count = _take_first_field(config, ("num_local_experts", "n_routed_experts", "num_experts"))
    if not count:
        return
    width = _read_size(config, "moe_intermediate_size", table.get("ffn"), where)
    shared = _read_size(config, "n_shared_experts", 0, where) * width
    shared = _read_size(config, "shared_expert_intermediate_size", shared, where)
    table["experts"] = {
        "count": count,
        "top_k": _take_first_field(config, ("num_experts_per_tok", "experts_per_token")) or 2,
        "ffn": width,
        "shared_ffn": shared,
        "dense_layers": config.get("first_k_dense_replace") or 0,
        "every": config.get("decoder_sparse_step") or config.get("moe_layer_freq") or 1,
    }


def _read_size(config: Mapping[str, Any], name: str, usual: Any, where: str) -> int:
    """A size that arithmetic is done with; `usual` where the configuration leaves it out."""
    value = config.get(name) or usual
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= 1 << 24:
        raise TraincastError(f"{where}: '{name}' is {shorten_value(value)}; give an integer from 1 to {1 << 24}")
    return value


def _take_first_field(config: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    return next((config[name] for name in names if config.get(name) is not None), None)


_MOST = 1 << 24  # of any size: several times the largest vocabulary or sequence anybody trains with
_MOST_OF = {"layers": 1024, "encoder_layers": 1024, "count": 65536}  # each is written op by op
_CHOICES = {"norm": NORMS, "activation": ACTIVATIONS, "position": POSITIONS}
_FLAGS = ("bias", "qkv_bias", "qk_norm", "tied", "joined", "causal")
_ZERO_ALLOWED = (
    "window", "encoder_layers", "patch_inputs", "shared_ffn", "dense_layers", "q_rank", "capacity", "rope_dim",
    "decoder_len",
)  # fmt: skip
_NEEDED = ("layers", "hidden", "heads", "vocab")
_FAMILY = "family "


@cache
def load_built_in_tables() -> dict[str, dict[str, Any]]:
    """The tables of the built-in models by name, what families share filled in."""
    text = (files("traincast.models.transformers") / "data" / "models.toml").read_text(encoding="utf-8")
    tables = parse_toml(text, "models.toml")
    shared = {name.removeprefix(_FAMILY): table for name, table in tables.items() if name.startswith(_FAMILY)}
    return {
        name: {**shared.get(table.get("like", ""), {}), **{key: value for key, value in table.items() if key != "like"}}
        for name, table in tables.items()
        if not name.startswith(_FAMILY)
    }


def list_built_in_names() -> tuple[str, ...]:
    """Names of the built-in Transformers."""
    return tuple(load_built_in_tables())


def load_transformer(source: str) -> Transformer:
    """A Transformer: built in, by name; described in a YAML file; or by its Hugging Face `config.json`."""
    if source in load_built_in_tables():
        return make_transformer(source, load_built_in_tables()[source])
    path = Path(source)
    if path.suffix not in (".json", ".yaml", ".yml"):
        raise make_unknown_error(
            "Transformer", source, load_built_in_tables(), "Or give a .yaml description or a Hugging Face config.json."
        )
    document = read_document(path)
    where = format_path(path)
    if not isinstance(document, Mapping):
        raise TraincastError(f"{where}: not a table of names and values; describe the model as `layers: 32` and so on")
    known = (path.parent.name, str(document.get("model_type") or path.stem))
    name = next(filter(None, known)) if path.name == "config.json" else path.stem
    if is_hugging_face(document):
        return make_transformer(name, read_hugging_face_config(document, where), where)
    return make_transformer(str(document.get("name", name)), {k: v for k, v in document.items() if k != "name"}, where)


def make_transformer(name: str, table: Mapping[str, Any], where: str = "") -> Transformer:
    """The Transformer that a table describes; `where` begins complaints."""
    where = where or f"model '{name}'"
    known = [field.name for field in fields(Transformer) if field.name != "name"]
    for key in table:
        if key not in known:
            remedy = f"Choose from {', '.join(known)}."
            raise TraincastError(f"{where}: {make_unknown_error('field', str(key), known, remedy)}")
    for key in _NEEDED:
        if key not in table:
            raise TraincastError(f"{where}: '{key}' is missing; a Transformer needs {', '.join(_NEEDED)}")
    nested = ("latent", "experts", "mamba")
    plain = {key: _check_value(where, key, value) for key, value in table.items() if key not in nested}
    plain.setdefault("kv_heads", plain["heads"])
    plain.setdefault("ffn", 4 * plain["hidden"])
    plain.setdefault("seq_len", 2048)
    if "head_dim" not in plain:
        plain["head_dim"] = _divide_exactly(where, "hidden", plain["hidden"], "heads", plain["heads"])
    _divide_exactly(where, "heads", plain["heads"], "kv_heads", plain["kv_heads"])
    latent = _read_nested_table(where, "latent", table, LatentAttention)
    experts = _read_nested_table(where, "experts", table, Experts)
    if experts is not None and experts.top_k > experts.count:
        raise TraincastError(
            f"{where}: each token goes to {experts.top_k} of {experts.count} experts; give a smaller 'top_k'"
        )
    model = Transformer(
        name=name, latent=latent, experts=experts, mamba=_read_nested_table(where, "mamba", table, StateSpace), **plain
    )
    _check_pattern(model, where)
    return model


def _check_pattern(model: Transformer, where: str) -> None:
    """Rejects layers of modules that the description says nothing of."""
    for module, part, name in ((MIXTURE, model.experts, "experts"), (MAMBA, model.mamba, "mamba")):
        if module in model.pattern and part is None:
            raise TraincastError(f"{where}: 'pattern' has layers '{module}', and there is no '{name}'; describe them")


def _read_nested_table(where: str, key: str, table: Mapping[str, Any], kind: type[Any]) -> Any:
    """A table inside the table, as the dataclass it describes (None where it is not there)."""
    part = table.get(key)
    if part is None:
        return None
    known = [field.name for field in fields(kind)]
    if not isinstance(part, Mapping):
        raise TraincastError(f"{where}: '{key}' is {shorten_value(part)}; give a table with {', '.join(known)}")
    for name in part:
        if name not in known:
            raise TraincastError(f"{where}: {make_unknown_error(f'field of {key}', str(name), known, '')}".rstrip())
    try:
        return kind(**{name: _check_value(where, f"{key}.{name}", value) for name, value in part.items()})
    except TypeError:
        missing = next(name for name in known if name not in part)
        raise TraincastError(f"{where}: '{key}' has no '{missing}'; give {', '.join(known)}") from None


def _check_value(where: str, key: str, value: Any) -> Any:
    """A value of the kind that its field takes."""
    field = key.rpartition(".")[2]
    if field in _CHOICES:
        if value not in _CHOICES[field]:
            raise TraincastError(
                f"{where}: '{key}' is {shorten_value(value)}; choose from {', '.join(_CHOICES[field])}"
            )
        return value
    if field in _FLAGS:
        if not isinstance(value, bool):
            raise TraincastError(f"{where}: '{key}' is {shorten_value(value)}; give true or false")
        return value
    if field == "pattern":
        if not isinstance(value, str) or len(value) > 4096 or set(value) - set(f"{ATTENTION}{MAMBA}{DENSE}{MIXTURE} "):
            raise TraincastError(f"{where}: '{key}' is {shorten_value(value)}; give letters of *, M, - and E")
        return value
    least = 0 if field in _ZERO_ALLOWED or key == "experts.latent" else 1
    fits = isinstance(value, int | float if field == "capacity" else int) and not isinstance(value, bool)
    most = _MOST_OF.get(field, _MOST)
    if not fits or not least <= value <= most:
        raise TraincastError(f"{where}: '{key}' is {shorten_value(value)}; give an integer from {least} to {most}")
    return value


def _divide_exactly(where: str, first: str, whole: int, second: str, parts: int) -> int:
    if whole % parts:
        raise TraincastError(f"{where}: '{first}' {whole} is no multiple of '{second}' {parts}; give one that is")
    return whole // parts
