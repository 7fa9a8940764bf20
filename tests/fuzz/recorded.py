"""Changed files of what other tools recorded or planned, of what was measured here, and odd calls of agents' tools."""

from __future__ import annotations

import io
import json
import random
import sqlite3
import tempfile
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from tests.fuzz import documents
from tests.fuzz.documents import ODD_NUMBERS, ODD_TEXTS, damaged_bytes
from tests.fuzz.settings import SCENARIO, write_json, write_yaml
from tests.traces import damaged
from tests.traces.databases import NSIGHT, ROCPD, RUN

Command = list[str]
CALL = "(call a tool)"
"""Stands for a command where an agent calls a tool."""
_ENTRIES = [{"name": name, "rows": 1000, "dim": 64, "pooling": 4} for name in ("user.id", "items", "clicks")]
TORCHREC_TABLES = {"modules": {"model.ebc": {"tables": _ENTRIES[:2]}, "other": {"tables": _ENTRIES[2:]}}}
RECOMMENDERS: tuple[dict[str, Any], ...] = (
    {"recommender": "deepfm", "dense_mlp": [64], "mlp": [64, 32], "dense_features": 13},
    {"recommender": "wide-deep", "mlp": [64, 32], "optimizer": "sgd"},
    {"recommender": "two-tower", "query": ["a"], "candidate": ["b"], "mlp": [64, 32]},
    {"recommender": "din", "history": {"mean": 20, "spread": 5, "longest": 50}, "attention_mlp": [16, 8]},
    {"recommender": "hstu", "history": 32, "layers": 2, "heads": 2, "head_dim": 16, "per_action": ["a"]},
    {"recommender": "onetrans", "history": 32, "layers": 2, "heads": 2},
)
_STORED = ({}, {"storage": "uvm"}, {"storage": {"kind": "uvm_caching", "cache": 0.3, "hit_rate": 0.9}},
           {"storage": {"kind": "ssd", "drive_gb_per_s": 2.5}}, {"sharding": "row_wise"})  # fmt: skip
CALLS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("predict", {"workload": "dlrm-ddp", "on": "v100", "fields": {"batch_size": 64, "dtype": "fp16"}}),
    ("compare", {"workload": "dlrm-ddp", "on": ["v100", "h100"], "price": "v100=1,h100=2.5", "fields": {"gpus": 1}}),
    ("fits", {"workload": "mpt-125m", "on": "h100", "fields": {"seq_len": 128, "micro_batch": 1}}),
    ("whatif", {"workload": "dlrm-ddp", "on": "v100", "edits": ["batch-size=128", "tf32"], "fields": {}}),
    ("shard", {"tables": "mlperf-dlrm", "on": "dgx-a100", "gpus": 2, "batch_size": 512}),
    ("trace", {"path": "no such file"}), ("models", {"text": "dlrm"}), ("platforms", {"text": "h100"}),
)  # fmt: skip


def mutated(document: Any, rng: random.Random) -> Any:
    """A copy with odd places, most numbers near their own."""
    return documents.mutated(document, rng, near=0.7)


def make_database(rng: random.Random, folder: Path) -> Command:
    """A database of Nsight Systems or rocprofv3: cells, columns, rows and tables are odd, or its bytes."""
    script = rng.choice((NSIGHT, ROCPD.replace("{run}", RUN)))
    path = folder / rng.choice(("run.sqlite", "run.db"))
    with closing(sqlite3.connect(path)) as database:
        database.executescript(script)
        for _ in range(rng.choice((1, 1, 2, 3))):
            change_database(database, rng)
        database.commit()
    if rng.random() < 0.3:
        path.write_bytes(damaged_bytes(path.read_bytes(), rng))
    return ["trace", str(path), *rng.choice(([], ["--on", "v100"], ["--full"], ["--compare", str(path)]))]


def change_database(database: sqlite3.Connection, rng: random.Random) -> None:
    """One odd cell, or a row, column or table that is missing, twice, or a view."""
    listed = database.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name")
    tables = [str(row[0]) for row in listed]
    if not tables:
        return
    table = rng.choice(tables)
    columns = [row[1] for row in database.execute(f'PRAGMA table_info("{table}")')]
    column, change = rng.choice(columns), rng.random()
    try:
        if change < 0.65:
            whole = [odd for odd in ODD_NUMBERS if not isinstance(odd, int) or -(1 << 63) <= odd < 1 << 63]
            texts = [odd for odd in ODD_TEXTS if odd.isascii() or odd == "é"]
            value = rng.choice((*whole, *texts, None, b"\xff\xfe", b"", "{" * 3000, '{"message": {}}'))
            database.execute(f'UPDATE "{table}" SET "{column}" = ? WHERE rowid = (SELECT rowid FROM "{table}" '
                             "ORDER BY rowid LIMIT 1 OFFSET ?)", (value, rng.randrange(5)))  # fmt: skip
        elif change < 0.75:
            database.execute(f'INSERT INTO "{table}" SELECT * FROM "{table}"')
        elif change < 0.85:
            database.execute(f'ALTER TABLE "{table}" DROP COLUMN "{column}"')
        elif change < 0.92:
            database.execute(f'DELETE FROM "{table}"')
        else:
            database.execute(f'ALTER TABLE "{table}" RENAME TO "moved"')
            if rng.random() < 0.5:
                database.execute(f'CREATE VIEW "{table}" AS SELECT * FROM "moved"')
    except (sqlite3.Error, OverflowError):  # a key twice: as it was
        pass


def make_prediction(rng: random.Random, folder: Path) -> Command:
    """What `predict --json` printed, that a trace is compared with."""
    trace, path = folder / "t.json", folder / "predicted.json"
    trace.write_text(json.dumps(damaged.kineto_document()), encoding="utf-8")
    path.write_bytes(write_json(mutated(_load_prediction(), rng), rng))
    return ["trace", str(path), str(trace), "--compare"]


@cache
def _load_prediction() -> Any:
    from tests.fuzz.running import run_quietly

    return json.loads(run_quietly(["predict", "dlrm-ddp", "--on", "v100", "--json"]))


def make_store(rng: random.Random, folder: Path) -> Command:
    """A store of measurements: odd rows, or damaged bytes."""
    import polars

    rows = [dict(row) for row in _load_samples()]
    if rng.random() < 0.6:
        for _ in range(rng.choice((1, 1, 2, 5))):
            row = rng.choice(rows)
            name = rng.choice(list(row))
            changed = mutated([row[name]], rng)
            row[name] = changed[0] if isinstance(changed, list) and changed else None
    store = folder / "store"
    store.mkdir()
    buffer = io.BytesIO()
    try:
        polars.DataFrame(rows, strict=False, infer_schema_length=None).write_parquet(buffer)
        data = buffer.getvalue()
    except Exception:  # what Parquet cannot hold is no file of it
        data = b"PAR1" + rng.randbytes(200) + b"PAR1"
    name = rng.choice(("segment-000001.parquet", "segment-000001.parquet", "sample-000001.parquet"))
    (store / name).write_bytes(damaged_bytes(data, rng) if rng.random() < 0.4 else data)
    if rng.random() < 0.1:
        (store / "sample-000002.parquet").write_bytes(rng.choice((b"", data, b"PAR1")))
    refined = rng.choice(([], ["--refine", "v100"]))
    return ["fit", "--store", str(store), "--out", str(folder / "out.toml"), *refined]


@cache
def _load_samples() -> tuple[dict[str, Any], ...]:
    """Rows of a store, few enough that fitting them takes little."""
    import polars

    from tests.calibration.test_refine import V100
    from tests.costs.cpu.made_up import samples
    from traincast.calibration.bench.store import Store

    with tempfile.TemporaryDirectory() as name:
        store = Store(Path(name) / "store", V100)
        for number, sample in enumerate(samples(80)):
            store.append(f"key-{number}", replace(sample, kernels=1))
        files = sorted(store.folder.glob("*.parquet"))
        return tuple(row for file in files for row in polars.read_parquet(file).iter_rows(named=True))


def make_torchrec(rng: random.Random, folder: Path) -> Command:
    """Tables and a plan as TorchRec describes them."""
    tables, plan = folder / "tables.json", folder / "plan.json"
    keep_tables = rng.random() < 0.5
    tables.write_bytes(json.dumps(TORCHREC_TABLES).encode() if keep_tables else
                       write_json(mutated(TORCHREC_TABLES, rng), rng))  # fmt: skip
    plan.write_bytes(write_json(mutated(_load_plan(), rng) if keep_tables else _load_plan(), rng))
    return ["shard", str(tables), "--on", "dgx-a100", "--gpus", "2", "--candidates", str(plan)]


@cache
def _load_plan() -> Any:
    from tests.fuzz.running import run_quietly

    with tempfile.TemporaryDirectory() as name:
        tables, plan = Path(name) / "tables.json", Path(name) / "plan.json"
        tables.write_text(json.dumps(TORCHREC_TABLES), encoding="utf-8")
        run_quietly(["shard", str(tables), "--on", "dgx-a100", "--gpus", "2", "--no-torchrec", "--time-limit", "0",
                     "--processes", "1", "--torchrec-out", str(plan)])  # fmt: skip
        return json.loads(plan.read_text(encoding="utf-8"))


def make_recommender(rng: random.Random, folder: Path) -> Command:
    """The short YAML of a recommender that is no DLRM."""
    about = rng.choice(RECOMMENDERS)
    tables = {name: {"rows": rows, "dim": 32, **rng.choice(_STORED)} for name, rows in (("a", 5000), ("b", 100))}
    path = folder / "mine.yaml"
    path.write_bytes(write_yaml(mutated({**about, "tables": tables, "batch_size": 256}, rng), rng))
    return ["predict", str(path), "--on", "dgx-a100", *rng.choice(([], ["--gpus", "2"], ["--mode", "inference"]))]


def make_checked(rng: random.Random, folder: Path) -> Command:
    """A scenario that `check` stores for the first time."""
    path = folder / "step.yaml"
    document = mutated(rng.choice((SCENARIO, {"steps": [SCENARIO]}, [SCENARIO, SCENARIO])), rng)
    path.write_bytes(write_yaml(document, rng))
    return ["check", str(path), "--baseline", str(folder / "out.json"), "--update", "--reason", "first"]


def make_corrected(rng: random.Random, folder: Path) -> Command:
    """A platform that corrects a built-in GPU, as `fit --refine` writes it."""
    lines = _load_corrected().splitlines()
    for _ in range(rng.choice((1, 1, 2))):
        place = rng.randrange(len(lines))
        name, equals, _ = lines[place].partition("=")
        odd = (*map(str, ODD_NUMBERS), "nan", "inf", "'x'", "''", "true", "[]", "{}", "'gpu.toml'", "'v100'", "'cpu'")
        lines[place] = f"{name}= {rng.choice(odd)}" if equals else rng.choice(("", "[other]", lines[place] * 2))
    path = folder / "gpu.toml"
    data = "\n".join(lines).encode()
    path.write_bytes(damaged_bytes(data, rng) if rng.random() < 0.15 else data)
    return ["predict", "dlrm-ddp", "--on", str(path)]


@cache
def _load_corrected() -> str:
    from tests.calibration.test_refine import store_of
    from traincast.app.api import refine

    with tempfile.TemporaryDirectory() as name:
        store_of(Path(name) / "store", 40)
        refine(Path(name) / "store", "v100", out=Path(name) / "gpu.toml")
        return (Path(name) / "gpu.toml").read_text(encoding="utf-8")


def make_call(rng: random.Random, folder: Path) -> Command:
    """A call of an agent: odd names, edits and fields; the arguments themselves have their types."""
    name, arguments = rng.choice(CALLS)
    changed = mutated(arguments, rng)
    kept = changed if isinstance(changed, dict) else {}
    sound = {key: kept[key] if type(kept.get(key)) is type(value) else value for key, value in arguments.items()}
    for key in ("on", "edits"):
        if isinstance(sound.get(key), list):
            sound[key] = [one for one in sound[key] if isinstance(one, str)]
    return [CALL, name, write_json(sound, rng).decode("utf-8", "replace")]


RECORDED: dict[str, Callable[[random.Random, Path], Command]] = {
    "profiler database": make_database, "prediction": make_prediction, "store": make_store,
    "torchrec": make_torchrec, "recommender yaml": make_recommender, "checked scenario": make_checked,
    "corrected platform": make_corrected, "tool call": make_call,
}  # fmt: skip
