"""Profiles of machines that somebody edited: every number is one that a fit could have written, or is refused."""

from __future__ import annotations

import pytest

from traincast.costs.cpu.profile import load_profile
from traincast.utils.errors import TraincastError

SOUND = """kind = "calibrated"
form = 4
clock = "wall"
reference_seconds = 0.001
l2_bytes = 2e6
l3_bytes = 48e6
host_spread = 0.25
samples = 5
jitter = 0.06
longer = 0.1
exchanges_widened = 1.0
exchanges_late = 0.0
[identity]
name = "made up"
[host_seconds]
step = 1e-5
[crowding]
"2 conv" = 1.0
[models.gemm]
coefficients = [1e-6, 2e-11]
places = [[1.0], [2.0]]
residuals = [0.01, 0.02]
lengths = [3.0]
amplitude = 0.3
noise = 0.05
"""
NUMBERS = ("reference_seconds", "l2_bytes", "l3_bytes", "host_spread", "samples", "jitter", "longer",
           "exchanges_widened", "exchanges_late", "step", '"2 conv"', "amplitude", "noise")  # fmt: skip


def write(tmp_path, name=None, value=None):
    path = tmp_path / "mine.toml"
    lines = [f"{name} = {value}" if line.startswith(f"{name} =") else line for line in SOUND.splitlines()]
    path.write_text("\n".join(lines))
    return path


def test_a_sound_profile_is_read(tmp_path):
    assert load_profile(write(tmp_path)).host == {"step": 1e-5}


@pytest.mark.parametrize("value", ["-1", "nan", "inf", "1e30", "'x'"])
@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_that_no_fit_writes_are_refused(name, value, tmp_path):
    with pytest.raises(TraincastError, match=r"mine\.toml"):
        load_profile(write(tmp_path, name, value))


@pytest.mark.parametrize(
    ("name", "value"),
    [("lengths", "[0.0]"), ("residuals", "[0.01, 1e3]"), ("coefficients", "[1e-6, 1e3]"), ("coefficients", "[-1.0]")],
)
def test_models_that_would_answer_without_an_end_are_refused(name, value, tmp_path):
    with pytest.raises(TraincastError, match=r"mine\.toml"):
        load_profile(write(tmp_path, name, value))
