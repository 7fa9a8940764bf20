"""Layouts that a model could be trained with on a given number of GPUs: all combinations that divide, in one fixed
order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from traincast.hardware.device import Device
from traincast.models.transformers.description import Transformer
from traincast.models.transformers.sizes import count_all_parameters, count_layer_parameters
from traincast.simulator.parallelism.layout import Layout, complete_layout
from traincast.utils.errors import TraincastError

_MOST_CHUNKS = 10  # of a stage: more only add exchanges
_MOST_MICRO = 16  # samples of a micro-batch


def list_layout_candidates(model: Transformer, device: Device, base: Layout, per_node: int) -> Iterator[Layout]:
    """Every layout like `base` whose numbers divide and whose parameters, gradients and optimizer fit in memory.
    Tensor-parallel ranks do not reach beyond the `per_node` GPUs of a node."""
    for degrees in _list_degrees(model, base, per_node):
        for layout in _list_shardings(replace(base, **degrees)):
            if count_state_bytes(model, layout) > device.memory_bytes:
                continue
            yield from _list_schedules(model, layout)


def _list_degrees(model: Transformer, base: Layout, per_node: int) -> Iterator[dict[str, Any]]:
    """Degrees of tensor, pipeline, context and expert parallelism that divide GPUs and the model."""
    experts = model.experts.count if model.experts is not None else 1
    for tp in _list_divisors(min(per_node, base.gpus)):
        if model.heads % tp or model.ffn % tp:
            continue
        for pp in _list_divisors(base.gpus // tp):
            if pp > model.layers:
                continue
            for cp in _list_powers_of_two(base.gpus // tp // pp):
                if (base.gpus // tp // pp) % cp or (cp > 1 and base.seq_len < 8192 * cp):
                    continue
                per_stage = base.gpus // pp
                for ep in [n for n in _list_powers_of_two(experts) if per_stage % n == 0 and experts % n == 0]:
                    yield {"tp": tp, "pp": pp, "cp": cp, "ep": ep}


def _list_shardings(base: Layout) -> Iterator[Layout]:
    """A distributed optimizer, and FSDP where there are no stages."""
    yield replace(base, sharding="zero1")
    if base.pp == 1:
        yield replace(base, sharding="zero3")


def _list_schedules(model: Transformer, base: Layout) -> Iterator[Layout]:
    """Micro-batches, chunks and recomputation of one set of degrees."""
    share = base.global_batch // base.dp if base.global_batch % base.dp == 0 else 0
    for micro in [n for n in _list_powers_of_two(min(share, _MOST_MICRO)) if share % n == 0]:
        for chunks in _list_chunk_counts(model.layers, base.pp, share // micro):
            for again in ("none", "selective", "full"):
                layout = replace(base, micro_batch=micro, vp=chunks, checkpoint=again)
                try:
                    yield complete_layout(layout, model)
                except TraincastError:
                    continue


def _list_chunk_counts(layers: int, pp: int, micro_batches: int) -> list[int]:
    if pp == 1 or micro_batches % pp:
        return [1]
    return [n for n in range(1, _MOST_CHUNKS + 1) if layers % (pp * n) == 0] or [1]


def count_state_bytes(model: Transformer, layout: Layout) -> float:
    """Least bytes of parameters, gradients and optimizer of a rank: what no recomputation can save."""
    sparse = sum(count_layer_parameters(model, layer)[1] for layer in range(model.layers))
    inner = max(1, layout.gpus // layout.pp // layout.ep)
    dense_share = (count_all_parameters(model) - sparse) / (layout.tp * layout.pp)
    sparse_share = sparse / (layout.ep * layout.pp)
    if layout.sharding == "zero3":
        return 16 * (dense_share / layout.sharing + sparse_share / inner)
    return 6 * (dense_share + sparse_share) + 12 * (dense_share / layout.sharing + sparse_share / inner)


def _list_divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _list_powers_of_two(most: int) -> list[int]:
    return [1 << i for i in range(max(most, 1).bit_length())]
