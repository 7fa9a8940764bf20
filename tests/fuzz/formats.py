"""Every format that strangers hand to Traincast: a sound example decoded, changed and encoded again."""

from __future__ import annotations

import gzip
import io
import json
import random
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from tests.fuzz.documents import ODD_NUMBERS, damaged_bytes, mutated
from tests.fuzz.messages import mutated_messages
from tests.fuzz.recorded import RECORDED
from tests.fuzz.settings import PLAN, SETTINGS, TABLES, write_json, write_yaml
from tests.traces import damaged
from traincast.ir.export_traces import export_chakra_et, export_pytorch_et
from traincast.ir.file import save_workload
from traincast.models.catalog import load_model

Command = list[str]
DLRM = {
    "name": "mine", "bottom_mlp": [13, 64, 32], "top_mlp": [64, 1], "rows_per_table": [1000, 20, 300000],
    "lookups_per_table": [10, 1, 4], "embedding_dim": 32, "batch_size": 512, "optimizer": "sgd", "interaction": "dot",
}  # fmt: skip


@dataclass(frozen=True)
class Format:
    """How changed files of one format are made: `make(rng, folder)` writes them and returns the command to run."""

    name: str
    make: Callable[[random.Random, Path], Command]


def _workload(rng: random.Random, folder: Path) -> Command:
    head, arrays = _decoded(rng.choice(_workload_files()))
    if rng.random() < 0.6:
        head = mutated(head, rng)
    else:
        name = rng.choice(list(arrays))
        arrays = {**arrays, name: _odd_array(arrays[name], rng)}
    path = folder / "x.tc"
    path.write_bytes(_encoded(head, arrays))
    if rng.random() < 0.05:
        path.write_bytes(damaged_bytes(path.read_bytes(), rng))
    return rng.choice(
        [
            ["predict", str(path), "--on", rng.choice(("v100", "h100", "mi250"))],
            ["predict", str(path), "--on", "a100-80gb", "--batch-size", str(rng.choice((1, 3, 4096)))],
            ["predict", str(path), "--on", "dgx-a100", "--gpus", "2"],
            ["export", str(path), "-o", str(folder / "out"), "--to", rng.choice(("pytorch", "chakra"))],
        ]
    )


@cache
def _workload_files() -> tuple[bytes, ...]:
    names = ("dlrm-ddp", "dlrm-v2", "resnet50", "transformer")
    return tuple(
        _written(lambda path, name=name: save_workload(load_model(name, mode="training"), path)) for name in names
    )


def _written(write: Callable[[Path], None]) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "sound"
        write(path)
        return path.read_bytes()


@cache
def _decoded(data: bytes) -> tuple[Any, dict[str, np.ndarray]]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        head = json.loads(archive.read("workload.json"))
        arrays = {
            name: np.load(io.BytesIO(archive.read(name))).astype(np.int64)
            for name in archive.namelist()
            if name.endswith(".npy")
        }
    return head, arrays


def _odd_array(array: np.ndarray, rng: random.Random) -> np.ndarray:
    changed = array.copy()
    whole = [number for number in ODD_NUMBERS if isinstance(number, int) and abs(number) < 1 << 62]
    if rng.random() < 0.15 or not changed.size:
        return changed[: rng.randrange(len(changed) + 1)]
    for _ in range(rng.choice((1, 1, 2, 5))):
        place = rng.randrange(changed.size)
        changed.flat[place] = rng.choice([*whole, int(changed.flat[place]) + rng.choice((-1, 1)), rng.randrange(300)])
    return changed


def _encoded(head: Any, arrays: dict[str, np.ndarray]) -> bytes:
    from traincast.ir.file import pack_array, pack_members

    text = json.dumps(head, separators=(",", ":")).encode("utf-8", "surrogatepass")
    return pack_members({"workload.json": text, **{name: pack_array(array) for name, array in arrays.items()}})


def _kineto(rng: random.Random, folder: Path) -> Command:
    document = mutated(damaged.kineto_document(steps=rng.choice((1, 2, 3)), ops=rng.choice((2, 6))), rng)
    text = write_json(document, rng)
    path = folder / rng.choice(("t.json", "t.json.gz"))
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    extra = rng.choice(
        ([], ["--on", "v100"], ["--workload-out", str(folder / "w.tc")], ["--trace-out", str(folder / "o")])
    )
    return ["trace", str(path), *extra]


def _execution(rng: random.Random, folder: Path) -> Command:
    path = folder / "et.json"
    path.write_bytes(write_json(mutated(rng.choice((damaged.execution_document(), _exported_et())), rng), rng))
    return ["trace", str(path), *_beside(rng, folder)]


def _beside(rng: random.Random, folder: Path) -> list[str]:
    """The Kineto trace that an execution trace comes with, most of the time."""
    if rng.random() < 0.2:
        return []
    (folder / "kineto.json").write_text(json.dumps(damaged.kineto_document()))
    return [str(folder / "kineto.json")]


@cache
def _exported_et() -> Any:
    return json.loads(_written(lambda path: export_pytorch_et(load_model("dlrm-ddp", mode="inference"), 0, path)))


def _chakra(rng: random.Random, folder: Path) -> Command:
    path = folder / "t.et"
    data = rng.choice((damaged.chakra_bytes(), _exported_chakra()))
    path.write_bytes(damaged_bytes(data, rng) if rng.random() < 0.3 else mutated_messages(data, rng))
    return ["trace", str(path), *_beside(rng, folder)]


@cache
def _exported_chakra() -> bytes:
    return _written(lambda path: export_chakra_et(load_model("dlrm-ddp", mode="inference"), 0, path))


def _dlrm(rng: random.Random, folder: Path) -> Command:
    path = folder / "m.yaml"
    path.write_bytes(write_yaml(mutated(DLRM, rng), rng))
    return ["predict", str(path), "--on", "v100", *rng.choice(([], ["--gpus", "2"], ["--mode", "inference"]))]


def _tables(rng: random.Random, folder: Path) -> Command:
    kind = rng.choice(("yaml", "csv"))
    path = folder / f"t.{kind}"
    document = mutated(TABLES, rng)
    if kind == "yaml":
        path.write_bytes(write_yaml(document, rng))
    else:
        rows = document.get("tables") if isinstance(document, dict) else document
        path.write_bytes(_csv(rows if isinstance(rows, list) else TABLES["tables"], rng))
    return ["shard", str(path), "--on", "dgx-a100", "--gpus", "2", "--no-torchrec", "--time-limit", "0"]


def _csv(rows: list[Any], rng: random.Random) -> bytes:
    names = ["name", "rows", "dim", "pooling", *(["rows"] if rng.random() < 0.1 else [])]
    lines = [",".join(names)]
    for row in rows:
        cells = [str(row.get(name, "")) if isinstance(row, dict) else str(row) for name in names]
        lines.append(",".join(cells[: len(cells) - (rng.random() < 0.1)]))
    text = "\n".join(lines).encode("utf-8", "surrogatepass")
    return damaged_bytes(text, rng) if rng.random() < 0.15 else text


def _plan(rng: random.Random, folder: Path) -> Command:
    tables = folder / "t.yaml"
    tables.write_text(yaml.safe_dump(TABLES), encoding="utf-8")
    path = folder / rng.choice(("p.json", "p.yaml"))
    document = mutated(rng.choice((PLAN, {"plans": {"mine": PLAN}})), rng)
    path.write_bytes(write_json(document, rng) if path.suffix == ".json" else write_yaml(document, rng))
    return ["shard", str(tables), "--on", "dgx-a100", "--gpus", "2", "--candidates", str(path)]


def _platform(rng: random.Random, folder: Path) -> Command:
    source = rng.choice(_platform_files())
    text = source.read_text(encoding="utf-8")
    lines = text.splitlines()
    for _ in range(rng.choice((1, 1, 2))):
        place = rng.randrange(len(lines))
        name, equals, value = lines[place].partition("=")
        if not equals:
            continue
        odd = rng.choice(
            (*map(str, ODD_NUMBERS), "nan", "inf", "'x'", "''", "true", "[]", "[1]", "{}", "2020-01-01", "9" * 5000)
        )
        scaled = value.strip().replace(".", "", 1)
        near = str(float(value) * rng.choice((1e-3, 0.5, 2, 10, 1e3))) if scaled.isdigit() else odd
        lines[place] = f"{name}= {rng.choice((odd, near))}"
    if rng.random() < 0.1:
        lines.append(rng.choice((lines[-1], "deep = " + "[" * 3000 + "]" * 3000, "unknown = 1")))
    path = folder / "gpu.toml"
    path.write_text("\n".join(lines), encoding="utf-8")
    gpus = rng.choice(([], ["--gpus", "2"]))
    return ["predict", rng.choice(("dlrm-ddp", "resnet50")), "--on", str(path), *gpus]


@cache
def _platform_files() -> tuple[Path, ...]:
    import traincast

    folder = Path(traincast.__file__).parent / "hardware" / "data"
    return tuple(sorted((folder / "devices").glob("*.toml")) + sorted((folder / "nodes").glob("*.toml")))


def _indices(rng: random.Random, folder: Path) -> Command:
    lengths = np.array([3, 0, 2, 1], dtype=np.int64)
    arrays: dict[str, np.ndarray] = {"indices": np.array([5, 5, 1, 0, 9, 999], dtype=np.int64), "lengths": lengths}
    name = rng.choice(list(arrays))
    arrays[name] = rng.choice(
        (
            _odd_array(arrays[name], rng), arrays[name].astype(np.float64), arrays[name].reshape(-1, 1),
            np.zeros((0,), np.int64), np.zeros((3, 0), np.int64), np.array(7),
            arrays[name].astype(np.uint64), arrays[name].astype("U3"),
        )
    )  # fmt: skip
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    data = buffer.getvalue()
    (folder / "i.npz").write_bytes(damaged_bytes(data, rng) if rng.random() < 0.2 else data)
    tables = folder / "t.yaml"
    entry = {
        "name": "clicks",
        "rows": 1000,
        "dim": 64,
        "access": {"indices": rng.choice(("i.npz", "i.npz", "../i.npz", "/i.npz"))},
    }
    tables.write_text(yaml.safe_dump({"tables": [entry]}), encoding="utf-8")
    return ["shard", str(tables), "--on", "dgx-a100", "--gpus", "2", "--no-torchrec", "--time-limit", "0"]


FORMATS = tuple(
    Format(name, make)
    for name, make in {
        "workload": _workload, "kineto": _kineto, "execution trace": _execution, "chakra": _chakra, "dlrm yaml": _dlrm,
        "tables": _tables, "plan": _plan, "platform": _platform, "indices": _indices, **SETTINGS, **RECORDED,
    }.items()
)  # fmt: skip
