"""What a user states goes with the workload into its file and into every result."""

from dataclasses import replace
from pathlib import Path

import pytest

import traincast
from traincast.ir import load_workload, save_workload
from traincast.ir.formula import OpCost
from traincast.ir.workload import Workload
from traincast.utils.errors import TraincastError

COSTS = '["aten::addmm"]\nseconds = "1e-3"\n'


def test_a_given_cost_is_what_the_op_takes_and_is_named(tmp_path: Path) -> None:
    # Given a file that says what an op takes
    file = tmp_path / "costs.toml"
    file.write_text(COSTS)
    step = traincast.load("dlrm-default", batch_size=256)
    plain = traincast.predict(step, on="v100")
    # When a step with that op is predicted
    result = traincast.predict(step, on="v100", costs=file)
    # Then each call takes that long, and the result says so
    calls = sum(s.name == "aten::addmm" for s in (step.programs[0].signatures[i] for i in _ops(step)))
    assert result.by_op["aten::addmm"] == pytest.approx(calls * 1e-3)
    assert result.by_op["aten::mm"] == pytest.approx(plain.by_op["aten::mm"])
    assert "aten::addmm costs as given: seconds 1e-3" in result.warnings
    assert result.to_dict()["given_costs"] == {"aten::addmm": {"seconds": "1e-3"}}
    assert "aten::addmm" not in result.out_of_domain_ops


def _ops(step: Workload) -> list[int]:
    return step.programs[0].columns.op_signature.tolist()


def test_a_file_keeps_costs_and_assumptions(tmp_path: Path) -> None:
    step = traincast.load("dlrm-default")
    stated = replace(step, costs=(OpCost("a::b", flops="2 * in0.numel"),), assumptions=("x.py:3: as stated",))
    save_workload(stated, tmp_path / "a.tc")
    again = load_workload(tmp_path / "a.tc")
    assert (again.costs, again.assumptions) == (stated.costs, stated.assumptions)
    result = traincast.predict(again, on="v100")
    assert result.to_dict()["assumptions"] == ["x.py:3: as stated"]
    assert "assumed: x.py:3: as stated" in result.warnings
    with pytest.raises(TraincastError, match="a file cannot hold"):
        save_workload(replace(step, costs=(OpCost("a::b", seconds=lambda _: 1.0),)), tmp_path / "b.tc")


def test_a_damaged_file_of_costs_is_named(tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text("[[[")
    for name, message in (("bad.toml", "not valid TOML"), ("none.toml", "no file")):
        with pytest.raises(TraincastError, match=message):
            traincast.predict("dlrm-default", on="v100", costs=tmp_path / name)
