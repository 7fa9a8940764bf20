"""The API described: one document for programs (OpenAPI 3.1), and the same as a page for people."""

from __future__ import annotations

from functools import cache
from typing import Any

from traincast.app.pages.elements import Html, escape_html, join_blocks, make_paragraph, make_table
from traincast.app.pages.page import STYLES
from traincast.app.server.fields import list_fields
from traincast.app.server.request import FORMS
from traincast.utils.version import __version__

_ID = {"type": "string", "pattern": "^[0-9a-f]{32}$"}
_ERROR = {
    "type": "object", "required": ["error"],
    "properties": {"error": {"type": "object", "required": ["field", "message"], "properties": {
        "field": {"type": "string", "description": "what is wrong; empty where it is no field"},
        "message": {"type": "string"}}}},
}  # fmt: skip
_JOB = {
    "type": "object", "required": ["id", "status", "progress", "form", "question"],
    "properties": {
        "id": _ID, "progress": {"type": "number", "minimum": 0, "maximum": 1}, "form": {"type": "string"},
        "status": {"type": "string", "enum": ["waiting", "running", "finished", "failed", "cancelled"]},
        "question": {"type": "object"}, "error": {"type": "object"},
    },
}  # fmt: skip
_UPLOAD = {
    "type": "object", "required": ["id"],
    "properties": {"id": _ID, "name": {"type": "string"}, "bytes": {"type": "integer"},
                   "kind": {"type": "string", "enum": ["trace", "workload", "description"]},
                   "title": {"type": "string"}, "made": {"type": "number"}},
}  # fmt: skip
_SAYS = {
    "answer": "the result as plain data, the JSON document that the command line prints",
    "page": "title, sections as HTML and the data of charts, as the live page shows them",
    "report": "the result as one self-contained HTML file",
    "trace": "the timeline as a Chrome trace, which Perfetto opens",
}


@cache
def make_document() -> dict[str, Any]:
    """The OpenAPI document."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Traincast",
            "version": __version__,
            "description": "How long will one training step of this model take on that hardware, and why?",
        },
        "paths": {
            **{f"/api/{form}": {"get": _describe_asking(form)} for form in FORMS},
            **_describe_job_paths(),
            **_describe_upload_paths(),
            **_describe_list_paths(),
        },
        "components": {
            "schemas": {"Error": _ERROR, "Job": _JOB, "Upload": _UPLOAD},
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _describe_asking(form: str) -> dict[str, Any]:
    kind = "text/html" if form == "report" else "application/json"
    body = {"schema": {"type": "string" if form == "report" else "object"}}
    return {
        "summary": f"Ask a question: {_SAYS[form]}",
        "operationId": f"get_{form}",
        "parameters": [
            {"name": field.name, "in": "query", "required": field.name == "workload", "schema": field.schema(),
             "description": "; ".join(part for part in (field.label, field.help) if part)}
            for field in list_fields().values()
        ],
        "responses": {"200": {"description": _SAYS[form], "content": {kind: body}},
                      "202": _describe_job_response("a job that works on it"),
                      **_describe_rejections("404", "422", "429")},
    }  # fmt: skip


def _describe_job_paths() -> dict[str, Any]:
    key = [{"name": "id", "in": "path", "required": True, "schema": _ID}]
    properties: dict[str, Any] = {field.name: field.schema() for field in list_fields().values()}
    properties["form"] = {"type": "string", "enum": list(FORMS)}
    request = {"type": "object", "required": ["workload"], "properties": properties, "additionalProperties": False}
    return {
        "/api/jobs": {
            "post": {
                "summary": "Have a question worked on; it is kept over a restart of the server",
                "operationId": "post_job",
                "requestBody": {"required": True, "content": {"application/json": {"schema": request}}},
                "responses": {
                    "202": _describe_job_response("the job"),
                    **_describe_rejections("404", "408", "413", "415", "422", "429"),
                },
            }
        },
        "/api/jobs/{id}": {
            "get": {
                "summary": "How far a job is",
                "operationId": "get_job",
                "parameters": key,
                "responses": {"200": _describe_job_response("the job"), **_describe_rejections("404")},
            },
            "delete": {
                "summary": "Cancel a job",
                "operationId": "delete_job",
                "parameters": key,
                "responses": {"200": _describe_job_response("the job"), **_describe_rejections("404")},
            },
        },
        "/api/jobs/{id}/result": {
            "get": {
                "summary": "What a finished job made",
                "operationId": "get_job_result",
                "parameters": key,
                "responses": {
                    "200": {
                        "description": "the result in the form that was asked for",
                        "content": {"application/json": {}, "text/html": {}},
                    },
                    **_describe_rejections("404", "409", "422", "429"),
                },
            }
        },
    }


def _describe_upload_paths() -> dict[str, Any]:
    key = [{"name": "id", "in": "path", "required": True, "schema": _ID}]
    one = {"content": {"application/json": {"schema": {"$ref": "#/components/schemas/Upload"}}}}
    many = {"type": "array", "items": {"$ref": "#/components/schemas/Upload"}}
    name = {"name": "name", "in": "query", "required": True, "schema": {"type": "string", "maxLength": 120},
            "description": "the file's name; its ending says what it is"}  # fmt: skip
    return {
        "/api/uploads": {
            "post": {"summary": "Upload a workload (.tc), a description (YAML, config.json) or a trace",
                     "operationId": "post_upload", "parameters": [name],
                     "requestBody": {"required": True, "content": {"application/octet-stream": {
                         "schema": {"type": "string", "format": "binary"}}}},
                     "responses": {"201": {"description": "the upload", **one},
                                   **_describe_rejections("408", "413", "415", "422", "429")}},
            "get": {"summary": "Every upload", "operationId": "get_uploads",
                    "responses": {"200": {"description": "uploads",
                                          "content": {"application/json": {"schema": many}}}}}},
        "/api/uploads/{id}": {
            "get": {"summary": "What is known of an upload", "operationId": "get_upload", "parameters": key,
                    "responses": {"200": {"description": "the upload", **one}, **_describe_rejections("404")}},
            "delete": {"summary": "Remove an upload", "operationId": "delete_upload", "parameters": key,
                       "responses": {"204": {"description": "removed"}, **_describe_rejections("404")}}},
    }  # fmt: skip


def _describe_list_paths() -> dict[str, Any]:
    rows = {"application/json": {"schema": {"type": "array", "items": {"type": "object"}}}}
    any_object = {"application/json": {"schema": {"type": "object"}}}
    told = {"models": ("Models that are built in", rows), "platforms": ("GPUs and nodes that are built in", rows),
            "health": ("Whether the server answers", any_object)}  # fmt: skip
    return {
        f"/api/{name}": {"get": {"summary": summary, "operationId": f"get_{name}",
                                 "responses": {"200": {"description": summary, "content": content}}}}
        for name, (summary, content) in told.items()
    }  # fmt: skip


def _describe_job_response(notes: str) -> dict[str, Any]:
    return {
        "description": notes, "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Job"}}}
    }  # fmt: skip


def _describe_rejections(*statuses: str) -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    notes = {"404": "there is no such thing", "408": "too slow", "409": "not finished", "413": "too large",
            "415": "of no known kind", "422": "a field is wrong; it is named", "429": "too many questions wait",
            "400": "not a request", "401": "the token is missing", "403": "from another site"}  # fmt: skip
    return {status: {"description": notes[status], "content": content} for status in ("400", "401", "403", *statuses)}


@cache
def render_api_page() -> str:
    """The document as a page."""
    styles = "".join(f'<link rel="stylesheet" href="/assets/{name}">' for name in (*STYLES, "live.css"))
    sections = join_blocks(
        _describe_operation(path, method, operation)
        for path, methods in make_document()["paths"].items()
        for method, operation in methods.items()
    )
    note = make_paragraph(
        "Every rejection is JSON that names the field and what to do. Answers that take long come as jobs (202): ask "
        "for "
        "their status, then for their result."
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><link rel="icon" href="data:,">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<title>Traincast API</title>{styles}</head><body><header><p class="brand">Traincast</p><h1>API</h1>'
        '<p class="sub"><a href="/api/openapi.json">openapi.json</a> · <a href="/">the live page</a></p></header>'
        f"<main>{note}{sections}</main></body></html>\n"
    )


def _describe_operation(path: str, method: str, operation: dict[str, Any]) -> Html:
    rows = [
        (parameter["name"], "yes" if parameter["required"] else "", _name_kind(parameter["schema"]),
         parameter.get("description", ""))
        for parameter in operation.get("parameters", ())
    ]  # fmt: skip
    results = [(status, response["description"]) for status, response in operation["responses"].items()]
    name = f"{method.upper()} {path}"
    blocks = [Html(f"<h2>{escape_html(name)}</h2>"), make_paragraph(operation["summary"])]
    if rows:
        blocks.append(make_table(("parameter", "needed", "is", "what"), rows, caption=f"Parameters of {name}"))
    blocks.append(make_table(("status", "means"), results, caption=f"Answers of {name}"))
    return Html(f"<section>{join_blocks(blocks)}</section>")


def _name_kind(schema: dict[str, Any]) -> str:
    if "enum" in schema:
        shown = ", ".join(schema["enum"][:8])
        return f"one of {shown}{' ...' if len(schema['enum']) > 8 else ''}"
    if "minimum" in schema:
        return f"{schema['type']}, {schema['minimum']:,.12g} to {schema['maximum']:,.12g}"
    return str(schema["type"])
