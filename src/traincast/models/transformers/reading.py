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
    "hidden": ("hidden_size", "n_embd", "d_model", "dim"),
    "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads"),
    "head_dim": ("head_dim", "d_kv"),
    "ffn": ("intermediate_size", "n_inner", "d_ff", "ffn_dim", "hidden_dim"),
    "vocab": ("vocab_size",),
}
_GATED = {"silu": "swiglu", "swish": "swiglu", "swiglu": "swiglu", "gelu": "geglu"}
_PLAIN = {"gelu": "gelu", "relu": "relu", "relu2": "relu2"}
_GELU_BY_OPS = ("gelu_new", "gelu_fast")


def is_hugging_face(document: Mapping[str, Any]) -> bool:
    """Whether a document is a configuration of Hugging Face."""
    return "model_type" in document or "architectures" in document


def read_hugging_face_config(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The fields of a description; a family nobody knows is rejected by name."""
    family = str(config.get("model_type", ""))
    traits = load_families().get(family)
    if traits is None:
        inside = config.get("text_config")
        if isinstance(inside, Mapping) and inside.get("model_type") in load_families():
            remedy = (
                "this is a model of more than text: give its 'text_config' as a file of its own for that part alone"
            )
        else:
            remedy = f"known are {', '.join(sorted(load_families()))}; describe the model in a short YAML instead"
        raise TraincastError(f"{where}: model_type {shorten_value(family)} is not known; {remedy}")
    table = {field: value for field, names in _SIZES.items() if (value := _take_first_field(config, names)) is not None}
    if family in ("falcon", "gpt_bigcode"):
        table["kv_heads"] = _count_falcon_kv_heads(config, table)
    table |= {name: traits[name] for name in ("joined", "post_norm") if name in traits}
    said = _take_first_field(config, ("use_qk_norm", "qk_layernorm"))
    table["qk_norm"] = bool(traits.get("qk_norm", False) if said is None else said)
    table["norm"] = traits.get("norm", "rms_by_ops")
    table["activation"] = _read_activation(config, traits, where)
    table["tied"] = bool(config.get("tie_word_embeddings", traits.get("tied", False)))
    table["causal"] = traits.get("causal", True)
    table |= _read_biases(config, traits)
    table["position"] = traits.get("position", "rotary")
    if table["position"] == "relative":
        table["encoder_layers"] = table.get("layers", 0)
        table["layers"] = config.get("num_decoder_layers") or table["encoder_layers"]
    if family == "vit":
        table |= _read_patches(config, where)
        labels = config.get("id2label")
        classes = len(labels) if isinstance(labels, Mapping) else 2  # as the class counts them
        table.setdefault("vocab", _read_size(config, "num_labels", classes, where))
    positions = _take_first_field(config, ("max_position_embeddings", "n_positions", "max_seq_len"))
    if isinstance(positions, int) and family != "vit":
        table["seq_len"] = min(positions, 8192)  # a context is longer than what a step trains with
    if config.get("use_sliding_window", True) and isinstance(config.get("sliding_window"), int):
        table |= _read_windows(config, traits, where)
    if family.startswith(("deepseek", "kimi")):
        _add_latent(table, config)
    _add_experts(table, config, where)
    return table


def _count_falcon_kv_heads(config: Mapping[str, Any], table: Mapping[str, Any]) -> Any:
    """Heads of keys and values: `num_kv_heads` counts in the newer architecture only, else there is one or one each."""
    if config.get("new_decoder_architecture"):
        return table.get("kv_heads", table.get("heads"))
    return 1 if config.get("multi_query", True) else table.get("heads")


def _read_activation(config: Mapping[str, Any], traits: Mapping[str, Any], where: str) -> str:
    """What stands between the projections of a feed-forward network: gated or not is the class's, the rest is said."""
    said = str(config.get("feed_forward_proj") or "").lower()  # T5: "relu" or "gated-gelu"
    gated = said.startswith("gated") if said else traits.get("gated", True)
    names = ("hidden_act", "activation_function", "hidden_activation", "activation")
    act = said.removeprefix("gated-") or str(_take_first_field(config, names) or traits.get("hidden_act", "silu"))
    if act in _GELU_BY_OPS and not gated:
        return "gelu_new"
    kinds = _GATED if gated else _PLAIN
    known = "gelu" if "gelu" in act and act != "quick_gelu" else act
    if known not in kinds:
        raise TraincastError(
            f"{where}: the activation {shorten_value(act)} is not known of {'gated' if gated else 'plain'} "
            f"feed-forward networks; choose from {', '.join(kinds)}"
        )
    return kinds[known]


def _read_biases(config: Mapping[str, Any], traits: Mapping[str, Any]) -> dict[str, bool]:
    """Biases of all projections, or of query, key and value alone in classes that have no others."""
    alone = "qkv_bias" in traits
    names = ("attention_bias", "use_qkv_bias", "qkv_bias") if alone else ("bias", "use_bias", "attention_bias")
    said = _take_first_field(config, names)
    bias = bool(traits.get("qkv_bias", traits.get("bias", False)) if said is None else said)
    return {"bias": bias and not alone, "qkv_bias": bias}


def _read_patches(config: Mapping[str, Any], where: str) -> dict[str, int]:
    """Values of a patch, and how many there are with the class token."""
    patch, image = _read_size(config, "patch_size", 16, where), _read_size(config, "image_size", 224, where)
    if image < patch:
        raise TraincastError(f"{where}: 'image_size' {image} is smaller than 'patch_size' {patch}; give a larger one")
    return {"patch_inputs": 3 * patch * patch, "seq_len": (image // patch) ** 2 + 1}


def _read_windows(config: Mapping[str, Any], traits: Mapping[str, Any], where: str) -> dict[str, int]:
    """The sliding window, and of which layers: `layer_types` where a configuration has it, else the class's pattern."""
    types, window = config.get("layer_types"), {"window": config["sliding_window"]}
    if not isinstance(types, list) or not types:
        return {**window, "full_every": traits.get("full_every", 0)}
    slides = [kind == "sliding_attention" for kind in types]
    if not any(slides):
        return {}
    every = slides.index(False) + 1 if not all(slides) else 0
    if slides != [not every or (layer + 1) % every != 0 for layer in range(len(types))]:
        raise TraincastError(
            f"{where}: 'layer_types' repeats no pattern of windows; describe the model in a short YAML"
        )
    return {**window, "full_every": every}


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
    count = _take_first_field(config, ("num_local_experts", "n_routed_experts", "num_experts", "moe_num_experts"))
    if not count:
        return
    width = _read_size(config, "moe_intermediate_size", table.get("ffn"), where)
    shared = _read_size(config, "n_shared_experts", config.get("moe_num_shared_experts") or 0, where) * width
    shared = _read_size(config, "shared_expert_intermediate_size", shared, where)
    table["experts"] = {
        "count": count,
        "top_k": _take_first_field(config, ("num_experts_per_tok", "experts_per_token", "moe_k")) or 2,
        "ffn": width,
        "shared_ffn": shared,
        "dense_layers": _take_first_field(config, ("first_k_dense_replace", "moe_layer_start_index")) or 0,
        "every": _take_first_field(config, ("decoder_sparse_step", "moe_layer_freq", "moe_layer_interval")) or 1,
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
_FLAGS = ("bias", "qkv_bias", "qk_norm", "post_norm", "tied", "joined", "causal")
_ZERO_ALLOWED = (
    "window", "full_every", "encoder_layers", "patch_inputs", "shared_ffn", "dense_layers", "q_rank", "capacity",
    "rope_dim", "decoder_len",
)  # fmt: skip
_NEEDED = ("layers", "hidden", "heads", "vocab")
_FAMILY = "family "


def _load_table(name: str) -> dict[str, Any]:
    return parse_toml((files("traincast.models.transformers") / "data" / name).read_text(encoding="utf-8"), name)


@cache
def load_families() -> dict[str, dict[str, Any]]:
    """What the class of each `model_type` of Hugging Face does, by that name."""
    return _load_table("families.toml")


@cache
def load_built_in_tables() -> dict[str, dict[str, Any]]:
    """The tables of the built-in models by name, what families share filled in."""
    tables = _load_table("models.toml")
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
