"""Long work: jobs with progress and limits that can be cancelled, alongside which quick questions are answered."""

from __future__ import annotations

import contextlib
import json
import signal
import time
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from tests.app.server.conftest import HERE
from tests.app.server.starting import fetched, server
from traincast.app.server.jobs import Limits
from traincast.app.server.server import Settings, make_app

ROOT = Path(__file__).resolve().parents[3]
SLOW = {"of": "sharding", "workload": "dlrm-2022-788", "on": "dgx-a100", "gpus": 8}
OCTETS = {"content-type": "application/octet-stream"}
TRACE = (ROOT / "docs" / "tutorial" / "example-trace.json").read_bytes()


def until(client, key, *wanted, seconds=300):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        state = client.get(f"/api/jobs/{key}").json()
        if state["status"] in wanted:
            return state
        time.sleep(0.05)
    raise AssertionError(state)


def test_a_slow_job_blocks_nobody_has_progress_and_can_be_cancelled(client):
    taken = client.post("/api/jobs", json=SLOW)
    assert taken.status_code == 202
    key = taken.json()["id"]
    until(client, key, "running")

    quick = client.get("/api/answer", params={"workload": "dlrm-default", "on": "v100", "batch_size": 77})

    assert quick.status_code == 200
    assert client.get(f"/api/jobs/{key}").json()["status"] == "running", "nobody waited for it"
    assert client.get(f"/api/jobs/{key}/result").status_code == 409
    assert client.delete(f"/api/jobs/{key}").json()["status"] == "cancelled"
    assert client.get("/api/health").json()["running"] <= 1
    assert client.get(f"/api/jobs/{key}/result").status_code == 409


def test_a_job_is_finished_with_the_same_answer(client):
    question = {"workload": "dlrm-default", "on": "v100", "batch_size": 300}
    key = client.post("/api/jobs", json={**question, "form": "answer"}).json()["id"]

    assert until(client, key, "finished")["progress"] == 1.0
    assert client.get(f"/api/jobs/{key}/result").json() == client.get("/api/answer", params=question).json()


def test_the_same_question_is_one_job(client):
    keys = {client.post("/api/jobs", json={**SLOW, "gpus": "4"}).json()["id"] for _ in range(3)}

    assert len(keys) == 1
    client.delete(f"/api/jobs/{keys.pop()}")


def test_uploads_are_answered_like_files_of_ones_own(client):
    known = client.post("/api/uploads", params={"name": "../my run.json"}, content=TRACE, headers=OCTETS)
    assert known.status_code == 201, known.text
    upload = known.json()

    asked = client.get("/api/page", params={"workload": f"upload:{upload['id']}", "on": "v100"})
    if asked.status_code == 202:  # its process is starting
        until(client, asked.json()["id"], "finished")
        asked = client.get("/api/page", params={"workload": f"upload:{upload['id']}", "on": "v100"})
    page = asked.json()

    assert upload["kind"] == "trace" and upload["name"] == "../my run.json"
    assert "my_run.json" in page["title"] + page["subtitle"] + page["html"]
    assert upload in client.get("/api/uploads").json()
    assert client.delete(f"/api/uploads/{upload['id']}").status_code == 204
    assert client.get(f"/api/uploads/{upload['id']}").status_code == 404


def test_a_process_ends_cleanly_with_all_that_it_started():
    with server() as (process, url):
        upload = fetched(f"{url}api/uploads?name=run.json", data=TRACE, **OCTETS)
        slow = fetched(f"{url}api/jobs", data=json.dumps(SLOW).encode(), **{"content-type": "application/json"})
        assert upload["kind"] == "trace" and slow["status"] in ("waiting", "running")
        group = process.pid

        process.send_signal(signal.SIGINT)

        assert process.wait(120) == 0
        wait_until(lambda: not processes_of(group))


def processes_of(group):
    """Processes of a group that still run."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, number = stat.read_text().rpartition(")")[2].split()[:3]
            found += [stat] if int(number) == group and state != "Z" else []
    return found


def wait_until(reached, seconds=60):
    end = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.fixture
def tiny():
    """A server of little patience: one process of each kind, a second for each job, one job may wait."""
    limits = Limits(quick=1, long=1, waiting=1, quick_seconds=300, long_seconds=1.0)
    with TestClient(make_app(Settings(limits=limits)), base_url=HERE) as client:
        yield client


def test_a_job_that_takes_too_long_is_ended_and_the_next_one_is_answered(tiny):
    key = tiny.post("/api/jobs", json=SLOW).json()["id"]
    assert "took longer than 1 s" in until(tiny, key, "failed")["error"]["message"]

    result = tiny.get("/api/answer", params={"workload": "dlrm-default", "on": "v100", "batch_size": 78})

    assert result.status_code == 200


def test_too_many_that_wait_are_refused(tiny):
    keys, refused = [], []
    for batch in range(8):
        taken = tiny.post("/api/jobs", json={**SLOW, "batch_size": 512 + batch})
        (keys if taken.status_code == 202 else refused).append(taken)

    assert refused and {result.status_code for result in refused} == {429}
    assert refused[0].headers["retry-after"] == "2"
    for taken in keys:
        tiny.delete(f"/api/jobs/{taken.json()['id']}")


def test_a_job_that_waits_can_be_cancelled(tiny):
    first = tiny.post("/api/jobs", json=SLOW).json()["id"]
    until(tiny, first, "running", "failed")
    second = tiny.post("/api/jobs", json={**SLOW, "gpus": 4}).json()["id"]

    assert tiny.delete(f"/api/jobs/{second}").json()["status"] == "cancelled"

    assert until(tiny, first, "failed", "cancelled")["status"] == "failed", "the other went on to its limit"
    assert tiny.get(f"/api/jobs/{second}/result").status_code == 409
    assert tiny.delete(f"/api/jobs/{'0' * 32}").status_code == 404


def test_a_worker_that_needs_too_much_memory_is_refused():
    limits = Limits(quick=1, long=1, memory=1 << 20)
    with TestClient(make_app(Settings(limits=limits)), base_url=HERE) as client:
        result = client.get("/api/answer", params={"workload": "dlrm-default", "on": "v100", "batch_size": 79})

    assert result.status_code == 422
    assert "memory" in result.json()["error"]["message"] or "ended" in result.json()["error"]["message"]
