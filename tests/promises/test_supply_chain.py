"""Promise: what a prediction runs on is listed with hashes and licences, and agrees with the lock."""

from __future__ import annotations

import importlib.util
import json
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
ALLOWED = ("MIT", "BSD-3-Clause", "BSD-2-Clause", "Apache-2.0", "0BSD", "Zlib", "CC0-1.0", "ISC")
SBOM = json.loads((ROOT / "requirements" / "sbom.json").read_text(encoding="utf-8"))
TRIES = len(SBOM["components"])
"""Components."""


def _load_script():
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        spec = importlib.util.spec_from_file_location("write_sbom", ROOT / "scripts" / "write_sbom.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    finally:
        sys.path.remove(str(ROOT / "scripts"))


def test_the_sbom_agrees_with_the_lock():
    assert _load_script().make_sbom() == SBOM


def test_every_dependency_is_a_component_with_hashes():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = {name.split(">")[0] for name in project["dependencies"]}
    listed = {one["name"]: one for one in SBOM["components"] if one["scope"] == "required"}
    assert needed | {"uPlot"} == set(listed)
    assert all(listed[name]["externalReferences"][0]["hashes"] for name in needed)


def test_licences_may_all_be_shipped_with_ours():
    for one in SBOM["components"]:
        (licence,) = one["licenses"]
        words = licence.get("expression") or licence["license"]["id"]
        parts = [word.strip("()") for word in words.split() if word not in ("AND", "OR")]
        assert set(parts) <= set(ALLOWED), one["name"]
