"""Small sound traces and the ways in which a file gets damaged."""

from __future__ import annotations

import gzip
import json
import random


def kineto_events(steps=2, ops=6):
    """A timeline: every op launches one kernel, every step ends with a synchronisation."""
    events, clock, correlation = [], 1_700_000_000_000_000, 1
    for step in range(steps):
        begin = clock
        for op in range(ops):
            events.append(
                _x(
                    "cpu_op",
                    f"aten::op{op}",
                    100,
                    100,
                    clock,
                    20,
                    {"External id": correlation, "Input Dims": [[4, 4]], "Input type": ["float"]},
                )
            )
            events.append(
                _x(
                    "cuda_runtime",
                    "cudaLaunchKernel",
                    100,
                    100,
                    clock + 5,
                    5,
                    {"External id": correlation, "correlation": correlation},
                )
            )
            events.append(
                _x(
                    "kernel",
                    f"kernel_{op}<float>",
                    0,
                    7,
                    clock + 12,
                    10,
                    {"External id": correlation, "correlation": correlation, "stream": 7, "device": 0},
                )
            )
            clock, correlation = clock + 25, correlation + 1
        events.append(_x("cuda_runtime", "cudaDeviceSynchronize", 100, 100, clock, 5, {"correlation": correlation}))
        clock, correlation = clock + 6, correlation + 1
        events.insert(0, _x("user_annotation", f"ProfilerStep#{step}", 100, 100, begin, clock - begin, {}))
    return events


def _x(cat, name, pid, tid, ts, dur, args):
    return {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": dur, "args": args}


def kineto_document(**options):
    return {
        "schemaVersion": 1,
        "deviceProperties": [{"id": 0, "name": "Test GPU"}, {"id": 1, "name": "Other"}],
        "distributedInfo": {"rank": 0, "world_size": 1},
        "traceEvents": kineto_events(**options),
        "traceName": "small",
    }


def execution_document(nodes=8):
    return {
        "schema": "1.0.1",
        "pid": 1,
        "nodes": [
            {"name": "root", "id": 1, "rf_id": 0, "parent": 1, "seq_id": -1, "scope": 7, "tid": 0},
            *(
                {"name": f"aten::op{i}", "id": i, "rf_id": i, "parent": 1, "fw_parent": 0, "seq_id": i, "scope": 0,
                 "tid": 1, "inputs": [[i, i, 0, 16, 4, "cuda:0"]], "input_shapes": [[4, 4]],
                 "input_types": ["Tensor(float)"], "output_shapes": [[4]], "output_types": ["Tensor(float)"]}
                for i in range(2, nodes + 2)
            ),
        ],
    }  # fmt: skip


def chakra_bytes(nodes=8):
    def varint(value):
        out = bytearray()
        while value > 127:
            out.append(value & 127 | 128)
            value >>= 7
        return bytes([*out, value])

    def text(field, value):
        return varint(field << 3 | 2) + varint(len(value)) + value

    messages = [text(1, b"0.0.4")]
    for i in range(1, nodes + 1):
        deps = varint(5 << 3 | 2) + varint(1) + varint(i - 1) if i > 1 else b""
        messages.append(varint(8) + varint(i) + text(2, b"op%d" % i) + varint(24) + varint(4) + deps)
    return b"".join(varint(len(m)) + m for m in messages)


def truncations(data, count):
    return [(f"cut at {len(data) * i // count}", data[: len(data) * i // count]) for i in range(count)]


def flips(data, count, seed=0):
    """Single bytes changed at random."""
    rng = random.Random(seed)
    damaged = []
    for i in range(count):
        copy = bytearray(data)
        for _ in range(1 + i % 5):
            copy[rng.randrange(len(copy))] = rng.randrange(256)
        damaged.append((f"flip {i}", bytes(copy)))
    return damaged


def wrong_values():
    """Every field of one event replaced by things that do not belong there."""
    nasty = [None, True, -1, 2**70, -(2**70), 1e308, "text", [], {}, [[[]]], {"a": {"b": []}}, "9" * 400]
    cases = []
    for field in ("ph", "cat", "name", "pid", "tid", "ts", "dur", "args"):
        for value in nasty:
            document = kineto_document()
            document["traceEvents"][3][field] = value
            cases.append((f"{field} = {str(value)[:20]}", json.dumps(document).encode()))
    for field in ("External id", "correlation", "stream", "device", "Input Dims", "bytes"):
        for value in nasty:
            document = kineto_document()
            document["traceEvents"][4]["args"][field] = value
            cases.append((f"args.{field} = {str(value)[:20]}", json.dumps(document).encode()))
    return cases


def oddities():
    """Documents that are no trace at all, or only nearly one."""
    document = kineto_document()
    text = json.dumps(document)
    deep = b"[" * 100_000 + b"]" * 100_000
    nested = text.replace('"traceName"', '"deep": ' + deep.decode() + ', "traceName"').encode()
    inside = text.replace('"Input Dims": [[4, 4]]', '"Input Dims": ' + deep.decode(), 1).encode()
    return [
        ("empty", b""),
        ("space", b" \n" * 1000),
        ("null", b"null"),
        ("number", b"12"),
        ("text", b'"x"'),
        ("word", b"hello"),
        ("empty object", b"{}"),
        ("empty array", b"[]"),
        ("no events", b'{"traceEvents": []}'),
        ("events null", b'{"traceEvents": null}'),
        ("events text", b'{"traceEvents": "x"}'),
        ("events nested", b'{"traceEvents": [[[]]]}'),
        ("events numbers", b'{"traceEvents": [1, 2, 3]}'),
        ("deep", deep),
        ("deep open", b"[" * 1_000_000),
        ("deep objects", b'{"a":' * 50_000),
        ("deep member", nested),
        ("deep inside", inside),
        ("utf-16", text.encode("utf-16")),
        ("utf-32", text.encode("utf-32")),
        ("bom", b"\xef\xbb\xbf" + text.encode()),
        ("latin-1", text.replace("op1", "opé").encode("latin-1")),
        ("zeros", b"\0" * 4096),
        ("nan", text.replace('"dur": 10', '"dur": NaN').encode()),
        ("inf", text.replace('"stream": 7', '"x": -inf').encode()),
        ("backslash", text.replace("kernel_1", "kernel\\_1").encode()),
        ("lone surrogate", text.replace("op1", "\\ud800").encode()),
        ("trailing comma", text.replace("}]", "},]").encode()),
        ("two documents", (text + text).encode()),
        ("single quotes", text.replace('"', "'").encode()),
        ("open string", text[:-200].encode() + b'"'),
        ("array form", json.dumps(document["traceEvents"]).encode()),
        ("array form cut", json.dumps(document["traceEvents"]).encode()[:-1]),
        ("pretty", json.dumps(document, indent=2).encode()),
        ("compact", json.dumps(document, separators=(",", ":")).encode()),
        ("same key twice", text.replace('"schemaVersion": 1', '"traceEvents": []').encode()),
        ("gzip", gzip.compress(text.encode())),
        ("gzip cut", gzip.compress(text.encode())[:-30]),
        ("gzip header only", b"\x1f\x8b\x08"),
        ("gzip rubbish", b"\x1f\x8b" + b"rubbish" * 50),
        ("gzip twice", gzip.compress(gzip.compress(text.encode()))),
        ("gzip padded", gzip.compress(text.encode()) + b"\0" * 512),
        ("bomb of spaces", gzip.compress(b" " * (1 << 25))),
        ("bomb of a string", gzip.compress(b'{"x": "' + b"a" * (1 << 25))),
        ("bomb in an event", gzip.compress(b'{"traceEvents": [{"name": "' + b"a" * (1 << 25))),
        ("bomb of commas", gzip.compress(b'{"traceEvents": [' + b"," * (1 << 25))),
    ]
