"""Tools for agents: the verdict first, figures that decide, and a server that lists and calls them."""

from __future__ import annotations

import asyncio
import json

import pytest

from traincast.app import tools
from traincast.utils.errors import TraincastError


def test_a_prediction_begins_with_its_verdict():
    answer = tools.predict("resnet50", "v100", {"batch_size": 64})

    assert " per step (90 % interval " in answer["verdict"][0]
    assert answer["trust"]["word"] in ("measured", "partly extrapolated", "mostly extrapolated")
    assert json.loads(json.dumps(answer, allow_nan=False))["scenario"]["batch_size"] == 64


def test_a_change_and_a_comparison_have_theirs():
    change = tools.whatif("resnet50", "v100", ["batch-size=8"])
    assert change["verdict"].startswith("batch-size=8: ")
    assert change["after"]["iteration_ms"] < change["before"]["iteration_ms"]
    assert tools.compare("resnet50", ["v100", "h100"])["verdict"].startswith("resnet50: h100 is fastest")


def test_whether_a_step_fits_is_a_tool():
    tight = tools.fits("llama3-8b", "h100", None, {"gpus": 1})

    assert tight["verdict"].startswith("Does not fit, ")
    assert not json.loads(json.dumps(tight, allow_nan=False))["fits"]


@pytest.mark.parametrize("tool", [tools.predict, tools.fits])
def test_what_a_tool_is_given_beside_its_fields_is_no_field(tool):
    with pytest.raises(TraincastError, match="`on` is an argument of the tool"):
        tool("resnet50", "v100", fields={"on": "h100"})


def test_a_path_that_no_file_can_have_is_refused():
    with pytest.raises(TraincastError, match="cannot read"):
        tools.trace("x" * 5000)


def test_names_are_found_by_a_part_of_them():
    assert {row["model"] for row in tools.models("llama3-")} == {"llama3-8b", "llama3-70b", "llama3-405b"}
    assert all("h100" in row["platform"] or "H100" in row["device"] for row in tools.platforms("h100"))


def test_the_server_lists_every_tool_and_explains_mistakes():
    pytest.importorskip("mcp.server.mcpserver")
    server = tools.make_server()

    listed = asyncio.run(server.list_tools())
    assert [tool.name for tool in listed] == [tool.__name__ for tool in tools.TOOLS]
    with pytest.raises(Exception, match="unknown platform"):
        asyncio.run(server.call_tool("predict", {"workload": "resnet50", "on": "h1000"}))
