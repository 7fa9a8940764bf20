"""Questions by HTTP get the results of the Python calls, in every form."""

from __future__ import annotations

import pytest

import traincast
from traincast.app.pages.page import SCRIPTS
from traincast.app.server.fields import parse_request

DLRM = {"workload": "dlrm-default", "on": "v100", "batch_size": "1024"}


def test_the_answer_is_the_document_of_the_call(client):
    result = client.get("/api/answer", params=DLRM)

    assert result.status_code == 200
    assert result.json() == traincast.predict("dlrm-default", on="v100", batch_size=1024).to_dict()


def test_the_page_has_sections_and_the_data_of_its_charts(client):
    page = client.get("/api/page", params={**DLRM, "price": "2.5"}).json()

    assert page["title"].startswith("dlrm-default")
    assert '<section id="timeline"' in page["html"]
    assert "$2.5 a GPU" in page["html"]
    assert {"timeline", "memory", "roofline"} <= set(page["charts"])


def test_the_report_is_a_file_to_keep(client):
    report = client.get("/api/report", params=DLRM)

    assert report.headers["content-disposition"] == 'attachment; filename="traincast-report.html"'
    assert report.text.startswith("<!doctype html>")
    assert report.text.count("<script>") == len(SCRIPTS)


def test_the_trace_is_what_perfetto_reads(client):
    trace = client.get("/api/trace", params=DLRM).json()

    assert {event["ph"] for event in trace["traceEvents"]} >= {"X", "M"}


def test_several_numbers_of_gpus_are_a_curve(client):
    page = client.get("/api/page", params={"workload": "dlrm-ddp", "on": "dgx1-v100", "gpus": "1,2"}).json()

    assert "scaling" in page["charts"]


def test_a_layout_is_a_transformer_over_gpus(client):
    result = client.get("/api/answer", params={"workload": "llama3-8b", "on": "dgx-h100", "gpus": "8", "tp": "2"})

    assert result.status_code == 200, result.text
    assert result.json()["layout"]["tp"] == 2


def test_platforms_are_compared_and_points_are_swept(client):
    compared = client.get("/api/answer", params={**DLRM, "of": "compare", "also": "h100"})
    swept = client.get("/api/page", params={**DLRM, "of": "sweep", "vary": "on=v100,h100 batch-size=64,128"})
    fitted = client.get("/api/page", params={**DLRM, "of": "fits"})

    assert [row["platform"] for row in compared.json()["rows"]] == ["h100", "v100"]
    assert len(swept.json()["charts"]["sweep"]["x"]) == 4
    assert "<dt>Memory</dt>" in fitted.json()["html"]


@pytest.mark.parametrize(("given", "field", "said"), [
    ({"of": "compare"}, "also", "missing"), ({"also": "h100"}, "also", "is for a compare"),
    ({"of": "compare", "also": "A100"}, "also", "did you mean a100-40gb, "),
    ({"of": "sweep", "vary": "batch-size=1:1000:1"}, "vary", "give at most 64"),
    ({"of": "sweep", "vary": "plan=/etc/passwd"}, "vary", "give one of"),
    ({"on": "A100"}, "on", "did you mean a100-40gb, "),
])  # fmt: skip
def test_what_a_question_lacks_or_has_too_much_is_named(client, given, field, said):
    result = client.get("/api/answer", params={**DLRM, **given})

    assert result.status_code == 422
    assert result.json()["error"]["field"] == field and said in result.json()["error"]["message"]


def test_a_set_of_tables_alone_is_sharded():
    parsed = parse_request([("workload", "mlperf-dlrm"), ("on", "dgx-a100")])

    assert parsed.values["of"] == "sharding"


def test_edits_show_what_they_would_bring(client):
    page = client.get("/api/page", params={**DLRM, "edits": "speed:gemm=2,host-speed=2", "price": "2"}).json()

    assert "What if: host-speed=2, speed:gemm=2" in page["subtitle"]
    assert "timeline" in page["charts"]


@pytest.mark.parametrize("asset", ["live.js", "live.css", *SCRIPTS])
def test_the_page_is_made_of_files_of_its_own(client, asset):
    assert f"/assets/{asset}" in client.get("/").text
    assert client.get(f"/assets/{asset}").status_code == 200


def test_the_state_of_the_page_is_its_address(client):
    html = client.get("/?workload=resnet50&on=h100&batch_size=64&tp=2").text

    assert '<option value="resnet50" selected>' in html
    assert '<option value="h100" selected>' in html
    assert 'name="batch_size" value="64"' in html
    assert "<details open><summary>Parallelism" in html


def test_what_the_address_says_is_escaped(client):
    html = client.get("/", params={"workload": '"><script>alert(1)</script>', "gpus": '"><b>'}).text

    assert "<script>alert" not in html
    assert "<b>" not in html


def test_models_platforms_and_health_are_listed(client):
    assert "dlrm-v2" in [row["model"] for row in client.get("/api/models").json()]
    assert "dgx-h100" in [row["platform"] for row in client.get("/api/platforms").json()]
    assert client.get("/api/health").json()["status"] == "ok"


def test_the_api_describes_every_route_and_field(client):
    described = client.get("/api").json()

    assert {name.partition(" ")[2] for name in described["routes"]} == {
        route.path for route in client.app.routes if route.path.startswith("/api/")
    }
    assert all(described["routes"].values())
    assert "dgx-h100" in described["fields"]["on"]["choices"]
