"""Captures say which PyTorch they trust."""

from __future__ import annotations

import importlib
import re
import tomllib
import warnings
from pathlib import Path

import pytest
import torch

import traincast.capturing
from traincast.capturing.torch_version import LOCKED, OLDEST, check_torch
from traincast.utils.errors import TraincastError

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.mark.parametrize("version", ["2.12.1", "2.13.0", "2.13.1+cpu", "2.13.0a0+git1234567", "2.14.1+cu130"])
def test_versions_that_were_tried_are_taken_without_a_word(monkeypatch, version):
    monkeypatch.setattr(torch, "__version__", version)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_torch()


@pytest.mark.parametrize("version", ["2.15.0", "3.0.0+cpu"])
def test_a_newer_version_is_warned_about_by_name(monkeypatch, version):
    monkeypatch.setattr(torch, "__version__", version)
    said = rf"torch {re.escape(version)} is installed, .* are tested with 2\.12 to 2\.14"
    with pytest.warns(UserWarning, match=said):
        check_torch()


@pytest.mark.parametrize("version", ["1.13.1", "2.10.0+cpu", "2.11.0"])
def test_a_version_too_old_is_refused_with_the_one_to_install(monkeypatch, version):
    monkeypatch.setattr(torch, "__version__", version)
    with pytest.raises(TraincastError, match=rf"torch {re.escape(version)} is installed, .*'torch==2\.13\.\*'"):
        check_torch()


def test_importing_the_room_meets_the_installed_version(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.0.1")
    with pytest.raises(TraincastError, match=r"torch 2\.0\.1 is installed"):
        importlib.reload(traincast.capturing)


def test_the_extra_allows_what_captures_run_with_and_the_lock_what_they_are_tested_with():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras["capture"] == [f"torch>={OLDEST},<2.15"]
    assert f"torch=={LOCKED}.0 \\" in (ROOT / "requirements" / "torch.lock").read_text().splitlines()
