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
    batch_size: Annotated[int, _says("samples per GPU")]
    global_batch: Annotated[int, _says("samples of a step, all GPUs together")]
    seq_len: Annotated[int, _says("tokens per sample")] | None
    gpus: Annotated[int, _says("number of GPUs")]
    iteration_ms: Annotated[float, _says("time of one step")]
    interval_ms: Annotated[list[float], _says("90 % interval of iteration_ms: low, high")]
    interval_terms: Annotated[dict[str, float], _says("what the interval is made of, as log-sigmas")]
    device_active_ms: Annotated[float, _says("time in which the device runs kernels or communicates")]
    device_idle_ms: Annotated[float, _says("time in which it does neither")]
    host_ms: Annotated[float, _says("time in which the host is busy")]
    exposed_comm_ms: Annotated[float, _says("time in which the device only communicates, or waits for other ranks")]
    per_family: Annotated[Times, _says("kernel time by kernel family")]
    per_phase: Annotated[Times, _says("kernel time by phase: forward, backward, optimizer")]
    per_source: Annotated[Times, _says("kernel time by how durations were found")]
    critical_path: Annotated[Times, _says("critical path by what it is spent on")]
    kernels: Annotated[int, _says("number of kernel launches on the slowest rank")]
    estimated_ops: Annotated[list[str], _says("ops without a kernel model, costed from bytes and flops")]
    estimated_ms: Annotated[float, _says("kernel time of estimated_ops")]
    out_of_domain_ops: Annotated[list[str], _says("ops with calls outside of what their model was fitted on")]
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
    ranks: Annotated[list[dict[str, Any]], _says("ranks that do the same, each with its own times and memory")]
    imbalance: Annotated[float, _says("how much longer the busiest rank computes than the mean, as a share")]
    critical_path_ranks: Annotated[list[dict[str, Any]], _says("critical path by rank and op")]
    samples_per_s: Annotated[float, _says("samples per second, all GPUs together")]
    tokens_per_s: Annotated[float, _says("tokens per second, all GPUs together")] | None
    tokens_per_second_per_gpu: Annotated[float, _says("tokens per second of one GPU")] | None
    flops: Annotated[float, _says("operations of a step that MFU counts, all GPUs together")]
    mfu: Annotated[float, _says("share of the peak rate that the step uses")] | None
    mfu_peak_tflops: Annotated[float, _says("peak rate that MFU is a share of, all GPUs together, TFLOPS")]
    mfu_peak_type: Annotated[str, _says("arithmetic of that peak rate")]
    by_module: Annotated[Times, _says("kernel time by module, numbered ones together")]
    by_layer: Annotated[Times, _says("kernel time by layer")]
    by_op: Annotated[Times, _says("kernel time by op")]
    layout: Annotated[dict[str, Any], _says("how a Transformer is laid out over GPUs, degree by degree")] | None
    micro_batch: Annotated[int, _says("samples of a micro-batch")] | None
    micro_batches: Annotated[int, _says("micro-batches of a step on every pipeline")] | None
    micro_batches_in_timeline: Annotated[int, _says("micro-batches that were simulated; the others repeat them")] | None
    exposed_ms: Annotated[Times, _says("exposed communication by group of ranks: tp, cp, ep, pp, dp")] | None
    bubble_ms: Annotated[float, _says("time in which a pipeline stage waits for others")] | None
    memory_needed_gb: Annotated[float, _says("all that the fullest device must hold, with context and buffers")] | None
    reasons: Annotated[dict[str, str], _says("of every key that is null, why")]


_REASONS = {
    "clock_mhz": "the clock is not locked",
    "seq_len": "the model has no sequences",
    "tokens_per_s": "the model has no sequences",
    "mfu": "the step has no arithmetic that MFU counts, or its device no data sheet",
    "tokens_per_second_per_gpu": "the model has no sequences",
    **dict.fromkeys(
        ("layout", "micro_batch", "micro_batches", "micro_batches_in_timeline", "exposed_ms", "bubble_ms",
         "memory_needed_gb"),
        "the step is not a Transformer laid out over GPUs",
    ),
}  # fmt: skip


def prediction_document(values: Mapping[str, Any]) -> dict[str, Any]:
    """The document of a prediction from the values that are known, in the order of the declaration."""
    document: dict[str, Any] = {"schema": SCHEMA}
    for name in PredictionDocument.__struct_fields__[1:-1]:
        document[name] = values.get(name)
    nulls = [name for name, value in document.items() if value is None]
    document["reasons"] = {name: _REASONS[name] for name in nulls}
    return document


def document_schema() -> dict[str, Any]:
    """The JSON Schema of the document."""
    return msgspec.json.schema(PredictionDocument)
