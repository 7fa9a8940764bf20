"""Promise: what is refused is refused soon, and takes little memory, however large it says it is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import pytest

from tests.traces.damaged import kineto_document
from traincast.app.cli.main import main

ENDLESS = {
    "x.yaml": ["predict", "x.yaml", "--on", "v100"],
    "x.tc": ["predict", "x.tc", "--on", "v100"],
    "x.json": ["trace", "x.json"],
    "g.toml": ["predict", "dlrm-ddp", "--on", "g.toml"],
    "c.toml": ["predict", "dlrm-ddp", "--on", "v100", "--costs", "c.toml"],
    "s.yaml": ["predict", "--file", "s.yaml"],
    "l.toml": ["predict", "mpt-125m", "--on", "h100", "--from", "l.toml"],
    "b.json": ["check", "--baseline", "b.json"],
    "d.yaml": ["shard", "mlperf-dlrm", "--on", "dgx-a100", "--gpus", "2", "--dense", "d.yaml"],
    "t.csv": ["shard", "t.csv", "--on", "dgx-a100", "--gpus", "2"],
    "t.parquet": ["shard", "t.parquet", "--on", "dgx-a100", "--gpus", "2"],
    "p.json": ["shard", "mlperf-dlrm", "--on", "dgx-a100", "--gpus", "2", "--candidates", "p.json"],
    "y.yaml": ["predict", "mlperf-dlrm", "--on", "dgx-a100", "--gpus", "2", "--plan", "y.yaml"],
    "i.npz": ["shard", "raw-npz.yaml", "--on", "dgx-a100", "--gpus", "2", "--no-torchrec"],
    "i.parquet": ["shard", "raw-parquet.yaml", "--on", "dgx-a100", "--gpus", "2", "--no-torchrec"],
    "r.json": ["report", "r.json", "-o", "r.html"],
    "a.json": ["trace", "sound.json", "a.json", "--compare"],
    "s.sqlite": ["trace", "s.sqlite"],
    "c.et": ["trace", "c.et"],
    "c.py": ["capture", "c.py:make", "-o", "c.tc"],
    "f.json": ["fit", "--from-trace", "f.json", "--refine", "v100", "--out", "f.toml"],
    "n.yaml": ["check", "n.yaml", "--baseline", "new.json", "--update", "--reason", "first"],
}
LARGE = {
    "layers": {"layers": 4000, "hidden": 256, "heads": 4, "vocab": 1000},
    "dense": {"bottom_mlp": [13, *[64] * 3000], "top_mlp": [1]},
}
SHORT_MIB = (40, 100, 200)
SHORT_FOR_TORCH_MIB = (300, 650)
TRIES = 2 * len(ENDLESS) + len(LARGE) + len(SHORT_MIB) + 2 * len(SHORT_FOR_TORCH_MIB) + 1
"""Files without an end, pipes, sizes, limits of memory, and a step of too many ranks."""
_SECONDS = 20.0


def _refuse(words, capsys):
    start = time.process_time()
    assert main(words) == 2
    assert time.process_time() - start < _SECONDS
    err = capsys.readouterr().err
    assert err.startswith("traincast: ") and err.count("\n") == 1 and "internal" not in err
    return err


@pytest.mark.parametrize("kind", ["device", "pipe"])
@pytest.mark.parametrize("name", ENDLESS)
def test_files_without_an_end_are_not_read(name, kind, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sound.json").write_text(json.dumps(kineto_document()))
    for ending in ("npz", "parquet"):
        table = {"name": "a", "rows": 9, "dim": 8, "access": {"indices": f"i.{ending}", "batch_size": 8}}
        table["access"] |= {"column": "ids"} if ending == "parquet" else {}
        (tmp_path / f"raw-{ending}.yaml").write_text(json.dumps({"tables": [table]}))
    if kind == "pipe":
        os.mkfifo(tmp_path / name)
    else:
        (tmp_path / name).symlink_to("/dev/zero")

    assert "not exist" not in _refuse(ENDLESS[name], capsys)


def test_models_of_thousands_of_layers_are_refused_at_once(tmp_path, capsys):
    model, dense = tmp_path / "m.yaml", tmp_path / "d.yaml"
    model.write_text(json.dumps(LARGE["layers"]))
    dense.write_text(json.dumps(LARGE["dense"]))

    _refuse(["predict", str(model), "--on", "h100"], capsys)
    _refuse(["shard", "mlperf-dlrm", "--on", "dgx-a100", "--gpus", "2", "--dense", str(dense)], capsys)


def test_a_step_whose_every_rank_differs_is_simulated_up_to_a_number_of_them(capsys):
    _refuse(["predict", "resnet50", "--on", "dgx-h100", "--gpus", "8192", "--jitter", "0.1"], capsys)


def _run_within(mib, *words, cwd=None):
    code = f"import resource; resource.setrlimit(resource.RLIMIT_AS, ({mib << 20}, {mib << 20}))\n"
    code += f"import sys; sys.argv = ['traincast', *{words!r}]\n"
    code += "from traincast.app.cli.main import main; sys.exit(main())"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=cwd)


@pytest.mark.parametrize("mib", SHORT_MIB)
def test_memory_that_is_short_is_said(mib):
    done = _run_within(mib, "platforms")

    assert done.returncode == 2
    assert done.stderr == f"traincast: a process may take {mib} MiB here; traincast needs 256\n"


@pytest.mark.parametrize("mib", SHORT_FOR_TORCH_MIB)
def test_memory_that_is_short_for_torch_is_said_before_it_is_loaded(mib, tmp_path):
    pytest.importorskip("torchrec")
    (tmp_path / "step.py").write_text("def make(batch_size):\n    return lambda: None\n")

    captured = _run_within(mib, "capture", "step.py:make", "--batch-size", "4", "--out", "step.tc", cwd=tmp_path)
    sharded = _run_within(mib, "shard", "mlperf-dlrm", "--on", "dgx-a100", "--gpus", "2", "--time-limit", "0.1")

    assert (captured.returncode, captured.stderr.count("\n")) == (2, 1)
    assert f"{mib} MiB here; a capture needs 1024" in captured.stderr
    assert (sharded.returncode, sharded.stderr) == (0, "")
    assert f"{mib} MiB here; TorchRec needs 1024" in " ".join(sharded.stdout.split())
