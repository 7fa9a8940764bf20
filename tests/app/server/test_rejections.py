"""What is rejected: fields by name, strangers, damaged files; never with a mistake of ours."""

from __future__ import annotations

import gzip
import random

import pytest

from tests.app.server.conftest import HERE
from traincast.app.server.guard import find_field

BASE = {"workload": "dlrm-default", "on": "v100"}
OCTETS = {"content-type": "application/octet-stream"}


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"workload": "dlrm-defualt"}, "workload"),
        ({"workload": "../../etc/passwd"}, "workload"),
        ({"workload": "/etc/passwd.yaml"}, "workload"),
        ({"workload": "upload:../../etc/passwd"}, "workload"),
        ({"workload": "upload:" + "0" * 32}, "workload"),
        ({"workload": ""}, "workload"),
        ({"on": "v1000"}, "on"),
        ({"on": "/etc/passwd.toml"}, "on"),
        ({"on": ""}, "on"),
        ({"gpus": "0"}, "gpus"),
        ({"gpus": "1,two"}, "gpus"),
        ({"gpus": ",".join("1" * 17)}, "gpus"),
        ({"batch_size": "-1"}, "batch_size"),
        ({"batch_size": "1e3"}, "batch_size"),
        ({"batch_size": "9" * 100}, "batch_size"),
        ({"dtype": "fp7"}, "dtype"),
        ({"price": "nan"}, "price"),
        ({"price": "-1"}, "price"),
        ({"compiled": "maybe"}, "compiled"),
        ({"host": "nobody"}, "host"),
        ({"seq_len": "128"}, "seq_len"),
        ({"attention": "sdpa"}, "attention"),
        ({"tp": "3", "workload": "llama3-8b"}, "tp"),
        ({"nonsense": "1"}, "nonsense"),
        ({"against": "old.json"}, "against"),
        ({"edits": "batch-siz=1"}, "edits"),
        ({"edits": "on=/etc/passwd.toml"}, "edits"),
        ({"edits": "plan=/etc/passwd"}, "edits"),
        ({"edits": "host=../x"}, "edits"),
    ],
)
def test_a_wrong_field_is_named(client, change, field):
    result = client.get("/api/answer", params={**BASE, **change})

    assert result.status_code in (404, 422), result.text
    error = result.json()["error"]
    assert error["field"] == field, error
    assert error["message"]
    assert "/tmp" not in error["message"]


def test_a_field_given_twice_is_refused(client):
    result = client.get("/api/answer?workload=dlrm-default&on=v100&on=a100-40gb")

    assert (result.status_code, result.json()["error"]["field"]) == (422, "on")


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": "evil.example"}, 421),
        ({"host": "127.0.0.1.evil.example"}, 421),
        ({"host": "[::1"}, 421),
        ({"origin": "https://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "http://["}, 403),
        ({"origin": "http://127.0.0.1:9999"}, 403),
        ({"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}, 403),
        ({"sec-fetch-site": "same-site"}, 403),
        ({"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "iframe"}, 403),
    ],
)
def test_requests_of_other_sites_are_refused(client, headers, status):
    assert client.get("/api/health", headers=headers).status_code == status
    assert client.post("/api/uploads?name=x.json", headers={**OCTETS, **headers}, content=b"{}").status_code == status


def test_a_link_of_another_site_opens_the_page_and_nothing_else(client):
    followed = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}

    assert client.get("/?workload=dlrm-default", headers=followed).status_code == 200
    assert client.get("/api/answer", params=BASE, headers=followed).status_code == 403


def test_the_servers_own_page_may_ask(client):
    own = {"origin": HERE, "sec-fetch-site": "same-origin"}

    assert client.get("/api/health", headers=own).status_code == 200


def test_answers_carry_the_headers_that_browsers_need(client):
    headers = client.get("/").headers

    assert "default-src 'none'" in headers["content-security-policy"]
    assert "unsafe" not in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["x-frame-options"] == "DENY"


def test_nothing_that_is_sent_gets_into_a_header(client):
    evil = "x\r\nset-cookie: a=b.json"
    results = [
        client.get("/api/answer", params={"workload": evil, "on": evil}),
        client.post("/api/uploads", params={"name": evil}, headers=OCTETS, content=b"{}"),
        client.get("/", params={"workload": evil}),
        client.get("/assets/" + "x%0d%0aset-cookie:a=b"),
    ]

    assert [result.status_code for result in results] == [422, 422, 200, 404]
    assert not any("set-cookie" in result.headers for result in results)


@pytest.mark.parametrize(
    "path",
    ["/assets/../app.py", "/assets/..%2f..%2fapp.py", "/assets/%2e%2e/app.py", "/api/uploads/../../etc",
     "/api/uploads/..%2f..%2fetc%2fpasswd", "/api/jobs/..%2fx/result", "/assets//etc/passwd"],
)  # fmt: skip
def test_paths_do_not_lead_out(client, path):
    result = client.get(path)

    assert result.status_code == 404
    assert result.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "status"),
    [(b"[]", 422), (b"{", 422), (b"\xff", 422), (b"[" * 60_000, 422), (b" " * 70_000, 413),
     (b'{"workload": {"a": 1}}', 422), (b'{"workload": "dlrm-default", "on": "v100", "form": "x"}', 422)],
)  # fmt: skip
def test_bodies_that_are_no_question_are_refused(client, body, status):
    result = client.post("/api/jobs", content=body, headers={"content-type": "application/json"})

    assert result.status_code == status
    assert result.json()["error"]["field"]


def test_a_form_of_another_site_is_no_question(client):
    result = client.post("/api/jobs", content=b"a=b", headers={"content-type": "text/plain"})

    assert result.status_code == 415


def test_a_thousand_malformed_requests_are_all_refused(client):
    rng = random.Random(19)
    names = ["workload", "on", "gpus", "batch_size", "dtype", "price", "tp", "of", "seq_len", "x", "", "against"]
    junk = ["", "0", "-1", "1e999", "nan", "\x00", "é" * 50, "../" * 20, "upload:" + "f" * 32, "'; --", "{}", "9" * 300,
            "<script>", "%s%n", "[1]", "true"]  # fmt: skip
    paths = ["/api/answer", "/api/page", "/api/report", "/api/trace", "/api/jobs", "/api/uploads", "/api/jobs/x", "/x"]
    statuses = []
    for _ in range(1000):
        query = [(rng.choice(names), rng.choice(junk)) for _ in range(rng.randrange(1, 5))]
        method = rng.choice(["GET", "GET", "POST", "DELETE", "PUT", "PATCH", "OPTIONS"])
        result = client.request(method, rng.choice(paths), params=query, content=rng.randbytes(rng.randrange(40)))
        statuses.append((result.status_code, result.url))

    assert [status for status in statuses if status[0] >= 500] == []
    assert {status for status, _ in statuses} <= {200, 400, 404, 405, 408, 413, 415, 422, 429}
    assert sum(status == 200 for status, _ in statuses) < 100  # lists that need no parameter


def test_a_message_without_a_name_is_about_the_workload():
    assert find_field("something is odd", {"gpus": [1]}, ["gpus", "workload"]) == "workload"
    assert find_field("unknown thing 'abc'", {"on": "abc"}, ["workload"]) == "on"


def test_bombs_and_damaged_files_are_refused(client, folder):
    trace = b'{"traceEvents": ['
    files = {
        "bomb.json.gz": gzip.compress(trace + b" " * 140_000_000, 1),
        "cut.json.gz": gzip.compress(trace)[:-6],
        "random.json": random.Random(1).randbytes(1000),
        "random.tc": random.Random(1).randbytes(1000),
        "bad.yaml": b"a: [",
        "empty.json": b"",
        "deep.json": b"[" * 100_000,
    }
    for name, content in files.items():
        result = client.post("/api/uploads", params={"name": name}, content=content, headers=OCTETS)
        assert (result.status_code, result.json()["error"]["field"]) == (422, "body"), (name, result.text)
        assert str(folder) not in result.text
    large = client.post("/api/uploads", params={"name": "a.json"}, content=b" " * (2 << 20), headers=OCTETS)
    assert large.status_code == 413
    assert client.post("/api/uploads", params={"name": "a.exe"}, content=b"x", headers=OCTETS).status_code == 415
    assert [path for path in folder.rglob("*") if path.is_file()] == []
