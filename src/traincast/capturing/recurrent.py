"""Recurrent layers as CUDA runs them: one cuDNN call each way instead of a cell per time step, fused single cells."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

aten: Any = torch.ops.aten
Tensor = torch.Tensor
_MODES = {"rnn_relu": 0, "rnn_tanh": 1, "gru": 3}
_LSTM = 2  # cuDNN's number of the cell, as those above
_KEPT = {_LSTM: 5, 3: 5}  # values per unit that PyTorch's fused cells keep: an LSTM's gates and state, those of a GRU


def list_replacements() -> dict[str, Callable[..., Any]]:
    """The composites by name: layers on tensors in one piece (`.input`) and on packed sequences (`.data`), cells."""
    layers = {f"{name}.input": _make_one_state_layer(mode) for name, mode in _MODES.items()}
    packed = {f"{name}.data": _make_packed_one_state_layer(mode) for name, mode in _MODES.items()}
    cells: dict[str, Callable[..., Any]] = {"lstm_cell": _decompose_lstm_cell, "gru_cell": _decompose_gru_cell}
    return {"lstm.input": _run_lstm, "lstm.data": _run_packed_lstm, **layers, **packed, **cells}


def _decompose_lstm_cell(
    input: Tensor, hx: list[Tensor], w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None, b_hh: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    made = aten._thnn_fused_lstm_cell(input.matmul(w_ih.t()), hx[0].matmul(w_hh.t()), hx[1], b_ih, b_hh)
    return made[0], made[1]


def _decompose_gru_cell(
    input: Tensor, hx: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None, b_hh: Tensor | None = None
) -> Tensor:
    made: Tensor = aten._thnn_fused_gru_cell(input.matmul(w_ih.t()), hx.matmul(w_hh.t()), hx, b_ih, b_hh)[0]
    return made


def infer_fused_gru_cell(
    input_gates: Tensor, hidden_gates: Tensor, hx: Tensor, *biases: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Results of the fused cell without data: hidden state, and five of its size that backward needs."""
    return torch.empty_like(hx), hx.new_empty(hx.shape[0], hx.shape[1] * 5)


def infer_fused_gru_cell_backward(grad_hy: Tensor, workspace: Tensor, has_bias: bool) -> tuple[Tensor | None, ...]:
    """Results of its backward: gradients of both gates, of the state and of the biases."""
    gates = grad_hy.new_empty(grad_hy.shape[0], grad_hy.shape[1] * 3)
    biases = (gates.new_empty(gates.shape[-1]), gates.new_empty(gates.shape[-1])) if has_bias else (None, None)
    return gates, torch.empty_like(gates), torch.empty_like(grad_hy), *biases


def _run_lstm(
    input: Tensor, hx: list[Tensor], params: list[Tensor], has_biases: bool, num_layers: int, dropout: float,
    train: bool, bidirectional: bool, batch_first: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    output, hidden, cell = _run_cudnn(
        _LSTM, input, hx[0], hx[1], params, has_biases, num_layers, dropout, train, bidirectional, batch_first
    )
    return output, hidden, cell


def _make_one_state_layer(mode: int) -> Callable[..., tuple[Tensor, Tensor]]:
    def layer(input: Tensor, hx: Tensor, params: list[Tensor], *options: Any) -> tuple[Tensor, Tensor]:
        output, hidden, _ = _run_cudnn(mode, input, hx, None, params, *options)
        return output, hidden

    return layer


def _run_packed_lstm(
    data: Tensor, batch_sizes: Tensor, hx: list[Tensor], params: list[Tensor], *options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    output, hidden, cell = _run_cudnn(_LSTM, data, hx[0], hx[1], params, *options, batch_sizes=batch_sizes.tolist())
    return output, hidden, cell


def _make_packed_one_state_layer(mode: int) -> Callable[..., tuple[Tensor, Tensor]]:
    def layer(data: Tensor, batch_sizes: Tensor, hx: Tensor, params: list[Tensor], *options: Any) -> tuple[Any, Any]:
        output, hidden, _ = _run_cudnn(mode, data, hx, None, params, *options, batch_sizes=batch_sizes.tolist())
        return output, hidden

    return layer


def _run_cudnn(
    mode: int, input: Tensor, hx: Tensor, cx: Tensor | None, params: list[Tensor], has_biases: bool, num_layers: int,
    dropout: float, train: bool, bidirectional: bool, batch_first: bool = False, *, batch_sizes: Sequence[int] = (),
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    hidden_size = hx.shape[2] if cx is None else cx.shape[2]
    projected = 0 if cx is None or hx.shape[2] == cx.shape[2] else hx.shape[2]
    per_layer = (4 if has_biases else 2) + (1 if projected else 0)
    made = aten._cudnn_rnn(
        input, params, per_layer, None, hx, cx, mode, hidden_size, projected, num_layers, batch_first, dropout,
        train, bidirectional, list(batch_sizes), None,
    )  # fmt: skip
    return made[0], made[1], made[2]


def infer_cudnn_rnn(
    input: Tensor, weight: list[Tensor], weight_stride0: int, weight_buf: Tensor | None, hx: Tensor, cx: Tensor | None,
    mode: int, hidden_size: int, proj_size: int, num_layers: int, batch_first: bool, dropout: float, train: bool,
    bidirectional: bool, batch_sizes: list[int], dropout_state: Tensor | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Results of cuDNN's forward without data. Of its reserve only cuDNN knows the size: it is what PyTorch's own cells
    keep for their backward pass, gates and states of every layer and direction."""
    width = (proj_size or hidden_size) * (2 if bidirectional else 1)
    output = _make_time_first(input.new_empty, [*input.shape[:-1], width], batch_first and not batch_sizes)
    cell = torch.empty_like(cx) if cx is not None else input.new_empty(0)
    rows = input.numel() // max(1, input.shape[-1])
    kept = _KEPT.get(mode, 1) * rows * hidden_size * num_layers * (2 if bidirectional else 1) * input.element_size()
    reserve = input.new_empty(kept if train else 0, dtype=torch.uint8)
    return output, torch.empty_like(hx), cell, reserve, input.new_empty(0)


def _make_time_first(empty: Callable[[list[int]], Tensor], shape: list[int], swapped: bool) -> Tensor:
    """What cuDNN makes is time step by time step in memory, also where a batch comes first."""
    return empty([shape[1], shape[0], *shape[2:]]).transpose(0, 1) if swapped else empty(shape)


def infer_cudnn_rnn_backward(
    input: Tensor, weight: list[Tensor], weight_stride0: int, weight_buf: Tensor, hx: Tensor, cx: Tensor | None,
    *rest: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """Results of cuDNN's backward without data."""
    grad_cell = torch.empty_like(cx) if cx is not None else None
    return torch.empty_like(input), torch.empty_like(hx), grad_cell, [torch.empty_like(w) for w in weight]
