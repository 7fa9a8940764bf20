"""Changed files of settings, results and measurements: what a user writes by hand, or another run has written."""

from __future__ import annotations

import io
import json
import random
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from tests.fuzz import documents
from tests.fuzz.documents import ODD_NUMBERS, ODD_TEXTS, damaged_bytes

Command = list[str]
ASK = "(ask the server)"
"""Stands for a command where the server is asked."""
TABLES = {
    "tables": [
        {"name": "clicks", "rows": 400000, "dim": 64, "pooling": 20},
        {"name": "items", "rows": 900000, "dim": 128, "pooling": 5, "access": "zipf:1.05"},
        {"name": "small", "rows": 2000, "dim": 32, "pooling": 1, "dtype": "fp16"},
    ]
}
PLAN = {
    "world_size": 2,
    "tables": {
        "clicks": {"kind": "table_wise", "kernel": "fused", "ranks": [0]},
        "items": {"kind": "row_wise", "kernel": "fused", "ranks": [0, 1]},
        "small": {"kind": "data_parallel", "ranks": [0, 1]},
    },
}
_LLAMA = {
    "model_type": "llama", "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 2, "intermediate_size": 1024, "vocab_size": 32000, "tie_word_embeddings": False,
    "max_position_embeddings": 512,
}  # fmt: skip
HUGGING_FACE: tuple[dict[str, Any], ...] = (
    _LLAMA,
    {**_LLAMA, "model_type": "falcon", "multi_query": True, "new_decoder_architecture": False},
    {**_LLAMA, "model_type": "gemma", "head_dim": 32},
    {**_LLAMA, "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2},
    {**_LLAMA, "model_type": "deepseek_v3", "q_lora_rank": 64, "kv_lora_rank": 32, "qk_nope_head_dim": 32,
     "qk_rope_head_dim": 16, "v_head_dim": 32, "n_routed_experts": 8, "num_experts_per_tok": 2,
     "moe_intermediate_size": 128, "n_shared_experts": 1, "first_k_dense_replace": 1},
    {"model_type": "vit", "hidden_size": 192, "num_hidden_layers": 4, "num_attention_heads": 3,
     "intermediate_size": 768, "image_size": 224, "patch_size": 16, "num_channels": 3},
    {"model_type": "gpt2", "n_embd": 256, "n_layer": 4, "n_head": 4, "vocab_size": 50257, "n_positions": 512},
    {"model_type": "t5", "d_model": 256, "num_layers": 4, "num_heads": 4, "d_ff": 1024, "d_kv": 64,
     "vocab_size": 32128},
    {"model_type": "bert", "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4,
     "intermediate_size": 1024, "vocab_size": 30522, "max_position_embeddings": 512},
)  # fmt: skip
DENSE = {"bottom_mlp": [13, 64, 32], "top_mlp": [64, 1], "interaction": "cat"}
COSTS = {"aten::relu_": {"seconds": "1e-6 * in0.numel"}, "aten::mm": {"flops": "2 * in0.numel", "bytes": "min(1, 2)"}}
SCENARIO = {
    "workload": "dlrm-ddp", "on": "dgx-a100", "gpus": 2, "batch_size": 128, "dtype": "bf16", "mode": "training",
    "jitter": 0.1, "seed": 3, "clock_mhz": 1200.0,
}  # fmt: skip
LAID_OUT = {
    "workload": "mpt-125m", "on": "dgx-h100", "gpus": 8, "seq_len": 256, "tp": 2, "pp": 2, "micro_batch": 1,
    "global_batch": 8, "checkpoint": "full", "fsdp": 2, "overlap": "gradients,tp",
}  # fmt: skip


def mutated(document: Any, rng: random.Random) -> Any:
    """A copy with odd places, most numbers near their own: refused by what they mean, not by their size."""
    return documents.mutated(document, rng, near=0.7)


def write_json(document: Any, rng: random.Random) -> bytes:
    """JSON, now and then with keys twice or damaged."""
    text = json.dumps(document).encode("utf-8", "surrogatepass")
    if rng.random() < 0.05 and text.startswith(b"{"):
        text = text[:-1] + b", " + text[1:]  # every key of the top level twice
    return damaged_bytes(text, rng) if rng.random() < 0.1 else text


def write_yaml(document: Any, rng: random.Random) -> bytes:
    """YAML, now and then with anchors, dates and long numbers, or damaged."""
    text = yaml.safe_dump(document, allow_unicode=True).encode("utf-8", "surrogatepass")
    if rng.random() < 0.1:
        anchors = b"a: &a [1,1,1,1]\nb: &b [*a,*a,*a,*a]\nc: &c [*b,*b,*b,*b]\n"
        extra = (text, anchors, b"day: 2020-01-01\n", b"n: !!int 'x'\n", b"n: " + b"9" * 5000 + b"\n", b"? [1]\n: 2\n")
        text += rng.choice(extra)
    return damaged_bytes(text, rng) if rng.random() < 0.1 else text


def _write_toml(document: Any, rng: random.Random) -> bytes:
    """TOML with tables in braces; what is no table is damaged anyway."""
    items = document.items() if isinstance(document, dict) else [("whole", document)]
    names = [key if key.isidentifier() and key.isascii() else json.dumps(key) for key, _ in items]
    lines = [f"{name} = {_format_toml(value)}" for name, (_, value) in zip(names, items, strict=True)]
    text = "\n".join(lines).encode("utf-8", "surrogatepass")
    return damaged_bytes(text, rng) if rng.random() < 0.15 else text


def _format_toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(str(key))} = {_format_toml(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_format_toml, value)) + "]"
    return repr(value) if isinstance(value, float) else json.dumps(value, ensure_ascii=False)


def make_hugging_face(rng: random.Random, folder: Path) -> Command:
    """A `config.json`, on one GPU or several."""
    path = folder / "config.json"
    path.write_bytes(write_json(mutated(rng.choice(HUGGING_FACE), rng), rng))
    more = rng.choice(([], ["--gpus", "4", "--fsdp", "2"], ["--mode", "inference"], ["--gpus", "4", "--tp", "2"]))
    return ["predict", str(path), "--on", "dgx-h100", "--seq-len", "256", *more]


def make_transformer(rng: random.Random, folder: Path) -> Command:
    """A short YAML of a Transformer."""
    from traincast.models.transformers.reading import load_built_in_tables

    table = dict(rng.choice([load_built_in_tables()[name] for name in ("mpt-125m", "mixtral-8x7b", "vit", "t5-11b")]))
    table |= {"layers": 2, "hidden": 256, "heads": 8}
    path = folder / "model.yaml"
    path.write_bytes(write_yaml(mutated(table, rng), rng))
    more = rng.choice(([], ["--gpus", "4", "--pp", "2", "--global-batch", "8", "--micro-batch", "1"], ["--fsdp", "1"]))
    return [rng.choice(("predict", "fits")), str(path), "--on", "dgx-h100", "--seq-len", "128", *more]


def make_dense(rng: random.Random, folder: Path) -> Command:
    """The dense part beside tables."""
    tables, path = folder / "t.yaml", folder / "dense.yaml"
    tables.write_text(yaml.safe_dump(TABLES), encoding="utf-8")
    dense = mutated(DENSE, rng)
    if rng.random() < 0.1 and isinstance(dense, dict):
        dense["bottom_mlp"] = [13, *[64] * rng.choice((100, 3000, 50_000)), 32]
    path.write_bytes(write_yaml(dense, rng))
    where = ["--on", "dgx-a100", "--gpus", "2", "--dense", str(path)]
    return rng.choice((["predict", str(tables), *where, "--plan", json.dumps(PLAN)],
                       ["shard", str(tables), *where, "--no-torchrec", "--time-limit", "0"]))  # fmt: skip


def make_costs(rng: random.Random, folder: Path) -> Command:
    """Costs of ops: structure and formulas."""
    document = mutated(COSTS, rng)
    formulas = ("min(1)", "in0.numel ** 99", "1/0", "in9.numel", "-1", "sqrt(-1)", "1e308*1e308", "(" * 500, "in0.x",
                "__import__('os')", "max(1,2,3)", "in0.shape[0] * 1e-9", "9" * 400)  # fmt: skip
    for parts in document.values() if isinstance(document, dict) else ():
        if isinstance(parts, dict) and rng.random() < 0.5:
            parts[rng.choice(("seconds", "flops", "bytes"))] = rng.choice(formulas)
    path = folder / "costs.toml"
    path.write_bytes(_write_toml(document, rng))
    return ["predict", rng.choice(("dlrm-ddp", "mpt-125m")), "--on", "v100", "--costs", str(path)]


def make_machine(rng: random.Random, folder: Path) -> Command:
    """A profile of a machine as `traincast fit --store` writes it."""
    document = mutated(_load_machine(), rng)
    path = folder / "machine.toml"
    path.write_bytes(_write_toml(document, rng))
    return ["predict", "dlrm-ddp", "--on", str(path), "--batch-size", "64"]


@cache
def _load_machine() -> dict[str, Any]:
    import tomllib

    from tests.costs.cpu.made_up import IDENTITY, samples
    from traincast.calibration.fit import fit_profile
    from traincast.costs.cpu.profile import save_profile

    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "machine.toml"
        save_profile(fit_profile(samples(), IDENTITY, "wall")[0], path)
        return tomllib.loads(path.read_text())


def make_scenario_file(rng: random.Random, folder: Path) -> Command:
    """`--file` of predict, fits and sweep."""
    document = mutated(rng.choice((SCENARIO, LAID_OUT)), rng)
    path = folder / "scenario.yaml"
    command = rng.choice(("predict", "predict", "fits", "sweep"))
    if command == "sweep" and isinstance(document, dict):
        document["vary"] = mutated({"batch_size": [64, 128], "clock-mhz": "1000:1200:100"}, rng)
    path.write_bytes(write_yaml(document, rng))
    return [command, "--file", str(path), *(["--processes", "1"] if command == "sweep" else [])]


def make_launch_file(rng: random.Random, folder: Path) -> Command:
    """`--from`: what other tools start a run with."""
    from traincast.models.transformers.reading import load_transformer
    from traincast.planner.parallelism.launch_files import TOOLS, write_launch_file
    from traincast.simulator.parallelism.layout import Layout, complete_layout

    tool = rng.choice(TOOLS)
    endings = {"torchtitan": ".sh", "torchtitan-toml": ".toml", "bridge": ".txt", "deepspeed": ".json"}
    model = load_transformer("mpt-125m")
    layout = complete_layout(Layout(seq_len=512, gpus=8, micro_batch=1, global_batch=16, sharding="zero3"), model)
    text = write_launch_file(tool, layout, model)
    if rng.random() < 0.7:
        words = text.split(" ")
        for _ in range(rng.choice((1, 1, 2, 4))):
            words[rng.randrange(len(words))] = str(rng.choice((*ODD_NUMBERS, *ODD_TEXTS)))
        text = " ".join(words)
    path = folder / f"launch{endings.get(tool, '.yaml')}"
    data = text.encode("utf-8", "surrogatepass")
    path.write_bytes(damaged_bytes(data, rng) if rng.random() < 0.4 else data)
    return ["predict", "mpt-125m", "--on", "dgx-h100", "--gpus", "8", "--from", str(path)]


def make_sweep_result(rng: random.Random, folder: Path) -> Command:
    """What `sweep --json` printed, as `report` reads it."""
    path = folder / "sweep.json"
    path.write_bytes(write_json(mutated(_load_sweep(), rng), rng))
    return ["report", str(path), "-o", str(folder / "out.html")]


@cache
def _load_sweep() -> Any:
    from tests.fuzz.running import run_quietly

    document = json.loads(run_quietly([*_SWEPT, "--json"]))
    for row in document["rows"]:
        row["prediction"] = {key: row["prediction"][key] for key in list(row["prediction"])[:3]}  # read by nobody
    return document


def make_journal(rng: random.Random, folder: Path) -> Command:
    """The journal of a sweep that was interrupted."""
    lines = _load_journal().split(b"\n")
    place = rng.randrange(len(lines))
    try:
        lines[place] = json.dumps(mutated(json.loads(lines[place]), rng)).encode("utf-8", "surrogatepass")
    except ValueError:
        lines[place] = damaged_bytes(lines[place] + b"x", rng)
    data = b"\n".join(lines)
    (folder / "out.csv.points").write_bytes(damaged_bytes(data, rng) if rng.random() < 0.3 else data)
    return [*_SWEPT, "-o", str(folder / "out.csv")]


_SWEPT = ["sweep", "dlrm-ddp", "--on", "v100", "--vary", "batch-size=8,16,32", "--processes", "1"]


@cache
def _load_journal() -> bytes:
    """Of a sweep that wrote its points, but could not write its result."""
    from unittest.mock import patch

    from tests.fuzz.running import run_quietly

    with tempfile.TemporaryDirectory() as name:
        out = Path(name) / "out.csv"
        with patch("traincast.planner.what_if.sweeps.run.Journal.remove", lambda _: None):
            run_quietly([*_SWEPT, "-o", str(out)])
        return out.with_name("out.csv.points").read_bytes()


def make_baseline(rng: random.Random, folder: Path) -> Command:
    """The baseline of `check`."""
    path = folder / "perf.json"
    path.write_bytes(write_json(mutated(_load_baseline(), rng), rng))
    return ["check", "--baseline", str(path)]


@cache
def _load_baseline() -> Any:
    from tests.fuzz.running import run_quietly

    with tempfile.TemporaryDirectory() as name:
        step, path = Path(name) / "step.yaml", Path(name) / "perf.json"
        step.write_text(yaml.safe_dump({"workload": "dlrm-ddp", "on": "v100", "batch_size": 64}))
        run_quietly(["check", str(step), "--baseline", str(path), "--update", "--reason", "first"])
        return json.loads(path.read_text())


def make_parquet(rng: random.Random, folder: Path) -> Command:
    """Tables, or the indices of one, in Parquet: odd columns, or damaged bytes."""
    import polars

    rows = [dict(row) for row in mutated(TABLES["tables"], rng) if isinstance(row, dict)] or [{"name": "a"}]
    names = ("name", "rows", "dim", "pooling")
    try:
        frame = polars.DataFrame({key: [row.get(key) for row in rows] for key in names}, strict=False)
        buffer = io.BytesIO()
        frame.write_parquet(buffer)
        data = buffer.getvalue()
    except Exception:  # what Parquet cannot hold is no file of it
        data = b"PAR1" + rng.randbytes(200) + b"PAR1"
    path = folder / "t.parquet"
    path.write_bytes(damaged_bytes(data, rng) if rng.random() < 0.7 else data)
    return ["shard", str(path), "--on", "dgx-a100", "--gpus", "2", "--no-torchrec", "--time-limit", "0"]


def make_index_columns(rng: random.Random, folder: Path) -> Command:
    """Raw indices of a table as a column of Parquet: of other types, nested, missing, or damaged."""
    import polars

    values: Any = rng.choice(([5, 5, 1, 0, 9, 999], [1.5, 2.0], [[1, 2], [], [3]], [-1, 2], ["a"], [None, 3], []))
    buffer = io.BytesIO()
    polars.DataFrame({rng.choice(("ids", "ids", "x")): values}).write_parquet(buffer)
    data = buffer.getvalue()
    (folder / "i.parquet").write_bytes(damaged_bytes(data, rng) if rng.random() < 0.5 else data)
    access = mutated({"indices": "i.parquet", "column": "ids", "batch_size": 8}, rng) if rng.random() < 0.3 else \
        {"indices": "i.parquet", "column": "ids", "batch_size": rng.choice((1, 2, 6))}  # fmt: skip
    tables = folder / "t.yaml"
    tables.write_bytes(write_yaml({"tables": [{"name": "clicks", "rows": 1000, "dim": 64, "access": access}]}, rng))
    return ["shard", str(tables), "--on", "dgx-a100", "--gpus", "2", "--no-torchrec", "--time-limit", "0"]


def make_request(rng: random.Random, folder: Path) -> Command:
    """A question to the server, its fields or its bytes changed."""
    asked = rng.choice((SCENARIO, LAID_OUT, {"of": "whatif", "workload": "dlrm-ddp", "on": "v100", "edits": ["tf32"]},
                        {"of": "scaling", "workload": "dlrm-ddp", "on": "dgx-a100", "gpus": [1, 2]}))  # fmt: skip
    return [ASK, write_json(mutated(asked, rng), rng).decode("utf-8", "replace")]


def make_command_line(rng: random.Random, folder: Path) -> Command:
    """Odd words where values, options and names are expected."""
    line = rng.choice(_LINES).split()
    pool = [str(odd).replace("\x00", "") for odd in (*ODD_NUMBERS, *ODD_TEXTS, "nan", "inf", "1e", "=", "--", "1,2")]
    for _ in range(rng.choice((1, 1, 2, 3))):
        place = rng.randrange(1, len(line))
        change = rng.random()
        if change < 0.6:
            line[place] = rng.choice(pool)
        elif change < 0.75:
            del line[place]
        else:
            line.insert(place, rng.choice((*pool, *rng.choice(_LINES).split()[1:])))
        if len(line) < 2:
            break
    return ["predict" if not line else line[0], *line[1:]]


_LINES = (
    "predict dlrm-ddp --on v100 --batch-size 64 --dtype fp16 --jitter 0.1 --seed 2",
    "predict mpt-125m --on dgx-h100 --gpus 8 --tp 2 --pp 2 --micro-batch 1 --global-batch 8 --schedule 1f1b",
    "predict resnet50 --on dgx-a100 --gpus 2,4 --batch-size 8 --scaling strong",
    "fits mpt-125m --on h100 --batch-size 2 --seq-len 128 --checkpoint full",
    "compare resnet50 --on v100,h100 --batch-size 4 --price 1,2",
    "whatif dlrm-ddp --on v100 --set batch-size=128 --set clock-mhz=1000",
    "sweep dlrm-ddp --on v100 --vary batch-size=8,16 --vary gpus=1:2:x2 --processes 1",
    "shard mlperf-dlrm --on dgx-a100 --gpus 8 --batch-size 512 --no-torchrec --time-limit 0",
    "models --json", "platforms dgx-a100", "completion bash",
    "predict mlperf-dlrm --on dgx-a100 --gpus 8 --plan {} --batch-size 64",
)  # fmt: skip
SETTINGS: dict[str, Callable[[random.Random, Path], Command]] = {
    "hugging face": make_hugging_face, "transformer yaml": make_transformer, "dense yaml": make_dense,
    "costs": make_costs, "machine profile": make_machine, "scenario file": make_scenario_file,
    "launch file": make_launch_file, "sweep result": make_sweep_result, "sweep journal": make_journal,
    "baseline": make_baseline, "parquet": make_parquet, "index columns": make_index_columns,
    "command line": make_command_line, "server request": make_request,
}  # fmt: skip
