"""Every edit on every built-in model: what an edited step must be, whichever it is."""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random
from typing import Any

from traincast.models.catalog import list_models
from traincast.models.transformers.reading import list_built_in_names
from traincast.planner.what_if.edits.registry import list_edits, parse_edits
from traincast.planner.what_if.edits.step import get_batch_size
from traincast.planner.what_if.money import Prices, compute_cost
from traincast.planner.what_if.result import prepare_both_sides
from traincast.simulator.parallelism.layout import Layout
from traincast.simulator.prediction.result import Prediction
from traincast.simulator.scenario.predict import predict
from traincast.simulator.scenario.resolved import Resolved, make_scenario, resolve
from traincast.utils.errors import TraincastError
from traincast_evaluation.published.catalog import published_programs

VALUES = {
    "mode": "training",
    "on": "a100-80gb", "gpus": "2", "host": "server-2022", "host-speed": "2", "launch-speed": "2", "memory-speed": "2",
    "power-limit-w": "200",
    "clock-mhz": "1000", "clock-speed": "2", "link-speed": "2", "nic-speed": "2", "link-latency": "0.5", "speed": "2",
    "embedding-dim": "32", "pooling": "x2", "tables": "30", "drop-table": "0", "add-table": "1000x2", "rows": "x2",
    "mlp-width": "2", "bottom-mlp": "512-256-64", "top-mlp": "256-1", "layers": "2", "ffn": "1024", "vocab": "1000",
    "tp": "4", "pp": "2", "cp": "2", "sharding": "zero1", "kernels": "compiled", "global-batch": "32",
    "recompute": "full", "batch-size": "x2", "seq-len": "64", "dtype": "tf32", "optimizer": "none",
    "optimizer-impl": "foreach", "attention": "sdpa", "embedding": "fbgemm", "bucket-mb": "4", "overlap": "none",
    "program": "torchrec-pipelined", "plan": "search", "accumulate": "2", "stream": "1", "checkpoint": "layers",
    "micro-batch": "2",
    "fp8-scaling": "row", "checkpoint-every": "2", "vp": "2", "ep": "2", "etp": "2", "fsdp": "2", "zero": "1",
    "shard-group": "8", "schedule": "1f1b", "stage-layers": "1,1", "cp-exchange": "gather", "dispatch": "once",
    "graph-modules": "attention",
    "lora-rank": "16", "frozen-layers": "1", "document-len": "512", "dense": "mlp.yaml", "skew-ms": "1",
    "jitter": "0.1", "seed": "3", "loader-ms": "1", "workers": "2", "costs": "costs.toml",
    "checkpoint-layers": "1", "expert-imbalance": "1.2", "allocator": "expandable_segments:True",
    "optimizer-state": "bf16", "lora-base": "nf4", "lora-targets": "all", "offload": "optimizer", "loss": "chunked",
}  # fmt: skip
"""A value of every edit that takes one; an edit that is missing here fails the tests."""
TARGETS = {"speed": "gemm", "stream": "aten::addmm"}
LAID_OUT = {"dtype": "fp8", "batch-size": "2", "seq-len": "1024", "gpus": "32", "on": "dgx-a100"}
"""Other values for Transformers that are distributed over GPUs."""
MACHINE = {"host", "host-speed", "launch-speed", "memory-speed", "clock-mhz", "clock-speed", "link-speed", "nic-speed",
           "link-latency", "speed"}  # fmt: skip
"""Edits of the machine alone: the step needs as much memory as before."""
_NODE, _LAYOUT = "dgx-h100", {"gpus": 16, "tp": 2, "micro_batch": 1, "global_batch": 16}
_INVERSE: dict[str, Callable[[Resolved], str]] = {
    **dict.fromkeys(
        ("host-speed", "launch-speed", "memory-speed", "clock-speed", "link-speed", "nic-speed", "link-latency",
         "speed", "mlp-width"),
        lambda scene: "",
    ),
    "pooling": lambda scene: "x0.5",
    "rows": lambda scene: "x0.5",
    "on": lambda scene: scene.platform.key,
    "gpus": lambda scene: str(scene.gpus),
    "batch-size": lambda scene: str(get_batch_size(scene)),
    "embedding-dim": lambda scene: str(scene.of_dlrm().embedding_dim),
    "tables": lambda scene: str(scene.of_dlrm().num_tables),
    "bottom-mlp": lambda scene: "-".join(map(str, scene.of_dlrm().bottom_mlp)),
    "top-mlp": lambda scene: "-".join(map(str, scene.of_dlrm().top_mlp)),
    "layers": lambda scene: str(scene.of_transformer().layers),
    "ffn": lambda scene: str(scene.of_transformer().ffn),
    "vocab": lambda scene: str(scene.of_transformer().vocab),
    "tp": lambda scene: str(_layout(scene).tp),
    "pp": lambda scene: str(_layout(scene).pp),
    "cp": lambda scene: str(_layout(scene).cp),
    "sharding": lambda scene: _layout(scene).sharding,
    "kernels": lambda scene: scene.scenario.launches,
    "global-batch": lambda scene: str(_layout(scene).global_batch),
    "recompute": lambda scene: _layout(scene).checkpoint,
    "dtype": lambda scene: str(scene.scenario.dtype),
    "optimizer": lambda scene: "adam" if scene.layout is not None else "",
}  # fmt: skip
"""The value that undoes an edit, from the scene before it ("": one over its own); edits that nothing undoes, such as
those that say which ops a step has, are missing."""


def _layout(scene: Resolved) -> Layout:
    assert scene.layout is not None
    return scene.layout


def models() -> list[str]:
    """All built-in models, published programs and, as `NAME laid out`, described Transformers."""
    described = [f"{name} laid out" for name in list_built_in_names()]
    return [*(info.name for info in list_models()), *published_programs(), *described]


def texts(model: str) -> list[str]:
    """One text for every edit."""
    values = {**VALUES, **LAID_OUT} if model.endswith(" laid out") else VALUES
    return [
        name + (f":{TARGETS[name]}" if edit.target else "") + (f"={values[name]}" if edit.takes else "")
        for name, edit in list_edits().items()
    ]


def scene_of_model(model: str, text: str) -> Resolved:
    """A model where it is edited: on one GPU, but for edits of what several exchange, of a loader and of bags."""
    if model.endswith(" laid out"):
        return resolve(make_scenario({"workload": model.removesuffix(" laid out"), "on": _NODE, **_LAYOUT}))
    options: dict[str, Any] = {}
    if text.startswith(("bucket-mb", "overlap", "plan")):
        options = {"gpus": 2}
    elif text == "input-pipeline":
        options = {"loader_ms": 50.0, "workers": 2}
    elif text == "fuse-embedding-bags" and any(info.name == model and "bag" in info.choices for info in list_models()):
        options = {"embedding": "bag"}
    return resolve(make_scenario({"workload": model, "on": "v100", **options}))


def check_edit(model: str, text: str) -> str:
    """Applies an edit to a model: "" when all is well with the edited step, else why it cannot be applied."""
    scene = scene_of_model(model, text)
    try:
        base, changed = prepare_both_sides(scene, parse_edits([text]))
        result = predict(changed)
    except TraincastError as error:
        reason = str(error)
    else:
        reason = ""
    if reason:
        assert reason.strip() and "\n" not in reason
        return reason
    check_answer(result)
    name = text.partition("=")[0].partition(":")[0]
    if name in MACHINE:
        assert result.needed_bytes == predict(base).needed_bytes, text
    _check_undone(scene, changed, text, name)
    return ""


def _check_undone(scene: Resolved, changed: Resolved, text: str, name: str) -> None:
    """An edit that can be taken back is: the step takes as long as before, and as much memory."""
    if name not in _INVERSE or (name in ("optimizer", "global-batch") and scene.layout is None):
        return
    left, _, value = text.partition("=")
    back = f"{left}={_INVERSE[name](scene) or format(1 / float(value), 'g')}"
    start, again = prepare_both_sides(changed, parse_edits([back]))
    before = predict(prepare_both_sides(scene, parse_edits([text]))[0] if start.dlrm is not None else scene)
    after = predict(again)
    assert math.isclose(after.iteration, before.iteration, rel_tol=1e-9), f"{text}, then {back}"
    assert math.isclose(after.needed_bytes, before.needed_bytes, rel_tol=1e-9), f"{text}, then {back}"


def check_answer(result: Prediction) -> None:
    """A step as steps are: finite, positive, in seconds, its memory the sum of its kinds, its cost its time."""
    low, high = result.interval
    assert math.isfinite(high)
    assert 1e-6 < low <= result.iteration <= high < 1e4
    assert result.needed_bytes > 0
    limit = result.platform.device.memory_bytes
    if result.needed_bytes + result.left_out_bytes <= limit:  # the allocator gives its cache back before it fails
        assert result.fits
    elif result.memory.peak_bytes > limit:
        assert not result.fits
    cost = compute_cost(result, Prices(per_gpu_hour=3.0))
    hours = cost.gpus * result.iteration / 3600
    assert math.isclose(cost.to_dict()["gpu_hours_per_million_samples"], 1e6 * hours / cost.samples)
    assert math.isclose(cost.to_dict()["dollars_per_step"], 3.0 * hours)
    assert sum(result.memory.by_kind.values()) == result.memory.peak_bytes
    # what a pipelined program copies for the next step runs alongside this one, and both count
    assert 0 <= result.device_active <= 2 * result.iteration


def drawn(model: str, count: int, seed: int) -> list[str]:
    """Some edits of a model, always the same."""
    return Random(f"{model} {seed}").sample([text for text in texts(model) if text != "plan=search"], count)
