"""Bytes that a rank keeps of a part's weights from step to step: parameters, gradients, optimizer."""

from __future__ import annotations

from dataclasses import dataclass

from traincast.simulator.parallelism.layout import PYTORCH, Layout

_MOMENT_BYTES = {"fp32": 8.0, "bf16": 4.0, "int8": 2.0 + 8.0 / 256}
"""Of both moments of a weight; 8-bit ones have two fp32 scales per 256 weights (bitsandbytes, torchao)."""
_NF4_BYTES = 0.5 + (1.0 + 4.0 / 256) / 64
"""Of a weight in NF4 with double quantisation: 8-bit scales of 64 weights, fp32 ones of 256 scales (QLoRA)."""


@dataclass(frozen=True, slots=True)
class StateBytes:
    """Bytes of a part on one rank. `gathered` are its parameters where they are sharded and made whole for a pass,
    `raw` its gradients before they are reduced, `sent` as they are reduced."""

    parameters: float
    gradients: float
    optimizer: float
    gathered: float = 0.0
    raw: float = 0.0
    sent: float = 0.0


def count_state_bytes(
    layout: Layout, dense: float, sparse: float, trained_dense: float, trained_sparse: float, *, looked_up: bool = False
) -> StateBytes:
    """The states of a part with this many elements on a rank before sharding: `dense` ones that all tokens meet,
    `sparse` ones of experts, and those of them that are trained. `looked_up`: they are a table, which is never
    quantised."""
    inner = max(1, layout.gpus // layout.pp // (layout.ep * layout.etp))
    sharding, exact = layout.sharding, layout.wide

    def share(first: float, second: float, *, shared: bool) -> float:
        return first / layout.sharing + second / inner if shared else first + second

    weights = share(dense, sparse, shared=sharding == "zero3")
    trained = share(trained_dense, trained_sparse, shared=sharding == "zero3")
    gradients = share(trained_dense, trained_sparse, shared=sharding in ("zero2", "zero3") and not layout.gathers_once)
    updated = share(trained_dense, trained_sparse, shared=sharding != "none")
    parameter, gradient = _list_element_bytes(layout, exact=exact)
    kept = parameter * weights
    if layout.adapter_rank:
        kept = (parameter if looked_up else _count_frozen_bytes(layout)) * weights + parameter * trained
    moments = _MOMENT_BYTES[layout.optimizer_state]
    if not exact and sharding != "zero3" and layout.optimizer_state == "fp32":
        moments += 4.0  # copies of 16-bit weights
    whole, given = dense + sparse, trained_dense + trained_sparse
    return StateBytes(
        parameters=kept,
        gradients=gradient * gradients,
        optimizer=0.0 if layout.optimizer == "none" else moments * updated,
        gathered=(1.0 if layout.quantised_gather else layout.gather_bytes) * whole if sharding == "zero3" else 0.0,
        raw=layout.gather_bytes * given if sharding == "zero3" else 0.0,
        sent=layout.reduce_bytes * given if sharding == "zero3" else 0.0,
    )


def _list_element_bytes(layout: Layout, *, exact: bool) -> tuple[float, float]:
    """Bytes of a parameter and of its gradient. FSDP keeps fp32 weights and gathers them in 16 bits; Megatron adds
    gradients up in the type that it reduces them in."""
    if exact or (layout.sharding == "zero3" and layout.optimizer_state == "fp32"):
        return 4.0, 4.0
    return 2.0, 2.0 if layout.kernels in PYTORCH else float(layout.reduce_bytes)


def _count_frozen_bytes(layout: Layout) -> float:
    """Bytes of a weight below adapters."""
    if layout.frozen_type == "nf4":
        return _NF4_BYTES
    return {"fp4": 0.5625, "fp8": 1.0, "fp32": 4.0, "tf32": 4.0}.get(layout.precision, 2.0)
