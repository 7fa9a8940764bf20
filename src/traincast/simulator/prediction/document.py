"""The JSON document of a prediction: the same keys for every workload and platform, each with its type and meaning.

A part that cannot be had is null, and `reasons` says why. `schema` is raised when a key changes its meaning or goes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

SCHEMA = 1
"""Version of the document."""
Times = dict[str, float]
"""Milliseconds by name."""


def _says(text: str) -> Meta:
    return Meta(description=text)


class PredictionDocument(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One predicted step. Times are milliseconds, memory is GB (1e9 bytes)."""

    schema: Annotated[int, _says("version of this document")]
    scenario: Annotated[
        dict[str, Any], _says("settings that were used, by field of the scenario, defaults filled in; null: not used")
    ]
    workload: Annotated[str, _says("name of the model")]
    platform: Annotated[str, _says("key of the GPU or node")]
    device: Annotated[str, _says("name of the device")]
    clock_mhz: Annotated[float, _says("locked SM clock, MHz")] | None
    mode: Annotated[str, _says("training or inference")]
    compiled: Annotated[bool, _says("whether torch.compile runs it")]
    batch_size: Annotated[int, _says("samples per GPU")] | None
    global_batch: Annotated[int, _says("samples of a step, all GPUs together")]
    seq_len: Annotated[int, _says("tokens per sample")] | None
    gpus: Annotated[int, _says("number of GPUs")]
    iteration_ms: Annotated[float, _says("time of one step")]
    interval_ms: Annotated[list[float], _says("90 % interval of iteration_ms: low, high")]
    interval_terms: Annotated[dict[str, float], _says("what the interval is made of, as log-sigmas")] | None
    device_active_ms: Annotated[float, _says("time in which the device runs kernels or communicates")]
    device_idle_ms: Annotated[float, _says("time in which it does neither")]
    host_ms: Annotated[float, _says("time in which the host is busy")] | None
    exposed_comm_ms: Annotated[float, _says("time in which the device only communicates, or waits for other ranks")]
    per_family: Annotated[Times, _says("kernel time by kernel family")]
    per_phase: Annotated[Times, _says("kernel time by phase: forward, backward, optimizer")] | None
    per_source: Annotated[Times, _says("kernel time by how durations were found")] | None
    critical_path: Annotated[Times, _says("critical path by what it is spent on")] | None
    kernels: Annotated[int, _says("number of kernel launches on the slowest rank")] | None
    estimated_ops: Annotated[list[str], _says("ops without a kernel model, costed from bytes and flops")] | None
    estimated_ms: Annotated[float, _says("kernel time of estimated_ops")] | None
    out_of_domain_ops: Annotated[list[str], _says("ops with calls outside of what their model was fitted on")] | None
    out_of_domain_ms: Annotated[float, _says("kernel time of such calls")]
    out_of_domain: (
        Annotated[list[dict[str, Any]], _says("of each such op: how far outside, and what that shifts")] | None
    )
    memory_gb: Annotated[dict[str, float], _says("peak memory of the fullest rank, and what it is made of")]
    fits: Annotated[bool, _says("whether the fullest rank fits in the memory of its device")]
    host_profile: Annotated[str, _says("name of the host profile")]
    warnings: Annotated[list[str], _says("what a person should know besides the numbers")]
    assumptions: Annotated[list[str], _says("what the capture assumed about values it did not have")]
    given_costs: Annotated[dict[str, Any], _says("costs of ops that their author gave")]
    ranks: Annotated[list[dict[str, Any]], _says("ranks that do the same, each with its own times and memory")] | None
    imbalance: Annotated[float, _says("how much longer the busiest rank computes than the mean, as a share")] | None
    critical_path_ranks: Annotated[list[dict[str, Any]], _says("critical path by rank and op")] | None
    samples_per_s: Annotated[float, _says("samples per second, all GPUs together")]
    tokens_per_s: Annotated[float, _says("tokens per second, all GPUs together")] | None
    flops: Annotated[float, _says("operations of a step that MFU counts, all GPUs together")]
    mfu: Annotated[float, _says("share of the peak rate that the step uses")] | None
    mfu_peak_tflops: Annotated[float, _says("peak rate that MFU is a share of, all GPUs together, TFLOPS")]
    mfu_peak_type: Annotated[str, _says("arithmetic of that peak rate")]
    by_module: Annotated[Times, _says("kernel time by module, numbered ones together")] | None
    by_layer: Annotated[Times, _says("kernel time by layer")] | None
    by_op: Annotated[Times, _says("kernel time by op")] | None
    layout: Annotated[dict[str, Any], _says("how a Transformer is laid out over GPUs, degree by degree")] | None
    parts_ms: Annotated[Times, _says("the step of the slowest stage by what it waits for")] | None
    reasons: Annotated[dict[str, str], _says("of every key that is null, why")]


_REASONS = {
    "clock_mhz": "the clock is not locked",
    "batch_size": "samples are not divided evenly among GPUs",
    "seq_len": "the model has no sequences",
    "tokens_per_s": "the model has no sequences",
    "mfu": "the step has no arithmetic that MFU counts",
    "layout": "the step is not a Transformer laid out over GPUs",
    "parts_ms": "the step is simulated op by op: see critical_path",
}


def prediction_document(values: Mapping[str, Any], missing: str = "") -> dict[str, Any]:
    """The document of a prediction from the values that are known, in the order of the declaration; `missing` says why
    the others cannot be had."""
    document: dict[str, Any] = {"schema": SCHEMA}
    for name in PredictionDocument.__struct_fields__[1:-1]:
        document[name] = values.get(name)
    nulls = [name for name, value in document.items() if value is None]
    document["reasons"] = {name: missing or _REASONS[name] if name not in values else _REASONS[name] for name in nulls}
    return document


def document_schema() -> dict[str, Any]:
    """The JSON Schema of the document."""
    return msgspec.json.schema(PredictionDocument)
