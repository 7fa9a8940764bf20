"""docs/extend/add-a-collective.md, carried out."""

from __future__ import annotations

import json

from tests.docs.following import follow, run_in

PROGRAM = """
import json
from traincast.costs.collectives import COLLECTIVE, load_shipped_collectives
from traincast.costs.kernels.contract import Calls
from traincast.costs.kernels.lower import lower
from traincast.costs.kernels.registry import LoweringContext
from traincast.hardware.platform import load_topology
from traincast.ir.collectives import parse_collective_name
from traincast.ir.ops import Signature, TensorSpec

part = TensorSpec((1024,), (1,), "float32")
scalars = (("collective", "all_gather_v"), ("group", (0, 1, 2, 3)), ("communicator", 0), ("bytes", 16384))
(call,) = lower(Signature("c10d::allgather_v_", (part,), (part,), scalars), LoweringContext())
same = COLLECTIVE.call("all_gather", "fp32", bytes=16384, ranks=4, nodes=1)
estimate = load_shipped_collectives().predict(Calls.of(COLLECTIVE, [call, same]), load_topology("dgx-a100"))
print(json.dumps({
    "call": [call.kind, *call.values], "seconds": estimate.seconds.tolist(), "known": estimate.in_domain.tolist(),
    "traced": [parse_collective_name(name).name for name in ("allgatherv", "_allgather_base", "all_gather")],
}))
"""

CAPTURE = """
import torch
from traincast.capturing.collectives import describe_collective
class Group:
    group_name = "0"
described = describe_collective("allgather_v_", (("output_tensor", torch.empty(12)), ("process_group", Group())))
print(described.kind, described.bytes)
"""


def test_the_page_touches_two_files(tmp_path):
    assert follow("add-a-collective.md", tmp_path) == [
        "traincast/capturing/collectives.py",
        "traincast/ir/collectives.py",
    ]


def test_the_new_collective_is_lowered_timed_and_known_in_traces(tmp_path):
    follow("add-a-collective.md", tmp_path)

    result = json.loads(run_in(tmp_path, PROGRAM))

    assert result["call"] == ["all_gather_v", 16384.0, 4.0, 1.0]
    assert result["seconds"][0] == result["seconds"][1] > 0  # until somebody measures it, it is like an all-gather
    assert result["known"] == [False, True]
    assert result["traced"] == ["all_gather_v", "all_gather", "all_gather"]


def test_the_new_collective_is_captured(tmp_path):
    follow("add-a-collective.md", tmp_path)

    assert run_in(tmp_path, CAPTURE).split() == ["all_gather_v", "48"]
