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
    NORMS,
    POSITIONS,
    Experts,
    LatentAttention,
    Transformer,
)
from traincast.models.transformers.hugging_face import is_hugging_face, read_hugging_face_config
from traincast.utils.errors import TraincastError, make_unknown_error, shorten_value
from traincast.utils.files.reading import format_path, parse_toml, read_document

_MOST = 1 << 24  # of any size: several times the largest vocabulary or sequence anybody trains with
_MOST_OF = {"layers": 1024, "encoder_layers": 1024, "count": 65536}  # each is written op by op
_CHOICES = {"norm": NORMS, "activation": ACTIVATIONS, "position": POSITIONS}
_FLAGS = ("bias", "qkv_bias", "qk_norm", "tied", "joined", "causal")
_ZERO_ALLOWED = (
    "window", "encoder_layers", "patch_inputs", "shared_ffn", "dense_layers", "q_rank", "capacity", "rope_dim",
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
    plain = {key: _check_value(where, key, value) for key, value in table.items() if key not in ("latent", "experts")}
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
    return Transformer(name=name, latent=latent, experts=experts, **plain)


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
    least = 0 if field in _ZERO_ALLOWED else 1
    fits = isinstance(value, int | float if field == "capacity" else int) and not isinstance(value, bool)
    most = _MOST_OF.get(field, _MOST)
    if not fits or not least <= value <= most:
        raise TraincastError(f"{where}: '{key}' is {shorten_value(value)}; give an integer from {least} to {most}")
    return value


def _divide_exactly(where: str, first: str, whole: int, second: str, parts: int) -> int:
    if whole % parts:
        raise TraincastError(f"{where}: '{first}' {whole} is no multiple of '{second}' {parts}; give one that is")
    return whole // parts
