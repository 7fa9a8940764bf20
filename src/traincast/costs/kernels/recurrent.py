"""Recurrent layers: the part of a layer that waits for its own last time step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from traincast.costs.kernels.contract import (
    Calls,
    Family,
    FamilyRecord,
    estimate_gemm_arithmetic_seconds,
    estimate_memory_seconds,
    get_flop_rate,
)
from traincast.costs.kernels.gemm import GEMM
from traincast.costs.kernels.registry import (
    Item,
    LoweringContext,
    get_gemm_compute_type,
    lowers,
    read_integer_argument,
    require_operand,
)
from traincast.costs.kernels.streaming.launches import make_elementwise_call
from traincast.hardware.device import Device
from traincast.ir.ops import Signature, TensorSpec
from traincast.utils.arrays import FloatArray
from traincast.utils.errors import TraincastError

RECURRENT = Family(
    "recurrent",
    # all time steps of one layer, forward or back through time, without the GEMMs over all steps at once
    ("forward", "backward"),
    # `gates` rows of `hidden` each and `outputs` columns in the recurrent matrix, for each of `directions`
    ("steps", "batch", "hidden", "outputs", "gates", "directions"),
)
RECORD = FamilyRecord(
    family=RECURRENT,
    package=__name__,
    lowering=("",),
    roofline=":recurrent_seconds",
    # nothing was measured: cuDNN keeps small matrices in registers for all steps (persistent) or not, and lets layers
    # overlap or not; between the two is a factor of two to three
    roofline_sigma=0.5,
)
_GATES = {0: 1, 1: 1, 2: 4, 3: 3}  # by cuDNN's number of the cell: RNN with ReLU and with tanh, LSTM, GRU
_KERNELS = 2.0  # a step: the product with the recurrent matrix, and the cell's pointwise part
_QUEUED = 0.5  # of a kernel's start that is left where the next one waits in the queue already: assumed
_CELL_TENSORS = {"forward": 4.0, "backward": 6.0}  # of the gates' size, that a cell reads and writes: gates, state


@dataclass(frozen=True, slots=True)
class _Layers:
    """What an op's layers have in common; `width` is what one direction hands on, less than `hidden` if projected."""

    compute: str
    steps: int
    rows: int  # over all time steps
    inputs: int
    hidden: int
    width: int
    gates: int
    layers: int
    directions: int

    @staticmethod
    def of(signature: Signature, context: LoweringContext) -> _Layers:
        """From the arguments of `_cudnn_rnn` or its backward."""
        source = require_operand(signature, "input", 0)
        mode, hidden = read_integer_argument(signature, "mode", -1), read_integer_argument(signature, "hidden_size")
        if mode not in _GATES or hidden < 1:
            raise TraincastError(f"mode {mode} with {hidden} hidden units is no recurrent layer that cuDNN has")
        steps, rows = _count_steps_and_rows(signature, source)
        return _Layers(
            get_gemm_compute_type(source, tf32=context.tf32 or context.tf32_convolutions),
            steps,
            rows,
            source.shape[-1],
            hidden,
            read_integer_argument(signature, "proj_size") or hidden,
            _GATES[mode],
            max(1, read_integer_argument(signature, "num_layers", 1)),
            2 if signature.scalar("bidirectional", False) else 1,
        )

    def read(self, layer: int) -> int:
        """Columns that a layer reads: of the first one the input's, else what both directions below hand on."""
        return self.inputs if layer == 0 else self.directions * self.width

    def loop(self, kind: str) -> Item:
        """The time steps of one layer."""
        batch = max(1, round(self.rows / self.steps))
        return RECURRENT.call(
            kind, self.compute, steps=self.steps, batch=batch, hidden=self.hidden, outputs=self.width,
            gates=self.gates, directions=self.directions,
        )  # fmt: skip

    def product(self, m: int, n: int, k: int) -> Item:
        """A product for both directions, that is one after the other."""
        return GEMM.call(
            "bmm" if self.directions > 1 else "mm", self.compute, batch=self.directions, m=m, n=n, k=k, trans_a=0,
            trans_b=1, bias=0,
        )  # fmt: skip


def _count_steps_and_rows(signature: Signature, source: TensorSpec) -> tuple[int, int]:
    """Time steps, and rows over all of them: packed sequences have fewer in later steps (`batch_sizes`)."""
    if len(source.shape) == 3:
        steps, batch = source.shape[1::-1] if signature.scalar("batch_first", False) else source.shape[:2]
        return steps, steps * batch
    sizes = signature.scalar("batch_sizes")
    if len(source.shape) != 2 or not isinstance(sizes, tuple) or not sizes:
        raise TraincastError("a recurrent layer on packed sequences needs how many run in each step (batch_sizes)")
    return len(sizes), source.shape[0]


def _count_projections(layers: _Layers) -> tuple[Item, ...]:
    """What turns hidden units into what is handed on, where that is less (`proj_size`)."""
    if layers.width == layers.hidden:
        return ()
    return (layers.product(layers.rows, layers.width, layers.hidden),)


@lowers("aten::_cudnn_rnn", "aten::miopen_rnn")
def lower_recurrent_forward(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """Of every layer: the product of all inputs with the input matrix, then step by step."""
    layers = _Layers.of(signature, context)
    rows, gates = layers.rows, layers.gates * layers.hidden
    items: tuple[Item, ...] = ()
    for layer in range(layers.layers):
        items += (layers.product(rows, gates, layers.read(layer)), layers.loop("forward"), *_count_projections(layers))
    return items


@lowers("aten::_cudnn_rnn_backward", "aten::miopen_rnn_backward")
def lower_recurrent_backward(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """Of every layer: back step by step, then the gradients of its input and of both its matrices."""
    layers = _Layers.of(signature, context)
    rows, gates = layers.rows, layers.gates * layers.hidden
    mask = signature.scalar("output_mask")
    weights_wanted = bool(mask[3]) if isinstance(mask, tuple) and len(mask) > 3 else True
    items: tuple[Item, ...] = ()
    for layer in reversed(range(layers.layers)):
        read = layers.read(layer)
        items += (*2 * _count_projections(layers), layers.loop("backward"), layers.product(rows, read, gates))
        if weights_wanted:
            items += (layers.product(gates, read, rows), layers.product(gates, layers.width, rows))
    return items


@lowers(
    "aten::_thnn_fused_lstm_cell", "aten::_thnn_fused_gru_cell", "aten::_thnn_fused_lstm_cell_backward_impl",
    "aten::_thnn_fused_gru_cell_backward",
)  # fmt: skip
def lower_recurrent_cell(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """The pointwise part of one cell; its GEMMs are ops of their own."""
    made: list[TensorSpec] = [spec for spec in signature.outputs if spec.numel]
    return (make_elementwise_call("tanh", signature.inputs, made),)


def recurrent_seconds(calls: Calls, device: Device, start: float) -> FloatArray:
    """Every step waits for the one before. The recurrent matrix comes from memory once per step, out of the L2 where it
    fits there; that cuDNN's persistent kernels keep it in registers is left to the interval."""
    batch, gates = calls["batch"], calls["gates"] * calls["hidden"]
    backward = calls.is_kind("backward")
    columns, depth = np.where(backward, calls["outputs"], gates), np.where(backward, gates, calls["outputs"])
    product = estimate_gemm_arithmetic_seconds(
        calls["directions"], batch, columns, depth, get_flop_rate(calls, device), device
    )
    matrix = calls["directions"] * gates * calls["outputs"] * calls.item_bytes()
    tensors = np.array([_CELL_TENSORS[kind] for kind in calls.family.kinds])[calls.kind]
    cell = estimate_memory_seconds(tensors * calls["directions"] * batch * gates * calls.item_bytes(), device)
    step = np.maximum(product, estimate_memory_seconds(matrix, device)) + cell + _KERNELS * _QUEUED * start
    return np.asarray(start + calls["steps"] * step)
