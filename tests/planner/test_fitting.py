"""Whether a step fits: verdict, remedies, the largest that fits, and the command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import traincast
from traincast.app.cli.main import main
from traincast.planner.fitting import find_largest
from traincast.planner.what_if.edits.registry import apply_edits, parse_edits
from traincast.simulator.scenario.predict import predict
from traincast.simulator.scenario.resolved import make_scenario, resolve
from traincast.utils.errors import TraincastError


def test_a_step_that_does_not_fit_has_remedies_under_which_it_does() -> None:
    fit = traincast.fits("mpt-1b", on="v100", batch_size=8)
    assert not fit.fits and fit.memory.fit_probability < 0.1
    assert fit.remedies and all(one.prediction.memory.fits for one in fit.remedies)
    costs = [one.seconds_per_sample for one in fit.remedies if "offload" not in one.fields]
    assert costs == sorted(costs)
    assert fit.headline().startswith("Does not fit, ")


def test_the_largest_batch_fits_and_a_larger_one_does_not() -> None:
    resolved = resolve(make_scenario({"workload": "dlrm-ddp", "on": "v100"}))
    found = find_largest(resolved, "batch-size")
    assert found.value > 1000 and found.probability >= 0.5
    above = traincast.predict("dlrm-ddp", on="v100", batch_size=found.value + found.value // 32)
    assert not above.fits
    with pytest.raises(TraincastError, match="batch-size, seq-len, rows"):
        find_largest(resolved, "layers")


def test_the_command_says_the_verdict_first_and_ends_with_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    snapshot = tmp_path / "snapshot.json"
    assert main(["fits", "dlrm-ddp", "--on", "v100", "--snapshot-out", str(snapshot)]) == 0
    assert capsys.readouterr().out.startswith("Fits, ")
    assert json.loads(snapshot.read_text())["segments"]
    assert main(["fits", "dlrm-ddp", "--on", "v100", "--batch-size", "4000000", "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert not document["fits"] and document["memory"]["used_gb"] > document["memory"]["limit_gb"]
    assert document["remedies"][0]["options"].startswith("--batch-size")
    assert main(["predict", "dlrm-ddp", "--on", "v100", "--batch-size", "4000000", "--must-fit"]) == 1
    assert main(["fits", "dlrm-ddp", "--on", "v100", "--allocator", "nonsense"]) == 2


def test_settings_of_the_allocator_change_what_is_reserved() -> None:
    plain = traincast.predict("resnet50", on="v100", batch_size=64)
    grown = traincast.predict("resnet50", on="v100", batch_size=64, allocator="expandable_segments:True")
    assert grown.memory.reserved_bytes < plain.memory.reserved_bytes
    assert grown.memory.peak_bytes == plain.memory.peak_bytes


def test_the_most_rows_fit_and_more_do_not() -> None:
    resolved = resolve(make_scenario({"workload": "dlrm-default", "on": "v100"}))
    found = find_largest(resolved, "rows")
    assert found.value > 1 and found.probability >= 0.5 and found.text.endswith("of every table")
    more = apply_edits(resolved, parse_edits([f"rows=x{1.05 * found.value:g}"]))
    assert not predict(more).fits


def test_rows_that_a_step_does_not_hold_count_in_how_sure_it_is() -> None:
    found = find_largest(resolve(make_scenario({"workload": "hstu", "on": "a100-80gb"})), "seq-len")
    assert 0.5 <= found.probability < 0.9
    result = traincast.predict("hstu", on="a100-80gb", seq_len=int(found.value))
    assert result.left_out_bytes and result.fit_probability == found.probability < result.memory.fit_probability


def test_a_sequence_grows_by_what_its_ranks_share_and_errors_name_what_was_to_grow() -> None:
    shared = {"workload": "llama3-8b", "on": "dgx-h100", "gpus": 8, "cp": 4, "zero": 1}
    found = find_largest(resolve(make_scenario(shared)), "seq-len")
    assert found.value > 8192 and found.value % 8 == 0 and found.probability >= 0.5
    with pytest.raises(TraincastError, match=r"^`max` rows: llama3-8b is a description of a Transformer, laid out"):
        find_largest(resolve(make_scenario({"workload": "llama3-8b", "on": "dgx-h100"})), "rows")


def test_the_culprit_has_its_module_and_line(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    script = tmp_path / "wide.py"
    script.write_text(
        "import torch\n"
        "def make_step(batch):\n"
        "    net = torch.nn.Linear(64, 100_000).cuda()\n"
        "    x = torch.zeros(batch, 64, device='cuda')\n"
        "    def step():\n"
        "        net.zero_grad()\n"
        "        made = net(x)\n"
        "        made.sum().backward()\n"
        "    return step\n"
    )
    fit = traincast.fits(f"{script}:make_step", on="v100", batch_size=1024)
    culprit = next(one for one in fit.list_culprits() if one["category"] == "activation")
    assert culprit["line"] == "wide.py:7" and culprit["gb"] > 0.4
