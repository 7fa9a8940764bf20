"""docs/extend/add-a-kernel-family.md, carried out: from an op to its kernel, its cost, a fit and an evaluation."""

from __future__ import annotations

import json
import math

import pytest

from tests.docs.following import follow, run_in

PAGE = "add-a-kernel-family.md"
DEVICES = {"Tesla V100-PCIE-32GB": 900e9, "Tesla T4": 320e9, "NVIDIA A100-PCIE-40GB": 1555e9}
LOWERED = """
import json, sys
from traincast.costs.kernels.contract import Calls
from traincast.costs.kernels.cost import Source, price_calls
from traincast.costs.kernels.lower import lower
from traincast.costs.kernels.registry import LoweringContext
from traincast.hardware import load_device
from traincast.ir.ops import Signature, TensorSpec

signal = TensorSpec((64, 4096), (4096, 1), "complex64", "cuda")
(call,) = lower(Signature("aten::_fft_c2c", (signal,), (signal,)), LoweringContext())
calls, device = Calls.of(call.family, [call]), load_device("v100-pcie")
roofline, source = price_calls(calls, device, roofline_only=True)
said = {"call": [call.family.name, call.kind, call.compute, call.values], "roofline": roofline.seconds.tolist(),
        "imports": sorted(name for name in sys.modules if name.startswith("traincast.costs.kernels.fft"))}
if FITTED:
    estimate, source = price_calls(calls, device)
    said |= {"seconds": estimate.seconds.tolist(), "sigma": estimate.sigma.tolist(),
             "in_domain": estimate.in_domain.tolist()}
print(json.dumps({**said, "source": source.name}))
"""
EVALUATED = """
import json
from dataclasses import asdict
from pathlib import Path
from traincast_evaluation.kernels.families import MEASURED

(suite,) = MEASURED[-1].evaluation_functions()
print(json.dumps([asdict(row) for row in suite(Path("data"))]))
"""


@pytest.fixture
def package(tmp_path):
    """The page carried out, with a folder of profiles that a fit may write to."""
    files = follow(PAGE, tmp_path)
    profiles = tmp_path / "traincast" / "costs" / "kernels" / "profiles"
    shipped = profiles.resolve()
    profiles.unlink()
    profiles.mkdir()
    for profile in shipped.iterdir():
        (profiles / profile.name).symlink_to(profile)
    return tmp_path, files


def measured(folder):
    """Transforms that move their bytes twice at nine tenths of the sheet's rate, after 6 us."""
    (folder / "data" / "kernels").mkdir(parents=True)
    lines = ["device,batch,length,latency_us"]
    for device, rate in DEVICES.items():
        for batch in (256, 512, 1024, 2048, 4096):
            for length in range(512, 8192, 512):
                lines.append(f"{device},{batch},{length},{6 + 1e6 * 16 * batch * length / (0.9 * rate):.3f}")
    (folder / "data" / "kernels" / "fft.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")


def test_a_family_is_five_files_of_its_own_and_a_row_in_two_tables(package):
    _, files = package

    assert [file for file in files if "/kernels/fft" not in file] == [
        "traincast/costs/kernels/families.py",
        "traincast_evaluation/kernels/families.py",
    ]
    assert len(files) == 5 + 2


def test_its_ops_are_lowered_and_the_roofline_prices_them_without_a_profile(package):
    folder, _ = package

    said = json.loads(run_in(folder, LOWERED.replace("FITTED", "False")))

    assert said["call"] == ["fft", "complex", "fp32", [64, 4096]]
    assert said["source"] == "ROOFLINE"
    bytes_moved = 2 * 64 * 4096 * 8
    assert 2e-6 < said["roofline"][0] < 2e-6 + bytes_moved / (0.5 * 900e9)
    assert "traincast.costs.kernels.fft.model" not in said["imports"], "the roofline needs no model"


def test_it_is_fitted_evaluated_and_then_predicted_by_its_model(package):
    pytest.importorskip("polars")
    folder, _ = package
    measured(folder)

    fit = "from traincast.app.cli.main import main; main(['fit', 'fft', '--data', 'data', '--into-package', '--json'])"
    written = json.loads(run_in(folder, fit))
    rows = json.loads(run_in(folder, EVALUATED))
    said = json.loads(run_in(folder, LOWERED.replace("FITTED", "True")))

    assert written == {"fft": ["costs/kernels/profiles/fft.json", "costs/kernels/profiles/fft.npz"]}
    provenance = json.loads((folder / "traincast" / "costs" / "kernels" / "profiles" / "fft.json").read_text())
    assert provenance["rows_fitted"] + provenance["rows_held_out"] == 3 * 5 * 15
    assert provenance["mean_error_percent_held_out"] < 10
    assert {row["suite"] for row in rows} == {"fft: shapes never seen", "fft: GPU never seen (data sheet only)"}
    assert len(rows) == 2 * len(DEVICES)
    assert all(math.isfinite(row["mape"]) and row["mape"] < 15 for row in rows)
    assert (said["source"], said["in_domain"]) == ("MODEL", [True])
    assert said["seconds"][0] == pytest.approx(6e-6 + 16 * 64 * 4096 / (0.9 * 900e9), rel=0.3)
