"""Recommenders as others have measured them: TorchRec's own pipeline benchmark, captured as it is.

TorchRec's history also tells how long a change made a step, on a GPU that it does not name: such a pair is predicted on
one GPU, and its measured ratio is told as the time that it would have there.
"""

from __future__ import annotations

import logging
import re
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from traincast.app.api import capture
from traincast.ir.workload import Workload
from traincast.simulator.scenario.predict import predict
from traincast.simulator.scenario.scenario import Scenario
from traincast.utils.errors import TraincastError
from traincast.utils.metrics import ErrorRow
from traincast_evaluation.suites.cases import Case, LeftOut, Outcome, summarise_outcomes
from traincast_evaluation.suites.published import Row, read_cases, read_rows

_KMIB = 1000 * 2**20 / 1e9  # gigabytes of what TorchRec's benchmark prints
_ON = "dgx-h100"  # of pairs: their GPU is not stated
_CHANGES = "before and after"
_BASE, _EMO, _EVAL = "sparse_data_dist_base", "prefetch_emo", "eval_dp_cpu"
_ON_GPU = (
    "pipeline=eval-sdd", "embedding_device=cuda", "device_group=cuda", "compute_kernel=fused",
    "sharding_type=table_wise", "skip_dense_optimizer=false",
)  # fmt: skip
_HEAVY = (
    (r"over_arch_out_size: \d+", "over_arch_out_size: 4096"),
    (r"over_arch_hidden_layers: \d+", "over_arch_hidden_layers: 10"),
    (r"dense_arch_hidden_sizes: \[.*\]", "dense_arch_hidden_sizes: [2048, 2048, 2048, 2048]"),
)


class _Run(NamedTuple):
    """A configuration by the beginning of its file's name, options of the command line, and lines that are others."""

    yaml: str
    options: tuple[str, ...] = ("sync_fwd=False",)
    edits: tuple[tuple[str, str], ...] = ()


class _Change(NamedTuple):
    """A pair of rows of one pull request, by their names, and how each is run."""

    pull_request: str
    before: str
    after: str
    run_before: _Run
    run_after: _Run


_PLAIN = _Run(_BASE)
_RUNS = {
    "TestSparseNN sdd_base": _PLAIN,
    "TestSparseNN emb_stash": _Run("sparse_data_dist_emb_stash"),
    "TestSparseNN heavy_dense": _Run(_BASE, edits=_HEAVY),
}
_PAIRS = (
    _Change("4066", _BASE, "sparse_data_dist_sync_fwd", _PLAIN, _Run(_BASE, ("sync_fwd=True",))),
    _Change("4017", "baseline", "clear_inputs", _PLAIN,
            _Run(_BASE, (*_PLAIN.options, "clear_data_dist_inputs=True"))),
    _Change("4002", "sparse_data_dist_baseline", "sparse_data_dist_free_input", _PLAIN,
            _Run(_BASE, (*_PLAIN.options, "free_features_storage_early=True"))),
    _Change("3787", _BASE, "sparse_data_dist_base_inplace_copy", _PLAIN,
            _Run(_BASE, (*_PLAIN.options, "enable_inplace_copy_batch=True"))),
    _Change("3797", _BASE, "sparse_data_dist_bwd_opt", _PLAIN,
            _Run(_BASE, (*_PLAIN.options, "pipeline=sparse-bwd-opt"))),
    _Change("3899", "sparse_emo", "prefetch_emo", _Run(_EMO, (*_PLAIN.options, "pipeline=sparse")), _Run(_EMO)),
    _Change("3824", "eval_gpu", "eval_gpu_inplace_copy", _Run(_EVAL, (*_PLAIN.options, *_ON_GPU)),
            _Run(_EVAL, (*_PLAIN.options, *_ON_GPU, "enable_inplace_copy_batch=True"))),
)  # fmt: skip
_NODES = {
    "NVIDIA GB200": "gb200-nvl72",
    "NVIDIA A100-80GB (form not stated)": "a100-80gb",
}
_LEFT_OUT = {
    "OneTrans v6": "how its pyramid shortens the sequence is not in the table",
    "metric_scaling_prod": "its configuration is not among those of the table",
    "Maglev pipeline full": "its sizes are in a file that is not among those of the table",
}
_SOK = "its program, TensorFlow under XLA with Horovod, is not described here, nor which of two interactions it ran"


def list_recommender_cases(data: Path) -> list[Case | LeftOut]:
    """Every row of the table of steps, then every pair of TorchRec's history that its benchmark can run."""
    if find_spec("torchrec") is None:
        raise TraincastError("evaluate recommenders captures TorchRec's benchmark, and torchrec is missing")
    folder = data / "iterations"
    steps = read_cases(folder / "recommender_steps.csv", lambda row: _make_case(row, folder / "torchrec_yaml"))
    return [*steps, *_list_pairs(folder)]


def summarise_recommenders(suite: str, outcomes: Sequence[Outcome], data: Path | None = None) -> list[ErrorRow]:
    """Steps, then pairs: all of them, and those whose change exceeds the spread of repeated runs."""
    steps = [o for o in outcomes if o.case.group != _CHANGES]
    pairs = [o for o in outcomes if o.case.group == _CHANGES]
    rows = [summarise_outcomes(suite, "all: step", steps)] if steps else []
    for group in sorted({o.case.group for o in steps}):
        rows.append(summarise_outcomes(suite, group, [o for o in steps if o.case.group == group]))
    if pairs:
        rows.append(summarise_outcomes(suite, _CHANGES, pairs))
    beyond = [o for o in pairs if o.case.tags.get("change") == "beyond the spread"]
    return [*rows, summarise_outcomes(suite, f"{_CHANGES}, beyond the spread", beyond)] if beyond else rows


def _make_case(row: Row, configurations: Path) -> Case:
    model, measured = row.label("model"), row.positive("iteration_ms")
    if model in _LEFT_OUT:
        raise TraincastError(_LEFT_OUT[model])
    if row["set"] == "hugectr_sok":
        raise TraincastError(_SOK)
    on, batch, gpus = row.known("device", _NODES), row.count("batch_per_gpu"), row.count("num_gpus")
    name = f"{model}, {gpus} x {row.label('device')}, batch {batch}, {row.label('precision')}"
    run = row.known("model", _RUNS)

    def ask() -> Scenario:
        return Scenario(workload=capture_pipeline(configurations, run, batch, gpus), on=on)

    return Case(name=name, group="TorchRec", question=ask, measured_ms=measured)


def _list_pairs(folder: Path) -> list[Case | LeftOut]:
    rows = read_rows(folder / "torchrec_pipeline_memory.csv")
    spread = _find_spread(rows)
    made: list[Case | LeftOut] = []
    for change in _PAIRS:
        found = [
            next((r for r in rows if r["pr"].partition(".")[0] == change.pull_request and r["name"] == name), None)
            for name in (change.before, change.after)
        ]
        name = f"pull request {change.pull_request}: {change.before} to {change.after}"
        if found[0] is None or found[1] is None:
            made.append(LeftOut(name=name, reason="the table lacks one of its rows", group=_CHANGES))
            continue
        try:
            made.append(_make_pair(name, change, (found[0], found[1]), spread, folder / "torchrec_yaml"))
        except TraincastError as error:
            made.append(LeftOut(name=name, reason=str(error), group=_CHANGES))
    return made


def _find_spread(rows: Sequence[Row]) -> float:
    """How far apart runs of one configuration lie in one month of the table, at most: as a share of the shorter."""
    repeats: dict[tuple[str, str], list[float]] = {}
    for change in _PAIRS:
        for row in rows:
            if row["pr"].partition(".")[0] == change.pull_request and row["name"] == change.before:
                key = (repr(change.run_before), row["date"][:7])
                repeats.setdefault(key, []).append(row.positive("gpu_runtime_ms_p90"))
    return max((max(times) / min(times) - 1 for times in repeats.values()), default=0.0)


def _make_pair(name: str, change: _Change, rows: tuple[Row, Row], spread: float, configurations: Path) -> Case:
    before, after = rows
    ratio = after.positive("gpu_runtime_ms_p90") / before.positive("gpu_runtime_ms_p90")
    batch, gpus = before.count("batch_size"), before.count("world_size")
    first = predict(Scenario(workload=capture_pipeline(configurations, change.run_before, batch, gpus), on=_ON))
    workload = capture_pipeline(configurations, change.run_after, batch, gpus)
    return Case(
        name=f"{name} ({ratio - 1:+.1%} measured)",
        group=_CHANGES,
        question=Scenario(workload=workload, on=_ON),
        measured_ms=1e3 * first.iteration * ratio,
        measured_memory_gb=after.positive("peak_allocated_kmib_p90") * _KMIB,
        tags={"change": "beyond the spread" if abs(ratio - 1) > spread else "within the spread"},
        note=f"the measured ratio on {_ON}, where the step before is predicted at {1e3 * first.iteration:.1f} ms",
    )


@cache
def capture_pipeline(configurations: Path, run: _Run, batch: int, gpus: int) -> Workload:
    """TorchRec's pipeline benchmark as it is, with a configuration of the table."""
    found = sorted(configurations.glob(f"{run.yaml}-*.yml"))
    if not found:
        raise TraincastError(f"no configuration {run.yaml} in {configurations}")
    text = found[0].read_text(encoding="utf-8")
    for pattern, line in run.edits:
        text = re.sub(pattern, line, text)
    spec = find_spec("torchrec.distributed.benchmark.benchmark_train_pipeline")
    if spec is None or spec.origin is None:
        raise TraincastError("the installed torchrec has no benchmark_train_pipeline; 1.8 has")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "run.yml").write_text(text, encoding="utf-8")
        told = [f"yaml_config={folder}/run.yml", f"world_size={gpus}", f"batch_size={batch}", *run.options]
        arguments = [f"--{option}" for option in told]
        return _run_quietly(lambda: capture(spec.origin or "", batch_size=batch, gpus=gpus, arguments=arguments))


def _run_quietly(work: Callable[[], Workload]) -> Workload:
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        return work()
    finally:
        logging.disable(before)
