"""Writes requirements/sbom.json: what a prediction runs on, as CycloneDX 1.6, with hashes and licences.

Versions and hashes are those of requirements/run.lock, licences those that the installed packages state; what stands in
the package itself (uPlot) is a component too. `--check` compares instead of writing; `--audit` asks pip-audit for known
weaknesses of the lock, where it is installed and its database can be reached.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
from importlib.metadata import metadata
from pathlib import Path
from typing import Any

from split_lock import requirements

ROOT = Path(__file__).resolve().parent.parent
SBOM, LOCK = ROOT / "requirements" / "sbom.json", ROOT / "requirements" / "run.lock"
_UPLOT = {"type": "library", "name": "uPlot", "version": "1.6.32", "licenses": [{"license": {"id": "MIT"}}],
          "purl": "pkg:npm/uplot@1.6.32", "scope": "required"}  # fmt: skip


_NEEDED = ("msgspec", "numpy", "pyyaml")  # the others build the wheel


def make_sbom() -> dict[str, Any]:
    """The document; the same for the same lock."""
    components = [_UPLOT]
    for pinned, hashes in requirements(LOCK.read_text(encoding="utf-8")).items():
        name, _, version = pinned.partition(" ")[0].partition("==")
        components.append({
            "type": "library", "name": name, "version": version, "purl": f"pkg:pypi/{name}@{version}",
            "scope": "required" if name in _NEEDED else "excluded", "licenses": [{"expression": find_licence(name)}],
            "externalReferences": [{"type": "distribution", "url": f"pkg:pypi/{name}@{version}", "hashes": [
                {"alg": "SHA-256", "content": digest.rpartition(":")[2]} for digest in sorted(hashes)]}],
        })  # fmt: skip
    return {
        "bomFormat": "CycloneDX", "specVersion": "1.6", "version": 1,
        "metadata": {"component": {"type": "application", "name": "traincast", "licenses": [
            {"license": {"id": "Apache-2.0"}}]}},
        "components": sorted(components, key=lambda one: str(one["name"]).lower()),
    }  # fmt: skip


def format_sbom(document: dict[str, Any]) -> str:
    """The document with a line for each component."""
    lines = ",\n".join(json.dumps(component) for component in document["components"])
    return json.dumps({**document, "components": ["@"]}).replace('"@"', f"\n{lines}\n") + "\n"


def find_licence(name: str) -> str:
    """What an installed package says of its licence: the expression, or else the classifier or the old field."""
    known = metadata(name)
    stated = known.get("License-Expression") or ""
    classified = [line.rpartition(" :: ")[2] for line in known.get_all("Classifier") or () if "License ::" in line]
    words = {"MIT License": "MIT", "BSD License": "BSD-3-Clause", "Apache Software License": "Apache-2.0"}
    found = stated or (words.get(classified[0], classified[0]) if classified else known.get("License") or "")
    if not found:
        raise SystemExit(f"{name} states no licence; look it up and note it here")
    return str(found)


def audit() -> int:
    """pip-audit over the lock; 0 where it cannot run, which is said."""
    if importlib.util.find_spec("pip_audit") is None:
        print("pip-audit is not installed: nothing was audited")
        return 0
    command = [sys.executable, "-m", "pip_audit", "--requirement", str(LOCK), "--require-hashes", "--disable-pip",
               "--strict"]  # fmt: skip  # a package that its database does not know is no sound one
    return subprocess.run(command, check=False).returncode


def main() -> int:
    """Writes, or compares."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--audit", action="store_true")
    args = parser.parse_args()
    text = format_sbom(make_sbom())
    if args.check:
        same = SBOM.exists() and SBOM.read_text(encoding="utf-8") == text
        print("the SBOM agrees with the lock" if same else "the SBOM differs: python scripts/write_sbom.py")
        return int(not same)
    SBOM.write_text(text, encoding="utf-8")
    return audit() if args.audit else 0


if __name__ == "__main__":
    sys.exit(main())
