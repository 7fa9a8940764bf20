"""Layouts that a model could be trained with on so many GPUs: all combinations that divide, in one fixed order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from traincast.hardware.device import Device
from traincast.models.transformers.description import Transformer
from traincast.models.transformers.sizes import layer_parameters, parameters
from traincast.simulator.parallelism.layout import Layout, completed
from traincast.utils.errors import TraincastError

_MOST_CHUNKS = 10  # of a stage: more only add exchanges
_MOST_MICRO = 16  # samples of a micro-batch


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """What is to be planned: GPUs, samples of a step and tokens of a sample; arithmetic; and the GPUs of a node, beyond
    which tensor-parallel ranks do not reach."""

    gpus: int
    global_batch: int
    seq_len: int
    precision: str
    per_node: int


def candidates(model: Transformer, device: Device, wanted: Wanted) -> Iterator[Layout]:
    """Every layout whose numbers divide and whose parameters, gradients and optimizer fit in memory."""
    for degrees in _degrees(model, wanted):
        base = Layout(
            gpus=wanted.gpus, global_batch=wanted.global_batch, seq_len=wanted.seq_len, precision=wanted.precision,
            sharding="zero1", reduce_bytes=2 if wanted.precision == "fp8" else 4, **degrees,
        )  # fmt: skip
        for layout in _shardings(base):
            if state_bytes(model, layout) > device.memory_bytes:
                continue
            yield from _repeated(model, layout)


def _degrees(model: Transformer, wanted: Wanted) -> Iterator[dict[str, Any]]:
    """Degrees of tensor, pipeline, context and expert parallelism that divide GPUs and the model."""
    experts = model.experts.count if model.experts is not None else 1
    for tp in _divisors(min(wanted.per_node, wanted.gpus)):
        if model.heads % tp or model.ffn % tp:
            continue
        for pp in _divisors(wanted.gpus // tp):
            if pp > model.layers:
                continue
            for cp in _powers(wanted.gpus // tp // pp):
                if (wanted.gpus // tp // pp) % cp or (cp > 1 and wanted.seq_len < 8192 * cp):
                    continue
                per_stage = wanted.gpus // pp
                for ep in [n for n in _powers(experts) if per_stage % n == 0 and experts % n == 0]:
                    yield {"tp": tp, "pp": pp, "cp": cp, "ep": ep}


def _shardings(base: Layout) -> Iterator[Layout]:
    """Megatron's distributed optimizer, and compiled FSDP where there are no stages."""
    yield base
    if base.pp == 1:
        yield replace(base, sharding="zero3", kernels="compiled", joined=False, reduce_bytes=4)


def _repeated(model: Transformer, base: Layout) -> Iterator[Layout]:
    """Micro-batches, chunks and recomputation of one set of degrees."""
    share = base.global_batch // base.dp if base.global_batch % base.dp == 0 else 0
    for micro in [n for n in _powers(min(share, _MOST_MICRO)) if share % n == 0]:
        for chunks in _chunks(model.layers, base.pp, share // micro):
            for again in ("none", "selective", "full"):
                layout = replace(base, micro_batch=micro, vp=chunks, checkpoint=again)
                try:
                    yield completed(layout, model)
                except TraincastError:
                    continue


def _chunks(layers: int, pp: int, micro_batches: int) -> list[int]:
    if pp == 1 or micro_batches % pp:
        return [1]
    return [n for n in range(1, _MOST_CHUNKS + 1) if layers % (pp * n) == 0] or [1]


def state_bytes(model: Transformer, layout: Layout) -> float:
    """Least bytes of parameters, gradients and optimizer of a rank: what no recomputation can save."""
    sparse = sum(layer_parameters(model, layer)[1] for layer in range(model.layers))
    inner = max(1, layout.gpus // layout.pp // layout.ep)
    dense_share = (parameters(model) - sparse) / (layout.tp * layout.pp)
    sparse_share = sparse / (layout.ep * layout.pp)
    if layout.sharding == "zero3":
        return 16 * (dense_share / layout.sharing + sparse_share / inner)
    return 6 * (dense_share + sparse_share) + 12 * (dense_share / layout.sharing + sparse_share / inner)


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _powers(most: int) -> list[int]:
    return [1 << i for i in range(max(most, 1).bit_length())]
