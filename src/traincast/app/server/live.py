"""The live page: a form made of the fields, and the place that answers are put in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from typing import Any

from traincast.app.pages.elements import Html, escape_html, join_blocks
from traincast.app.pages.page import SCRIPTS, STYLES, read_asset
from traincast.app.server.fields import DETAILS, UPLOAD, Field, list_fields, list_model_names
from traincast.models.embeddings.documents import BUILTIN_SETS
from traincast.utils.version import __version__

_OWN = ("live.css", "live.js")
ASSETS = (*STYLES, *SCRIPTS, *_OWN)
"""Files that the page is made of."""
_FIRST = {"workload": "dlrm-v2", "on": "dgx-h100", "gpus": "8"}  # what is shown before anything is asked


def read_live_asset(name: str) -> str:
    """A style or script of the page."""
    if name not in _OWN:
        return read_asset(name)
    return (files("traincast.app.server") / "assets" / name).read_text(encoding="utf-8")


def render_live_page(state: Iterable[tuple[str, str]], uploads: Sequence[Mapping[str, Any]], perfetto: str) -> str:
    """The page in a state: the values of its fields as the address has them."""
    values = dict(state) or _FIRST
    styles = "".join(f'<link rel="stylesheet" href="/assets/{name}">' for name in (*STYLES, "live.css"))
    scripts = "".join(f'<script src="/assets/{name}" defer></script>' for name in (*SCRIPTS, "live.js"))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f"<title>Traincast</title>{styles}</head><body>{read_asset('textures.svg')}"
        '<a class="skip" href="#main">Skip to the result</a>'
        '<header><p class="brand">Traincast</p><h1 id="title">How long will one training step take?</h1>'
        '<p class="sub" id="subtitle">Choose a model and a platform.</p></header>'
        f"{_make_form(values, uploads)}{_make_tools(perfetto)}"
        '<nav aria-label="Sections" id="sections" hidden><ol></ol></nav>'
        '<main id="main" tabindex="-1"><noscript><p>Controls, timeline and charts need JavaScript; the '
        '<a href="/api">API</a> does not.</p></noscript></main>'
        f'<footer><p>traincast {__version__} · <a href="/api">API</a></p></footer>{scripts}</body></html>\n'
    )


def _make_form(values: Mapping[str, str], uploads: Sequence[Mapping[str, Any]]) -> Html:
    by_group: dict[str, list[Html]] = {}
    for field in list_fields().values():
        by_group.setdefault(field.group, []).append(_make_control(field, values.get(field.name, ""), uploads))
    blocks = [Html(f'<div class="controls">{join_blocks(by_group["main"])}{_make_file_control()}</div>')]
    for group, title in DETAILS.items():
        is_open = any(values.get(f.name) for f in list_fields().values() if f.group == group)
        blocks.append(Html(
            f'<details{" open" if is_open else ""}><summary>{escape_html(title.capitalize())}</summary>'
            f'<div class="controls">{join_blocks(by_group[group])}</div></details>'
        ))  # fmt: skip
    return Html(f'<form id="question" action="/" method="get" aria-label="Question">{join_blocks(blocks)}</form>')


def _make_file_control() -> Html:
    return Html(
        '<div class="control"><label for="file">Your own file</label><input type="file" id="file" '
        'accept=".json,.gz,.tc,.yaml,.yml,.et" aria-describedby="file-help"><small id="file-help">a workload (.tc), '
        "config.json, YAML or trace; it stays on this server</small></div>"
    )


def _make_tools(perfetto: str) -> Html:
    return Html(
        f'<div class="answer-tools" data-perfetto="{escape_html(perfetto)}"><p id="said" role="status"></p>'
        '<progress id="progress" max="1" value="0" hidden aria-label="Progress"></progress>'
        '<button type="button" id="cancel" hidden>Cancel</button>'
        '<button type="button" id="perfetto" hidden>Open in Perfetto</button>'
        '<a id="save" class="button" hidden download>Save report</a><a id="json" class="button" hidden>JSON</a></div>'
    )


def _make_control(field: Field, value: str, uploads: Sequence[Mapping[str, Any]]) -> Html:
    name = escape_html(field.name)
    described = f' aria-describedby="{name}-help"' if field.help else ""
    below = f'<small id="{name}-help">{escape_html(field.help)}</small>' if field.help else ""
    if field.kind == "source":
        inner = _make_select(field, described, _list_sources(field, value, uploads))
    elif field.kind in ("choice", "flag"):
        options = field.choices if field.kind == "choice" else ("1",)
        inner = _make_select(
            field,
            described,
            join_blocks(
                [
                    _make_option("", "default" if field.name != "on" else "", value),
                    *(_make_option(choice, "yes" if field.kind == "flag" else choice, value) for choice in options),
                ]
            ),
        )
    else:
        mode = "numeric" if field.kind == "integer" else "decimal" if field.kind == "number" else "text"
        named = f'id="f-{name}" name="{name}" value="{escape_html(value)}"'
        inner = Html(f'<input {named} inputmode="{mode}" autocomplete="off"{described}>')
    return Html(f'<div class="control"><label for="f-{name}">{escape_html(field.label)}</label>{inner}{below}</div>')


def _make_select(field: Field, described: str, options: str) -> Html:
    return Html(
        f'<select id="f-{escape_html(field.name)}" name="{escape_html(field.name)}"{described}>'
        f"{escape_html(options)}</select>"
    )


def _list_sources(field: Field, value: str, uploads: Sequence[Mapping[str, Any]]) -> Html:
    """Names that a field can have: uploads, models, sets of tables; what the address says is always among them."""
    files_ = [
        (f"{UPLOAD}{known['id']}", f"{known.get('name', 'file')} ({known.get('kind', 'upload')})") for known in uploads
    ]
    groups = [("Uploads", files_)]
    if field.name == "workload":
        groups.append(("Models", [(name, name) for name in list_model_names()]))
        groups.append(("Embedding tables (sharding)", [(name, name) for name in BUILTIN_SETS]))
    known_values = {key for _, pairs in groups for key, _ in pairs}
    first = [_make_option("", "none" if field.name == "against" else "", value)]
    if value and value not in known_values:
        first.append(_make_option(value, value, value))
    return join_blocks(
        [
            *first,
            *(
                Html(
                    f'<optgroup label="{escape_html(label)}">'
                    f"{join_blocks(_make_option(key, text, value) for key, text in pairs)}</optgroup>"
                )
                for label, pairs in groups
                if pairs
            ),
        ]
    )


def _make_option(value: str, text: str, chosen: str) -> Html:
    marked = " selected" if value == chosen else ""
    return Html(f'<option value="{escape_html(value)}"{marked}>{escape_html(text)}</option>')
