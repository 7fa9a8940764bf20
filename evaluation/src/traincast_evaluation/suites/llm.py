"""Training steps of large Transformers, predicted from their configurations against published measurements."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from traincast.utils.metrics import ErrorRow, compute_error_row
from traincast_evaluation.suites.cases import Case, LeftOut, Outcome, summarise_outcomes
from traincast_evaluation.suites.llm_extra_rows import make_extra_request, read_step_ms
from traincast_evaluation.suites.llm_presets import fill_from_presets
from traincast_evaluation.suites.llm_rows import is_fitted, make_request, make_vtrain_request
from traincast_evaluation.suites.published import Row, read_cases, read_rows
from traincast_evaluation.suites.training_request import TrainingRequest

_VTRAIN_NODE = 8  # GPUs of a node in its cluster
_FITTED, _HELD = "half that constants were fitted on", "held-out half"
_GIB, _IN_GIB = 2**30 / 1e9, ("simumax_b200", "torchtitan_torchao")
_MIXTURES = ("DeepSeek", "GPT OSS", "Kimi", "Qwen3", "Nemotron", "deepseek")


def llm_cases(data: Path) -> list[Case | LeftOut]:
    """Every step of the three tables, in their order."""
    folder = data / "iterations"
    published = folder / "llm_training.csv"
    filled = fill_from_presets(read_rows(published))
    return [
        *read_cases(published, lambda row: _make_llm_case(row, filled[row.number])),
        *read_cases(folder / "gpt_megatron_a100.csv", _make_vtrain_case),
        *(read_cases(extra, _make_extra_case) if (extra := folder / "llm_training_extra.csv").is_file() else ()),
    ]


def _make_llm_case(row: Row, filled: Row) -> Case:
    """The case of a row; `filled` has the settings of another release where it leaves them out."""
    kind = ""
    if row["set"] == "megatron_bridge_perf":
        kind = " mixtures" if any(word in row["model"] for word in _MIXTURES) else " dense"
    measured = row.positive("iteration_ms")
    others = {}
    if row["peer_predicted_ms"]:
        others["SimuMax"] = 100 * (row.positive("peer_predicted_ms") / measured - 1)
    return Case(
        name=_format_case_name(row),
        group=f"{row['set']}{kind}, tier {row['tier']}",
        question=make_request(filled),
        measured_ms=measured,
        measured_memory_gb=_read_memory_gb(row),
        fitted=is_fitted(row),
        others=others,
    )


def _make_extra_case(row: Row) -> Case:
    request = make_extra_request(row)
    return Case(
        name=_format_case_name(row),
        group=f"{row['set']}, tier {row['tier']}",
        question=request,
        measured_ms=read_step_ms(row, request.layout),
    )


def _read_memory_gb(row: Row) -> float | None:
    """Peak memory in GB; some sources print GiB."""
    if not row["memory_gb"]:
        return None
    return row.positive("memory_gb") * (_GIB if row["set"] in _IN_GIB else 1.0)


def _format_case_name(row: Row) -> str:
    degrees = " ".join(f"{name}{row[name]}" for name in ("tp", "pp", "vp", "cp", "ep") if row[name] not in ("", "1"))
    size = f"{row['gpus']} x {row.label('device')}, micro-batch {row['micro_batch']} of {row['global_batch']}"
    return f"{row.label('model')} {row['seq_len']} {row.label('precision')[:12]} on {size} {degrees}".rstrip()


def _make_vtrain_case(row: Row) -> Case:
    sizes = f"{row['num_layers']} x {row['hidden_size']}"
    degrees = f"tp{row['tp']} dp{row['dp']} pp{row['pp']}"
    return Case(
        name=f"GPT {sizes} on {row['num_gpus']}, micro-batch {row['micro_batch']} of {row['global_batch']} {degrees}",
        group=f"vtrain_{'one_node' if row.count('num_gpus') <= _VTRAIN_NODE else 'several_nodes'}, tier A",
        question=make_vtrain_request(row),
        measured_ms=row.positive("iteration_ms"),
        fitted=is_fitted(row),
    )


def summarise_llm(suite: str, outcomes: Sequence[Outcome], data: Path | None = None) -> list[ErrorRow]:
    """All steps, both halves, each source (both tiers together and apart, and its halves), then peak memory."""
    rows = [summarise_outcomes(suite, "all: step", outcomes)]
    halves = {name: [o for o in outcomes if o.case.fitted == (name == _FITTED)] for name in (_FITTED, _HELD)}
    rows += [summarise_outcomes(suite, f"all: {name}", chosen) for name, chosen in halves.items() if chosen]
    sources = dict.fromkeys(outcome.case.group.partition(",")[0] for outcome in outcomes)
    for source in sources:
        chosen = [o for o in outcomes if o.case.group.partition(",")[0] == source]
        rows.append(summarise_outcomes(suite, source, chosen))
        parts = {_FITTED: [o for o in chosen if o.case.fitted], _HELD: [o for o in chosen if not o.case.fitted]}
        parts |= {
            group: [o for o in chosen if o.case.group == group] for group in sorted({o.case.group for o in chosen})
        }
        names = [name for name, some in parts.items() if some and len(some) < len(chosen)]
        rows += [
            summarise_outcomes(suite, f"{source}: {name.partition(', ')[2] or name}", parts[name]) for name in names
        ]
    return rows + _summarise_by_board(suite, outcomes) + _summarise_memory(suite, outcomes)


def _summarise_by_board(suite: str, outcomes: Sequence[Outcome]) -> list[ErrorRow]:
    """Steps that no constant was fitted on, by GPU and by whether they leave a node."""
    groups: dict[str, list[Outcome]] = {}
    for outcome in (one for one in outcomes if not one.case.fitted):
        request = outcome.case.question
        assert isinstance(request, TrainingRequest)
        platform = request.platform()
        reach = "several nodes" if request.layout.gpus > platform.gpus_per_node else "one node"
        for name in (f"held out, GPU: {platform.device.key}", f"held out, network: {reach}"):
            groups.setdefault(name, []).append(outcome)
    return [summarise_outcomes(suite, name, groups[name]) for name in sorted(groups)]


def _summarise_memory(suite: str, outcomes: Sequence[Outcome]) -> list[ErrorRow]:
    """Peak memory where a source printed one."""
    printed = [o for o in outcomes if o.case.measured_memory_gb and o.memory_gb]
    groups = {"memory: all": printed}
    groups |= {
        f"memory: {source}": [o for o in printed if o.case.group.partition(",")[0] == source]
        for source in sorted({o.case.group.partition(",")[0] for o in printed})
    }
    return [
        compute_error_row(
            suite, name, [o.memory_gb for o in some], [o.case.measured_memory_gb or 0.0 for o in some],
            [o.case.name for o in some],
        )
        for name, some in groups.items()
        if some
    ]  # fmt: skip


def llm_notes() -> tuple[str, ...]:
    """What is assumed, and what is not shown."""
    return (
        "what a source leaves out is assumed by one rule for all its rows (docs/evidence/many-gpus.md)",
        "steps of MLPerf are derived from logs and are no verified MLPerf results",
    )
