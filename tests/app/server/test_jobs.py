"""Long work: jobs with progress that can be cancelled, beside which quick questions are answered; kept on disk."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

from tests.app.server.starting import fetched, server

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

    page = client.get("/api/page", params={"workload": f"upload:{upload['id']}", "on": "v100"}).json()

    assert upload["kind"] == "trace" and upload["name"] == "../my run.json"
    assert "my_run.json" in page["title"] + page["subtitle"] + page["html"]
    assert upload in client.get("/api/uploads").json()
    assert client.delete(f"/api/uploads/{upload['id']}").status_code == 204
    assert client.get(f"/api/uploads/{upload['id']}").status_code == 404


def test_killed_and_started_again_it_has_what_it_promised(tmp_path):
    with server(tmp_path) as (first, url):
        known = fetched(f"{url}api/uploads?name=run.json", data=TRACE, **{"content-type": "application/octet-stream"})
        question = {"workload": "gpt2-large", "on": "dgx-a100", "gpus": "1,2,4"}
        job = fetched(f"{url}api/jobs", data=json.dumps(question).encode(), **{"content-type": "application/json"})
        assert job["status"] in ("waiting", "running")

        first.kill()
        first.wait()
    with server(tmp_path) as (second, url):
        assert fetched(f"{url}api/uploads") == [known]
        end = time.monotonic() + 300
        while (state := fetched(f"{url}api/jobs/{job['id']}"))["status"] != "finished" and time.monotonic() < end:
            assert state["status"] in ("waiting", "running"), state
            time.sleep(0.1)
        assert fetched(f"{url}api/jobs/{job['id']}/result")
        second.send_signal(signal.SIGINT)
        assert second.wait(120) == 0
