"""The live page: a form made of the fields, and the place that answers are put in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from typing import Any

from traincast.app.pages.elements import Html, joined, safe
from traincast.app.pages.page import SCRIPTS, STYLES, asset
from traincast.app.server.fields import DETAILS, UPLOAD, Field, fields, model_names
from traincast.models.embeddings.builtin import BUILTIN_SETS
from traincast.utils.version import __version__

_OWN = ("live.css", "live.js")
ASSETS = (*STYLES, *SCRIPTS, *_OWN)
"""Files that the page is made of."""
_FIRST = {"workload": "dlrm-v2", "on": "dgx-h100", "gpus": "8"}  # what is shown before anything is asked


def live_asset(name: str) -> str:
    """A style or script of the page."""
    if name not in _OWN:
        return asset(name)
    return (files("traincast.app.server") / "assets" / name).read_text(encoding="utf-8")


def live_html(state: Iterable[tuple[str, str]], uploads: Sequence[Mapping[str, Any]], perfetto: str) -> str:
    """The page in a state: the values of its fields as the address has them."""
    values = dict(state) or _FIRST
    styles = "".join(f'<link rel="stylesheet" href="/assets/{name}">' for name in (*STYLES, "live.css"))
    scripts = "".join(f'<script src="/assets/{name}" defer></script>' for name in (*SCRIPTS, "live.js"))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f"<title>Traincast</title>{styles}</head><body>{asset('textures.svg')}"
        '<a class="skip" href="#main">Skip to the result</a>'
        '<header><p class="brand">Traincast</p><h1 id="title">How long will one training step take?</h1>'
        '<p class="sub" id="subtitle">Choose a model and a platform.</p></header>'
        f"{_form(values, uploads)}{_tools(perfetto)}"
        '<nav aria-label="Sections" id="sections" hidden><ol></ol></nav>'
        '<main id="main" tabindex="-1"><noscript><p>Controls, timeline and charts need JavaScript; the '
        '<a href="/api">API</a> does not.</p></noscript></main>'
        f'<footer><p>traincast {__version__} · <a href="/api">API</a></p></footer>{scripts}</body></html>\n'
    )


def _form(values: Mapping[str, str], uploads: Sequence[Mapping[str, Any]]) -> Html:
    by_group: dict[str, list[Html]] = {}
    for field in fields().values():
        by_group.setdefault(field.group, []).append(_control(field, values.get(field.name, ""), uploads))
    blocks = [Html(f'<div class="controls">{joined(by_group["main"])}{_file_control()}</div>')]
    for group, title in DETAILS.items():
        is_open = any(values.get(f.name) for f in fields().values() if f.group == group)
        blocks.append(Html(
            f'<details{" open" if is_open else ""}><summary>{safe(title.capitalize())}</summary>'
            f'<div class="controls">{joined(by_group[group])}</div></details>'
        ))  # fmt: skip
    return Html(f'<form id="question" action="/" method="get" aria-label="Question">{joined(blocks)}</form>')


def _file_control() -> Html:
    return Html(
        '<div class="control"><label for="file">Your own file</label><input type="file" id="file" '
        'accept=".json,.gz,.tc,.yaml,.yml,.et" aria-describedby="file-help"><small id="file-help">a workload (.tc), '
        "config.json, YAML or trace; it stays on this server</small></div>"
    )


def _tools(perfetto: str) -> Html:
    return Html(
        f'<div class="answer-tools" data-perfetto="{safe(perfetto)}"><p id="said" role="status"></p>'
        '<progress id="progress" max="1" value="0" hidden aria-label="Progress"></progress>'
        '<button type="button" id="cancel" hidden>Cancel</button>'
        '<button type="button" id="perfetto" hidden>Open in Perfetto</button>'
        '<a id="save" class="button" hidden download>Save report</a><a id="json" class="button" hidden>JSON</a></div>'
    )


def _control(field: Field, value: str, uploads: Sequence[Mapping[str, Any]]) -> Html:
    name = safe(field.name)
    described = f' aria-describedby="{name}-help"' if field.help else ""
    below = f'<small id="{name}-help">{safe(field.help)}</small>' if field.help else ""
    if field.kind == "source":
        inner = _select(field, described, _sources(field, value, uploads))
    elif field.kind in ("choice", "flag"):
        options = field.choices if field.kind == "choice" else ("1",)
        inner = _select(field, described, joined([_option("", "as usual" if field.name != "on" else "", value), *(
            _option(choice, "yes" if field.kind == "flag" else choice, value) for choice in options)]))  # fmt: skip
    else:
        mode = "numeric" if field.kind == "integer" else "decimal" if field.kind == "number" else "text"
        named = f'id="f-{name}" name="{name}" value="{safe(value)}"'
        inner = Html(f'<input {named} inputmode="{mode}" autocomplete="off"{described}>')
    return Html(f'<div class="control"><label for="f-{name}">{safe(field.label)}</label>{inner}{below}</div>')


def _select(field: Field, described: str, options: str) -> Html:
    return Html(f'<select id="f-{safe(field.name)}" name="{safe(field.name)}"{described}>{safe(options)}</select>')


def _sources(field: Field, value: str, uploads: Sequence[Mapping[str, Any]]) -> Html:
    """Names that a field can have: uploads, models, sets of tables; what the address says is always among them."""
    files_ = [(f"{UPLOAD}{known['id']}", f"{known.get('name', 'file')} ({known.get('kind', 'upload')})")
              for known in uploads]  # fmt: skip
    groups = [("Uploads", files_)]
    if field.name == "workload":
        groups.append(("Models", [(name, name) for name in model_names()]))
        groups.append(("Embedding tables (sharding)", [(name, name) for name in BUILTIN_SETS]))
    known_values = {key for _, pairs in groups for key, _ in pairs}
    first = [_option("", "none" if field.name == "against" else "", value)]
    if value and value not in known_values:
        first.append(_option(value, value, value))
    return joined([*first, *(
        Html(f'<optgroup label="{safe(label)}">{joined(_option(key, text, value) for key, text in pairs)}</optgroup>')
        for label, pairs in groups if pairs)])  # fmt: skip


def _option(value: str, text: str, chosen: str) -> Html:
    marked = " selected" if value == chosen else ""
    return Html(f'<option value="{safe(value)}"{marked}>{safe(text)}</option>')
