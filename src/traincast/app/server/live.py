"""The live page: a form made of the fields, and the place that answers are put in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from typing import Any

from traincast.app.api import list_platforms
from traincast.app.pages.page import SCRIPTS, STYLES, Html, escape_html, join_blocks, read_asset
from traincast.app.server.fields import DETAILS, UPLOAD, Field, list_fields
from traincast.simulator.scenario.catalog import GROUPS, list_built_in_models
from traincast.utils.version import __version__

_OWN = ("live.css", "live.js")
ASSETS = (*STYLES, *SCRIPTS, *_OWN)
"""Files that the page is made of."""
_TASKS = (
    ("Predict a step", "how long, what bounds it, whether it fits", "workload=dlrm-default&on=v100&batch_size=2048"),
    ("Compare GPUs", "time, memory and dollars side by side",
     "of=compare&workload=resnet50&on=v100&also=a100-80gb,h100&batch_size=128"),
    ("Does it fit?", "what fills the memory, and what would help", "of=fits&workload=llama3-8b&on=dgx-h100&gpus=8"),
    ("Plan a layout", "how to lay a Transformer over GPUs", "of=plan&workload=llama3-8b&on=dgx-h100&gpus=8"),
    ("Shard tables", "which GPU holds which embedding table",
     "of=sharding&workload=mlperf-dlrm-v2&on=dgx-a100&gpus=8&batch_size=8192"),
    ("What if?", "what a change would bring, and whether that is certain",
     "workload=bert-large&on=a100-80gb&edits=dtype=bf16"),
    ("Sweep", "many points in one picture",
     "of=sweep&workload=resnet50&on=v100&vary=on%3Dv100,a100-80gb,h100+batch-size%3D32,64,128"),
    ("Explain a trace", "upload what torch.profiler wrote", ""),
)  # fmt: skip
"""What people come for: a title, a line, and the query of an example ("": it begins with a file)."""
_ONLY_OF = {"also": "compare", "vary": "sweep", "edits": "prediction", "scaling": "prediction", "against": "trace"}
"""Fields that the form has only beside one kind of question."""


def read_live_asset(name: str) -> str:
    """A style or script of the page."""
    if name not in _OWN:
        return read_asset(name)
    return (files("traincast.app.server") / "assets" / name).read_text(encoding="utf-8")


def render_live_page(state: Iterable[tuple[str, str]], uploads: Sequence[Mapping[str, Any]], perfetto: str) -> str:
    """The page in a state: the values of its fields as the address has them."""
    values = dict(state)
    styles = "".join(f'<link rel="stylesheet" href="/assets/{name}">' for name in (*STYLES, "live.css"))
    scripts = "".join(f'<script src="/assets/{name}" defer></script>' for name in (*SCRIPTS, "live.js"))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f"<title>Traincast</title>{styles}</head><body>{read_asset('textures.svg')}"
        '<a class="skip" href="#main">Skip to the result</a>'
        '<header><p class="brand"><a href="/">Traincast</a></p>'
        '<h1 id="title">How long will one training step take?</h1>'
        '<p class="sub" id="subtitle">Choose a task, or a model and a platform.</p></header>'
        f"{'' if values else _list_tasks()}{_make_form(values, uploads)}{_make_tools(perfetto)}"
        '<nav aria-label="Sections" id="sections" hidden><ol></ol></nav><div id="answers">'
        '<aside id="kept" aria-label="The answer that was kept" hidden></aside>'
        '<main id="main" tabindex="-1"><noscript><p>Controls, timeline and charts need JavaScript; the '
        '<a href="/api">API</a> does not.</p></noscript></main></div>'
        f'<footer><p>traincast {__version__} · <a href="/api">API</a></p></footer>{scripts}</body></html>\n'
    )


def _list_tasks() -> Html:
    """The home page: what can be asked, each with an example to change."""
    cards = [
        f'<li><a href="{"/?" + escape_html(query) if query else "#file"}"><b>{escape_html(title)}</b>'
        f"<span>{escape_html(line)}</span></a></li>"
        for title, line, query in _TASKS
    ]
    return Html(f'<nav class="tasks" aria-label="Tasks"><ul>{"".join(cards)}</ul></nav>')


def _make_form(values: Mapping[str, str], uploads: Sequence[Mapping[str, Any]]) -> Html:
    by_group: dict[str, list[Html]] = {}
    for field in list_fields().values():
        by_group.setdefault(field.group, []).append(_make_control(field, values.get(field.name, ""), uploads))
    main = Html(f'<div class="controls">{join_blocks(by_group["main"])}{_make_file_control()}</div>')
    blocks = []
    for group, title in DETAILS.items():
        is_open = any(values.get(f.name) for f in list_fields().values() if f.group == group)
        blocks.append(Html(
            f'<details{" open" if is_open else ""}><summary>{escape_html(title.capitalize())}</summary>'
            f'<div class="controls">{join_blocks(by_group[group])}</div></details>'
        ))  # fmt: skip
    return Html(
        f'<form id="question" action="/" method="get" aria-label="Question">{main}'
        f'<div class="folds">{join_blocks(blocks)}</div></form>'
    )


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
        '<button type="button" id="keep" hidden>Keep beside the next answer</button>'
        '<button type="button" id="perfetto" hidden>Open in Perfetto</button>'
        '<a id="save" class="button" hidden download>Save report</a><a id="json" class="button" hidden>JSON</a></div>'
    )


def _make_control(field: Field, value: str, uploads: Sequence[Mapping[str, Any]]) -> Html:
    name = escape_html(field.name)
    described = f' aria-describedby="{name}-help"' if field.help else ""
    below = f'<small id="{name}-help">{escape_html(field.help)}</small>' if field.help else ""
    if field.kind == "source":
        inner = _make_select(field, described, _list_sources(field, value, uploads))
    elif field.name == "on":
        inner = _make_select(field, described, _list_platforms(value))
    elif field.kind in ("choice", "flag"):
        options = field.choices if field.kind == "choice" else ("1",)
        usual = "prediction" if field.name == "of" else "default"
        inner = _make_select(
            field,
            described,
            join_blocks(
                [
                    _make_option("", usual, value),
                    *(
                        _make_option(choice, "yes" if field.kind == "flag" else choice, value)
                        for choice in options
                        if choice != usual or value == usual
                    ),
                ]
            ),
        )
    else:
        mode = "numeric" if field.kind == "integer" else "decimal" if field.kind == "number" else "text"
        named = f'id="f-{name}" name="{name}" value="{escape_html(value)}"'
        inner = Html(f'<input {named} inputmode="{mode}" autocomplete="off"{described}>')
    only = f' data-of="{_ONLY_OF[field.name]}"' if field.name in _ONLY_OF else ""
    label = f'<label for="f-{name}">{escape_html(field.label)}</label>'
    return Html(f'<div class="control"{only}>{label}{inner}{below}</div>')


def _make_select(field: Field, described: str, options: str) -> Html:
    return Html(
        f'<select id="f-{escape_html(field.name)}" name="{escape_html(field.name)}"{described}>'
        f"{escape_html(options)}</select>"
    )


def _list_sources(field: Field, value: str, uploads: Sequence[Mapping[str, Any]]) -> Html:
    """Names that a field can have: uploads, and models and sets of tables by group."""
    files_ = [
        (f"{UPLOAD}{known['id']}", f"{known.get('name', 'file')} ({known.get('kind', 'upload')})") for known in uploads
    ]
    groups = [("Uploads", files_)]
    if field.name == "workload":
        named = list_built_in_models()
        groups += [
            (group.capitalize(), [(one.info.name, one.info.name) for one in named if one.group == group])
            for group in GROUPS
        ]
    return _make_groups(groups, "none" if field.name == "against" else "", value)


def _list_platforms(value: str) -> Html:
    """Platforms by how many GPUs they have."""
    rows = [(str(row["platform"]), int(row["gpus_per_node"])) for row in list_platforms().to_dict()]
    groups = [
        ("One GPU", [(name, name) for name, gpus in rows if gpus == 1]),
        ("Nodes of several GPUs", [(name, name) for name, gpus in rows if gpus > 1]),
    ]
    return _make_groups(groups, "", value)


def _make_groups(groups: Sequence[tuple[str, Sequence[tuple[str, str]]]], empty: str, value: str) -> Html:
    """Options under the names of their groups; what the address says is always among them."""
    known = {key for _, pairs in groups for key, _ in pairs}
    first = [
        _make_option("", empty, value),
        *([_make_option(value, value, value)] if value and value not in known else []),
    ]
    shown = [
        Html(
            f'<optgroup label="{escape_html(label)}">'
            f"{join_blocks(_make_option(key, text, value) for key, text in pairs)}</optgroup>"
        )
        for label, pairs in groups
        if pairs
    ]
    return join_blocks([*first, *shown])


def _make_option(value: str, text: str, chosen: str) -> Html:
    marked = " selected" if value == chosen else ""
    return Html(f'<option value="{escape_html(value)}"{marked}>{escape_html(text)}</option>')
