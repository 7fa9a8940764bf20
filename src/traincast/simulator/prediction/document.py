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


def _make_field_meta(text: str) -> Meta:
    return Meta(description=text)


class PredictionDocument(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One predicted step. Times are milliseconds, memory is GB (1e9 bytes)."""

    schema: Annotated[int, _make_field_meta("version of this document")]
    scenario: Annotated[
        dict[str, Any],
        _make_field_meta("settings that were used, by field of the scenario, defaults filled in; null: not used"),
    ]
    workload: Annotated[str, _make_field_meta("name of the model")]
    platform: Annotated[str, _make_field_meta("key of the GPU or node")]
    device: Annotated[str, _make_field_meta("name of the device")]
    clock_mhz: Annotated[float, _make_field_meta("locked SM clock, MHz")] | None
    mode: Annotated[str, _make_field_meta("training or inference")] | None
    compiled: Annotated[bool, _make_field_meta("whether torch.compile runs it")] | None
    batch_size: Annotated[int, _make_field_meta("samples per GPU")] | None
    global_batch: Annotated[int, _make_field_meta("samples of a step, all GPUs together")] | None
    seq_len: Annotated[int, _make_field_meta("tokens per sample")] | None
    gpus: Annotated[int, _make_field_meta("number of GPUs")]
    iteration_ms: Annotated[float, _make_field_meta("time of one step")]
    interval_ms: Annotated[list[float], _make_field_meta("90 % interval of iteration_ms: low, high")] | None
    interval_terms: Annotated[dict[str, float], _make_field_meta("what the interval is made of, as log-sigmas")] | None
    device_active_ms: Annotated[float, _make_field_meta("time in which the device runs kernels or communicates")] | None
    device_idle_ms: Annotated[float, _make_field_meta("time in which it does neither")] | None
    host_ms: Annotated[float, _make_field_meta("time in which the host is busy")]
    exposed_comm_ms: (
        Annotated[float, _make_field_meta("time in which the device only communicates, or waits for other ranks")]
        | None
    )
    per_family: Annotated[Times, _make_field_meta("kernel time by kernel family")]
    per_phase: Annotated[Times, _make_field_meta("kernel time by phase: forward, backward, optimizer")] | None
    per_source: Annotated[Times, _make_field_meta("kernel time by how durations were found")] | None
    critical_path: Annotated[Times, _make_field_meta("critical path by what it is spent on")] | None
    kernels: Annotated[int, _make_field_meta("number of kernel launches on the slowest rank")]
    estimated_ops: Annotated[list[str], _make_field_meta("ops without a kernel model, costed from bytes and flops")]
    estimated_ms: Annotated[float, _make_field_meta("kernel time of estimated_ops")]
    out_of_domain_ops: (
        Annotated[list[str], _make_field_meta("ops with calls outside of what their model was fitted on")] | None
    )
    out_of_domain_ms: Annotated[float, _make_field_meta("kernel time of such calls")] | None
    out_of_domain: (
        Annotated[list[dict[str, Any]], _make_field_meta("of each such op: how far outside, and what that shifts")]
        | None
    )
    memory_gb: (
        Annotated[dict[str, float], _make_field_meta("peak memory of the fullest rank, and what it is made of")] | None
    )
    memory: (
        Annotated[
            dict[str, Any],
            _make_field_meta("allocated, reserved and used memory of the fullest rank, and what fills it"),
        ]
        | None
    )
    memory_needed_gb: (
        Annotated[float, _make_field_meta("what the fullest device must hold: reserved and its process")] | None
    )
    fits: Annotated[bool, _make_field_meta("whether the fullest rank fits in the memory of its device")] | None
    host_profile: Annotated[str, _make_field_meta("name of the host profile")]
    trust: Annotated[dict[str, Any] | None, _make_field_meta("word for it, share of kernel time extrapolated, and why")]
    warnings: Annotated[list[str], _make_field_meta("what a person should know besides the numbers")]
    assumptions: Annotated[list[str], _make_field_meta("what the capture assumed about values it did not have")]
    given_costs: Annotated[dict[str, Any], _make_field_meta("costs of ops that their author gave")]
    ranks: (
        Annotated[list[dict[str, Any]], _make_field_meta("ranks that do the same, each with its own times and memory")]
        | None
    )
    imbalance: (
        Annotated[float, _make_field_meta("how much longer the busiest rank computes than the mean, as a share")] | None
    )
    critical_path_ranks: Annotated[list[dict[str, Any]], _make_field_meta("critical path by rank and op")] | None
    samples_per_s: Annotated[float, _make_field_meta("samples per second, all GPUs together")] | None
    tokens_per_s: Annotated[float, _make_field_meta("tokens per second, all GPUs together")] | None
    tokens_per_second_per_gpu: Annotated[float, _make_field_meta("tokens per second of one GPU")] | None
    flops: Annotated[float, _make_field_meta("operations of a step that MFU counts, all GPUs together")] | None
    mfu: Annotated[float, _make_field_meta("share of the peak rate that the step uses")] | None
    mfu_peak_tflops: (
        Annotated[float, _make_field_meta("peak rate that MFU is a share of, all GPUs together, TFLOPS")] | None
    )
    mfu_peak_type: Annotated[str, _make_field_meta("arithmetic of that peak rate")] | None
    by_module: Annotated[Times, _make_field_meta("kernel time by module, numbered ones together")] | None
    by_layer: Annotated[Times, _make_field_meta("kernel time by layer")] | None
    by_op: Annotated[Times, _make_field_meta("kernel time by op")]
    layout: (
        Annotated[dict[str, Any], _make_field_meta("how a Transformer is laid out over GPUs, degree by degree")] | None
    )
    micro_batch: Annotated[int, _make_field_meta("samples of a micro-batch")] | None
    micro_batches: Annotated[int, _make_field_meta("micro-batches of a step on every pipeline")] | None
    micro_batches_in_timeline: (
        Annotated[int, _make_field_meta("micro-batches that were simulated; the others repeat them")] | None
    )
    exposed_ms: Annotated[Times, _make_field_meta("exposed communication by group of ranks: tp, cp, ep, pp, dp")] | None
    bubble_ms: Annotated[float, _make_field_meta("time in which a pipeline stage waits for others")] | None
    reasons: Annotated[dict[str, str], _make_field_meta("of every key that is null, why")]


_REASONS = {
    "clock_mhz": "the clock is not locked",
    "seq_len": "the model has no sequences",
    "tokens_per_s": "the model has no sequences",
    "mfu": "the step has no arithmetic that MFU counts, or its device no data sheet",
    "tokens_per_second_per_gpu": "the model has no sequences",
    **dict.fromkeys(
        ("layout", "micro_batch", "micro_batches", "micro_batches_in_timeline", "exposed_ms", "bubble_ms"),
        "the step is not a Transformer laid out over GPUs",
    ),
}  # fmt: skip


def make_prediction_document(values: Mapping[str, Any], *, reason: str = "") -> dict[str, Any]:
    """The document of a prediction from the values that are known, in the order of the declaration; `reason` is why
    others are not, where that is the same for all."""
    document: dict[str, Any] = {"schema": SCHEMA}
    for name in PredictionDocument.__struct_fields__[1:-1]:
        document[name] = values.get(name)
    nulls = [name for name, value in document.items() if value is None]
    document["reasons"] = {name: reason or _REASONS[name] for name in nulls}
    return document


def make_document_schema() -> dict[str, Any]:
    """The JSON Schema of the document."""
    return msgspec.json.schema(PredictionDocument)
