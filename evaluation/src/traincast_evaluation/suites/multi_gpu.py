"""Whole steps on several GPUs, predicted against published measurements."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from traincast.ir.workload import Workload
from traincast.simulator.scenario.scenario import Scenario
from traincast.utils.errors import TraincastError
from traincast.utils.metrics import ErrorRow
from traincast_evaluation.suites.cases import Case, LeftOut, Outcome, summarise_outcomes
from traincast_evaluation.suites.default_program import default_program_cases
from traincast_evaluation.suites.multi_gpu_dlrm import GROUPS, dlrm_cases
from traincast_evaluation.suites.published import Row, read_cases
from traincast_evaluation.suites.replay import summarise_replayed_ranks
from traincast_evaluation.suites.single_gpu import TRANSFORMERS

_NODES = {"NVIDIA A100-SXM4-40GB": "dgx-a100"}
_DIVIDED = {"gpt2_large": "gpt2-large"}  # by NeuSight's names: what can be captured with its layers divided
_STRATEGIES = {name: name for name in ("dp", "tp", "pp")}  # data, tensor and pipeline parallel
# what a capture is tried with: beyond, GPT-2's layers cannot be divided or its tensors exceed every GPU
_MOST_CAPTURED, _MOST_SAMPLES, _LONGEST = 32, 4096, 32_768
_PYTORCH = (GROUPS["dle"], GROUPS["dle_old"], GROUPS["mlperf"])
_HUGECTR = tuple(GROUPS[name] for name in ("hugectr", "hugectr_nodes", "dcnv2", "dcnv2_nodes", "pcie"))


def multi_gpu_cases(data: Path) -> list[Case | LeftOut]:
    """Every published step on several GPUs that can be predicted from its configuration."""
    return [*transformer_cases(data), *dlrm_cases(data), *default_program_cases(data)]


def multi_gpu_notes() -> tuple[str, ...]:
    """What is left out here, and why."""
    if _has_torch():
        return ()
    return ("tensor- and pipeline-parallel Transformers are captured when needed, and torch is missing: left out",)


def transformer_cases(data: Path) -> list[Case | LeftOut]:
    """NeuSight's GPT-2 on four GPUs, forward and backward without an optimizer: data, tensor and pipeline parallel."""
    return read_cases(data / "iterations" / "transformers_4gpu.csv", _make_transformer_case)


def _make_transformer_case(row: Row) -> Case | None:
    """None where the step must be captured and torch is missing."""
    if row.known("strategy", _STRATEGIES) != "dp" and not _has_torch():
        return None
    measured = row.positive("iteration_ms")
    return Case(
        name=f"{row['model']} {row['strategy']} {row['num_gpus']}, batch {row['global_batch']}",
        group=f"Transformers, {row['device']}",
        question=_make_divided_scenario(row),
        measured_ms=measured,
        others={"NeuSight": 100 * (row.positive("neusight_pred_iteration_ms") / measured - 1)},
    )


def _make_divided_scenario(row: Row) -> Scenario:
    """The row's model divided over its GPUs."""
    gpus, batch, length = row.count("num_gpus"), row.count("global_batch"), row.count("seq_len")
    node = row.known("device", _NODES)
    if row["strategy"] == "dp":
        return Scenario(
            workload=row.known("model", TRANSFORMERS), on=node, gpus=gpus, batch_size=batch // gpus, seq_len=length,
            optimizer="none",
        )  # fmt: skip
    row.known("model", _DIVIDED)
    if gpus > _MOST_CAPTURED or batch > _MOST_SAMPLES or length > _LONGEST:
        raise TraincastError(
            f"'{row.file}', row {row.number}: {gpus} GPUs, {batch} samples of {length} tokens; a divided model is "
            f"captured on up to {_MOST_CAPTURED} GPUs with up to {_MOST_SAMPLES} samples of {_LONGEST} tokens"
        )
    return Scenario(workload=_capture_divided_gpt2(row["strategy"], gpus, batch, length), on=node)


@cache
def _capture_divided_gpt2(strategy: str, gpus: int, batch: int, length: int) -> Workload:
    """GPT-2 large with its layers divided over GPUs ("tp"), or one after the other ("pp", one micro-batch)."""
    from traincast.capturing import capture_distributed
    from traincast_evaluation.zoo.build.parallel_gpt import make_pipeline_step, make_tensor_parallel_step
    from traincast_evaluation.zoo.define.sizes import GPT2_LARGE

    make = make_tensor_parallel_step if strategy == "tp" else make_pipeline_step
    return capture_distributed(
        make(GPT2_LARGE),
        world_size=gpus,
        batch_size=batch,
        seq_len=length,
        name=f"gpt2-large-{strategy}",
        rebatch=False,
        ranks=[0] if strategy == "tp" else None,
    )


def _has_torch() -> bool:
    return find_spec("torch") is not None


def summarise_multi_gpu(suite: str, outcomes: Sequence[Outcome], data: Path) -> list[ErrorRow]:
    """All PyTorch steps together, then group by group, then eight traced ranks replayed together.

    Steps of HugeCTR are given apart for rows that were looked at and for those held back.
    """
    pytorch = [o for o in outcomes if o.case.group in _PYTORCH or o.case.group.startswith("Transformers")]
    if not pytorch:
        raise TraincastError(f"evaluate {suite}: no row of PyTorch can be predicted; give one that can")
    rows = [summarise_outcomes(suite, "all PyTorch: step", pytorch)]
    for group in dict.fromkeys(o.case.group for o in outcomes):
        members = [o for o in outcomes if o.case.group == group]
        rows.append(summarise_outcomes(suite, group, members))
        if group in _HUGECTR:
            kept = [o for o in members if o.case.name.endswith("(held back)")]
            parts = (("rows looked at", [o for o in members if o not in kept]), ("rows held back", kept))
            rows += [summarise_outcomes(suite, f"{group}: {label}", part) for label, part in parts if part]
    return [*rows, *summarise_replayed_ranks(suite, data)]
