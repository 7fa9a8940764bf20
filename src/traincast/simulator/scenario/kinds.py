"""What a workload is, asked once, and which fields of a scenario a step of each kind uses.

A field that was given and is not used is an error: `check_used` names it and says what it is for.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from traincast.ir.workload import Workload
from traincast.models.catalog import list_models
from traincast.simulator.scenario.scenario import Scenario, list_scenario_fields
from traincast.utils.errors import TraincastError, make_unknown_error, shorten_value
from traincast.utils.files.reading import read_document

if TYPE_CHECKING:
    from traincast.simulator.scenario.scenario import Source

KINDS = {
    "model": "a captured model",
    "workload": "a workload of captured ops",
    "dlrm": "a description of a DLRM",
    "recommender": "a description of a recommender",
    "transformer": "a description of a Transformer that only infers",
    "parallel": "a description of a Transformer, laid out over its GPUs",
    "program": "one published program",
    "tables": "a set of embedding tables",
    "here": "a step on the machine at hand",
}
"""What a step can come from; "parallel" is a Transformer that trains, on one GPU or laid out over many."""
_USERS = {
    "model": "captured models", "workload": "saved workloads", "dlrm": "DLRMs", "recommender": "described recommenders",
    "transformer": "Transformers that infer", "parallel": "described Transformers, such as llama3-8b",
    "program": "published programs", "tables": "sets of embedding tables", "here": "the machine at hand",
}  # fmt: skip
_EVERY = ("workload", "on", "gpus", "batch_size", "dtype", "mode")
_GPU = ("clock_mhz", "power_limit_w", "host", "roofline_only", "allocator")
_FED = ("loader_ms", "workers", "pageable", "costs")
_LAUNCHED = ("kernels", "compiled", "cuda_graph")
_OPS = ("optimizer", *_LAUNCHED, "skew_ms", "jitter", "seed", *_FED)
_SHARED = ("micro_batch", "global_batch", "fsdp", "zero", "shard_group", "no_reshard")
_SAVED = ("optimizer_state", "offload")
_DIVIDED = ("tp", "pp", "vp", "cp", "ep", "etp")
_LAID_OUT = (
    *_SHARED, "dropout", "autocast", "optimizer_impl", "fp8_scaling", "fp8_gather", "checkpoint", "checkpoint_every",
    "checkpoint_layers", "expert_imbalance", "tp", "pp", "vp", "cp", "ep", "etp", "no_sequence_parallel", "schedule",
    "stage_layers",
    "cp_exchange", "dispatch", "graph_modules", "overlap", "no_overlap", "lora_rank", "lora_targets",
    "frozen_layers", "document_len",
    *_SAVED, "lora_base", "loss", "update_in_backward",
)  # fmt: skip
USED: Mapping[str, frozenset[str]] = {
    "model": frozenset(
        (*_EVERY, *_GPU, *_OPS, *_SHARED, *_SAVED, "seq_len", "attention", "embedding", "program", "plan")
    ),
    "workload": frozenset((*_EVERY, *_GPU, *_OPS, *_SHARED, *_SAVED, "seq_len", "program", "plan")),
    "dlrm": frozenset((*_EVERY, *_GPU, *_OPS, "embedding", "program", "plan")),
    "recommender": frozenset((*_EVERY, *_GPU, *_OPS, *_SHARED, "program", "plan")),
    "transformer": frozenset((*_EVERY, *_GPU, *_OPS, "seq_len", "attention")) - {"optimizer"},
    "parallel": frozenset((*_EVERY, *_GPU, *_LAID_OUT, *_FED, "seq_len", "attention", "optimizer", *_LAUNCHED)),
    "program": frozenset((*_EVERY, *_GPU, *_OPS)) - {"optimizer", "kernels", "compiled"},
    "tables": frozenset(("workload", "on", "gpus", "clock_mhz", "batch_size", "dtype", "plan", "dense")),
    "here": frozenset((*_EVERY, "seq_len", "optimizer", "attention", "embedding")),
}
"""Fields that a step of each kind uses."""
OFFLOADS = ("parameters", "optimizer", "activations")
"""What a step may keep in host memory (`offload`)."""
_WEIGHTS = (".pt", ".pth", ".bin", ".ckpt", ".safetensors", ".onnx", ".h5", ".gguf")
TABLE_FILES = (".csv", ".parquet")


def find_source_kind(source: Source) -> str:
    """The kind of a workload, but "parallel" and "here", which other fields decide."""
    if isinstance(source, Workload):
        return "workload"
    if not isinstance(source, str | Path):
        return "transformer"
    path = Path(source)
    if path.suffix == ".tc":
        return "workload"
    if path.suffix in (".yaml", ".yml"):
        return _find_described_kind(path)
    if path.suffix in TABLE_FILES:
        return "tables"
    if path.suffix == ".json":
        from traincast.models.embeddings.documents import is_table_document

        content = read_document(path)
        if isinstance(content, Mapping) and "traceEvents" in content:
            raise _make_trace_error(str(source))
        return "tables" if is_table_document(content) else "transformer"
    return _find_named_kind(str(source))


def _make_trace_error(name: str) -> TraincastError:
    return TraincastError(
        f"{shorten_value(name)} is a trace of what ran: 'traincast trace' says what is in it, memory replayed too, and "
        "makes a step of it that can be predicted"
    )


def _find_named_kind(name: str) -> str:
    from traincast.models.dlrm.config import DLRM_V2, STUDY_DLRMS

    if name == DLRM_V2.name or name in STUDY_DLRMS:
        return "dlrm"
    models = [info.name for info in list_models()]
    if name in models:
        return "model"
    from traincast.models.transformers.reading import list_built_in_names

    if name in list_built_in_names():
        return "transformer"
    from traincast.models.embeddings.documents import BUILTIN_SETS

    if name in BUILTIN_SETS:
        return "tables"
    from traincast.models.catalog import list_published_programs

    if name in list_published_programs():
        return "program"
    if ".py" in name:
        raise TraincastError(
            f"{shorten_value(name)} is a program that cannot be found or is not captured yet: give the path of a file, "
            "or capture its step first ('traincast capture')"
        )
    if name.endswith(".json.gz"):
        raise _make_trace_error(name)
    if name.endswith(_WEIGHTS):
        raise TraincastError(
            f"{shorten_value(name)} holds weights, which do not say how a step runs; capture the script that trains it "
            "('traincast capture train.py -o step.tc'), or give the config.json of a Transformer"
        )
    known = (*models, *list_published_programs(), *list_built_in_names(), *BUILTIN_SETS)
    raise make_unknown_error("model", name, known, "`traincast models` lists the built-in models.")


def _find_described_kind(path: Path) -> str:
    """What a YAML file describes; one that cannot be read is left to the reader of DLRMs, which says why."""
    from traincast.models.embeddings.documents import is_table_document
    from traincast.models.recommenders.description import is_recommender_document

    content = read_document(path)
    if isinstance(content, Mapping) and {"layers", "hidden"} <= set(content):
        return "transformer"
    if is_recommender_document(content):
        return "recommender"
    return "tables" if is_table_document(content) else "dlrm"


def choose_step_kind(kind: str, scenario: Scenario) -> str:
    """The kind of a step, given that of its workload: a Transformer that trains is laid out over its GPUs."""
    return "parallel" if kind == "transformer" and scenario.mode != "inference" else kind


def check_used(scenario: Scenario, kind: str) -> None:
    """Rejects fields that were given and that a step of this kind does not use, and those that need another one."""
    given = scenario.given()
    for name in given:
        if name not in USED[kind]:
            users = [_USERS[other] for other, used in USED.items() if name in used]
            raise TraincastError(
                f"`{name}` is not used here: {_get_shown_name(scenario)} is {KINDS[kind]}, and `{name}` is for "
                f"{' or '.join(users[:3])}{_explain(name, kind)}; leave it out"
            )
        needs = list_scenario_fields()[name].needs
        if needs and not any(need in given for need in needs):
            others = " or ".join(f"`{need}`" for need in needs)
            raise TraincastError(f"`{name}` is used with {others} only; give one, or leave it out")


def check_sharing(scenario: Scenario) -> None:
    """Rejects fields of data parallelism that contradict each other."""
    s = scenario
    if s.fsdp and s.zero not in (None, 3):
        raise TraincastError(f"`fsdp` shares all that `zero=3` does; `zero={s.zero}` contradicts it; give one of them")
    if s.micro_batch is not None and s.batch_size not in (None, s.micro_batch):
        raise TraincastError(
            f"`batch_size` {s.batch_size} and `micro_batch` {s.micro_batch} both say how many samples a GPU has at a "
            "time; give one of them"
        )


def parse_offload(text: str | None) -> tuple[str, ...]:
    """What is kept in host memory, of `OFFLOADS`."""
    named = tuple(part.strip() for part in text.split(",")) if text else ()
    for name in named:
        if name not in OFFLOADS:
            raise make_unknown_error("offload", name, OFFLOADS, f"Choose from {', '.join(OFFLOADS)}.")
    return named


def _explain(name: str, kind: str) -> str:
    """Why a step of this kind has no such field, where that is not plain."""
    if kind == "dlrm" and name in _SHARED:
        return " (its embedding tables are divided among GPUs by their plan)"
    if kind not in ("model", "workload") or name not in _DIVIDED:
        return ""
    return " (the ops of a capture do not show how its layers could be divided among GPUs)"


def _get_shown_name(scenario: Scenario) -> str:
    source = scenario.workload
    return source if isinstance(source, str) else f"'{source.name}'" if not isinstance(source, Path) else source.name
