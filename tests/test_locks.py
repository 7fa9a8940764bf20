"""The locks: everything pinned, with hashes, and without the address of any index."""

from __future__ import annotations

import hashlib
import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LOCKS = sorted((ROOT / "requirements").glob("*.lock"))


def _split_lock():
    spec = importlib.util.spec_from_file_location("split_lock", ROOT / "scripts" / "split_lock.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SPLIT = _split_lock()


@pytest.mark.parametrize("lock", LOCKS, ids=lambda path: path.stem)
def test_every_requirement_is_pinned_with_hashes_and_no_address(lock):
    text = lock.read_text()
    entries = SPLIT.requirements(text)
    assert entries
    for requirement, hashes in entries.items():
        assert re.fullmatch(r"[\w.-]+==[\w.]+( ; .+)?", requirement)
        assert hashes, requirement
        assert len(set(hashes)) == len(hashes)
    assert "://" not in text


def test_what_a_prediction_needs_is_the_same_for_users_and_developers():
    run, dev = (SPLIT.requirements((ROOT / "requirements" / f"{kind}.lock").read_text()) for kind in ("run", "dev"))
    assert {name: dev.get(name) for name in run} == run


def test_torch_may_be_any_build_of_one_version():
    (torch,) = (SPLIT.requirements((ROOT / "requirements" / "torch.lock").read_text())).items()
    assert torch[0] == "torch==2.13.0"
    assert len(torch[1]) > 10  # Linux, macOS and Windows, and CPU builds alongside the index


def test_compiled_requirements_are_split_by_who_needs_them(tmp_path, monkeypatch):
    a, b, c, d = (letter * 64 for letter in "abcd")
    compiled = tmp_path / "compiled"
    compiled.write_text(
        f"# a comment\nnumpy==2.0 \\\n    --hash=sha256:{b} \\\n    --hash=sha256:{a}\n"
        f"nvidia-nccl==1 ; sys_platform == 'linux' \\\n    --hash=sha256:{c}\n"
        f"torch==2.13.0 \\\n    --hash=sha256:{b}\n"
    )
    (tmp_path / "torch.lock").write_text(f"torch==2.13.0 \\\n    --hash=sha256:{d}\n")
    wheel = tmp_path / "torch-2.13.0+cpu.whl"
    wheel.write_bytes(b"a build of torch")
    served = f"sha256:{hashlib.sha256(b'a build of torch').hexdigest()}"
    monkeypatch.setattr("sys.argv", ["split_lock", str(compiled), str(tmp_path), str(wheel)])
    SPLIT.main()
    written = {kind: SPLIT.requirements((tmp_path / f"{kind}.lock").read_text()) for kind in ("dev", "torch", "cuda")}
    assert written == {
        "dev": {"numpy==2.0": [f"sha256:{a}", f"sha256:{b}"]},
        "torch": {"torch==2.13.0": sorted([f"sha256:{b}", served, f"sha256:{d}"])},  # compiled, served here, earlier
        "cuda": {"nvidia-nccl==1 ; sys_platform == 'linux'": [f"sha256:{c}"]},
    }
