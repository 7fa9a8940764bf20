"""Ops that CUDA takes apart differently: the expected CUDA ops, listed."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from traincast.capturing import capture_step
from traincast.ir import Op


def ops_of(run, **options) -> list[Op]:
    """The captured ops of `run()`, which is called with everything on `cuda` and returns a tensor or nothing."""
    step = capture_step(lambda _: run, batch_size=1, name="x", rebatch=False, **options)
    return [op for op in step.programs[0].ops if not op.name.endswith(("::empty", "::randn", "::ones", "::ones_like"))]


def names_of(run, **options) -> list[str]:
    return [op.name.removeprefix("aten::") for op in ops_of(run, **options)]


def cuda(*shape, dtype=torch.float32, grad=False):
    return torch.empty(*shape, device="cuda", dtype=dtype, requires_grad=grad)


def test_dropout_is_one_kernel_each_way():
    def run():
        F.dropout(cuda(4, 4, grad=True), 0.1).sum().backward()

    assert names_of(run) == ["native_dropout", "sum", "expand", "native_dropout_backward", "detach"]


@pytest.mark.parametrize(
    ("p", "training", "expected"), [(0.0, True, []), (0.5, False, []), (1.0, True, ["zeros", "mul"])]
)
def test_dropout_that_drops_nothing_or_everything(p, training, expected):
    assert names_of(lambda: F.dropout(cuda(4, 4), p, training)) == expected


@pytest.mark.parametrize(
    ("shape", "dtype", "training", "expected"),
    [
        ((2, 3, 4, 4), torch.float32, True, "cudnn_batch_norm"),
        ((2, 3, 4, 4), torch.float32, False, "cudnn_batch_norm"),
        ((2, 3, 4, 4), torch.float16, True, "cudnn_batch_norm"),
        ((2, 3, 4, 4), torch.bfloat16, True, "native_batch_norm"),
        ((5, 3, 7), torch.float32, True, "cudnn_batch_norm"),
        ((5, 3), torch.float32, True, "native_batch_norm"),
    ],
)
def test_batch_norm_goes_to_cudnn_when_cudnn_takes_it(shape, dtype, training, expected):
    def run():
        return F.batch_norm(cuda(*shape, dtype=dtype), cuda(3), cuda(3), cuda(3), cuda(3), training)

    assert names_of(run) == [expected]


def test_batch_norm_backward_is_cudnns_in_training_only():
    def run(training):
        weight = cuda(3, grad=True)
        F.batch_norm(cuda(2, 3, 4, 4), cuda(3), cuda(3), weight, cuda(3), training).sum().backward()

    assert "cudnn_batch_norm_backward" in names_of(lambda: run(True))
    assert "native_batch_norm_backward" in names_of(lambda: run(False))


def attention(dtype, *, size=16, heads=4, mask=None, backward=False, length=9, **options):
    q = cuda(2, 4, length, size, dtype=dtype, grad=backward)
    k, v = (cuda(2, heads, length, size, dtype=dtype, grad=backward) for _ in range(2))
    attn_mask = None if mask is None else cuda(*mask[0], dtype=mask[1])
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, **options)
    if backward:
        out.sum().backward()
    return out


ATTENTION = "_scaled_dot_product_fused_attention_overrideable"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"dtype": torch.float16}, []),
        ({"dtype": torch.bfloat16, "is_causal": True}, []),
        ({"dtype": torch.float32}, []),
        ({"dtype": torch.float16, "heads": 2, "is_causal": True, "enable_gqa": True}, []),
        ({"dtype": torch.float16, "size": 20}, []),
        (
            {"dtype": torch.float16, "length": 16, "mask": ((2, 1, 16, 16), torch.bool)},
            ["scalar_tensor", "scalar_tensor", "where", "expand"],
        ),
        ({"dtype": torch.float32, "length": 16, "mask": ((16, 16), torch.float32)}, ["expand"]),
        ({"dtype": torch.float32, "mask": ((9, 9), torch.float32)}, ["constant_pad_nd", "slice", "expand"]),
    ],
)
def test_attention_is_one_op_that_names_no_kernel(arguments, expected):
    assert names_of(lambda: attention(**arguments)) == [*expected, ATTENTION]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_attention_backward(dtype):
    names = names_of(lambda: attention(dtype, backward=True))
    assert f"{ATTENTION}_backward" in names
    assert not any("bmm" in name for name in names)


def test_attention_writes_no_gradient_of_a_mask_that_nobody_trains():
    ops = ops_of(lambda: attention(torch.float32, backward=True, length=16, mask=((16, 16), torch.float32)))
    (op,) = (op for op in ops if op.name == f"aten::{ATTENTION}_backward")
    assert [tensor.spec.shape for tensor in op.outputs] == [(2, 4, 16, 16)] * 3


@pytest.mark.parametrize(
    ("backend", "expected"),
    [
        (SDPBackend.FLASH_ATTENTION, [ATTENTION]),
        (SDPBackend.EFFICIENT_ATTENTION, ["_scaled_dot_product_efficient_attention"]),
    ],
)
def test_a_kernel_that_the_script_asks_for_is_recorded(backend, expected):
    def run():
        with sdpa_kernel(backend):
            return attention(torch.float16)

    assert names_of(run) == expected


def test_portable_attention_where_the_script_asks_for_it():
    def run():
        with sdpa_kernel(SDPBackend.MATH):
            return attention(torch.float16)

    assert names_of(run).count("bmm") == 2


def test_unaligned_heads_and_float64_take_the_portable_road():
    for arguments in ({"dtype": torch.float64}, {"dtype": torch.float32, "size": 6}):
        names = names_of(lambda arguments=arguments: attention(**arguments))
        assert names.count("bmm") == 2


def test_half_softmax_with_a_float_result_is_widened_in_the_kernel():
    (op,) = ops_of(lambda: torch.softmax(cuda(4, 4, dtype=torch.float16), -1, dtype=torch.float32))
    assert op.name == "aten::_softmax"
    assert op.signature.scalar("half_to_float") is True
    assert (op.inputs[0].spec.dtype, op.outputs[0].spec.dtype) == ("float16", "float32")


def test_convolution_puts_channels_last_if_the_input_has_them_last():
    def run():
        x = torch.empty(4, 3, 16, 16, device="cuda", memory_format=torch.channels_last)
        return F.conv2d(x, cuda(8, 3, 3, 3))

    (op,) = ops_of(run)
    assert op.name == "aten::convolution"
    assert op.outputs[0].spec.stride == (1568, 1, 112, 8)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_gradients_are_summed_in_place_as_the_engine_does_unwatched(memory_format):
    def run():
        x = torch.empty(2, 3, 4, 4, device="cuda").to(memory_format=memory_format).requires_grad_()
        y = x * 2
        (y.exp() + y.sin()).sum().backward()

    adds = [op for op in ops_of(run) if op.name in ("aten::add", "aten::add_") and op.phase.name == "BACKWARD"]
    assert [op.name for op in adds] == ["aten::add_"]
    assert adds[0].outputs[0].storage == adds[0].inputs[0].storage


FOREACH = {
    "SGD": ["_foreach_add_"],
    "Adam": ["_foreach_add_", "_foreach_lerp_", "_foreach_mul_", "_foreach_addcmul_", "_foreach_sqrt", "_foreach_div_",
             "_foreach_add_", "_foreach_addcdiv_"],
    "Adagrad": ["_foreach_add_", "_foreach_addcmul_", "_foreach_sqrt", "_foreach_add_", "_foreach_mul",
                "_foreach_addcdiv_"],
}  # fmt: skip


def optimizer_ops(name, **options) -> list[Op]:
    def make_step(batch):
        model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)).cuda()
        optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.1, **options)
        x = torch.randn(batch, 4, device="cuda")

        def step():
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()

        return step

    program = capture_step(make_step, batch_size=3, name="x", rebatch=False).programs[0]
    return [op for op in program.ops if op.phase.name == "OPTIMIZER"]


@pytest.mark.parametrize("name", FOREACH)
def test_optimizers_are_foreach_by_default(name):
    ops = [op for op in optimizer_ops(name) if "_foreach" in op.name]
    assert [op.name.removeprefix("aten::") for op in ops] == FOREACH[name]


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "Adagrad"])
def test_fused_optimizers_are_one_op(name):
    fused = f"aten::_fused_{name.lower()}_"
    ops = optimizer_ops(name, fused=True)
    assert ops[-1].name == fused
    assert dict(ops[-1].signature.groups)["self"] == 4
    assert {op.name for op in ops} <= {fused, "aten::_foreach_add_"}  # the step counts


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
def test_packed_sequences_run_one_cudnn_call_each_way_on_the_rows_they_have(layer):
    def make_step(batch):
        model = layer(8, 16, batch_first=True).cuda()
        lengths = torch.tensor([7, 5, 5, 2])

        def step():
            source = torch.randn(batch, 7, 8, device="cuda")
            packed = nn.utils.rnn.pack_padded_sequence(source, lengths, batch_first=True)
            padded, sizes = nn.utils.rnn.pad_packed_sequence(model(packed)[0], batch_first=True)
            assert padded.shape == (4, 7, 16) and sizes.tolist() == lengths.tolist()
            padded.sum().backward()

        return step

    program = capture_step(make_step, batch_size=4, name="packed", rebatch=False).programs[0]
    (forward,) = (op for op in program.ops if op.name == "aten::_cudnn_rnn")
    assert forward.inputs[0].spec.shape == (19, 8) and forward.outputs[0].spec.shape == (19, 16)
    assert dict(forward.signature.scalars)["batch_sizes"] == (4, 4, 3, 3, 3, 1, 1)
    (backward,) = (op for op in program.ops if op.name == "aten::_cudnn_rnn_backward")
    assert backward.outputs[0].spec.shape == (19, 8)


@pytest.mark.parametrize(("layer", "states"), [(nn.LSTM, 2), (nn.GRU, 1), (nn.RNN, 1)])
def test_recurrent_layers_are_one_cudnn_call_each_way(layer, states):
    def make_step(batch):
        model = layer(8, 16, num_layers=2, batch_first=True, bidirectional=True, dropout=0.1).cuda()
        x = torch.randn(batch, 5, 8, device="cuda", requires_grad=True)
        return lambda: model(x)[0].sum().backward()

    program = capture_step(make_step, batch_size=3, name="x").programs[0]
    assert program.rigid == ""
    (forward,) = (op for op in program.ops if op.name == "aten::_cudnn_rnn")
    assert [t.spec.shape for t in forward.outputs[: 1 + states]] == [(3, 5, 32), *[(4, 3, 16)] * states]
    (backward,) = (op for op in program.ops if op.name == "aten::_cudnn_rnn_backward")
    assert backward.forward == forward.index
    assert len(backward.outputs) == 2 + states - 1 + 16


@pytest.mark.parametrize(
    ("cell", "state", "fused"),
    [
        (nn.LSTMCell, lambda h: (h, h), "_thnn_fused_lstm_cell"),
        (nn.GRUCell, lambda h: h, "_thnn_fused_gru_cell"),
    ],
)
def test_a_single_cell_is_two_products_and_one_fused_kernel(cell, state, fused):
    def make_step(batch):
        model = cell(8, 16).cuda()
        x, hidden = torch.randn(batch, 8, device="cuda"), torch.zeros(batch, 16, device="cuda")

        def step():
            made = model(x, state(hidden))
            (made[0] if isinstance(made, tuple) else made).sum().backward()

        return step

    program = capture_step(make_step, batch_size=3, name="x").programs[0]
    names = [op.name.removeprefix("aten::") for op in program.ops]
    assert program.rigid == ""
    assert names.count(fused) == 1
    assert sum(name.startswith(f"{fused}_backward") for name in names) == 1
    assert names.count("mm") == 2 + 2, "both GEMMs, and the gradients of their weights"


def test_recurrent_layers_run_in_the_type_of_autocast():
    def make_step(batch):
        model = nn.LSTM(8, 16).cuda()
        x = torch.randn(5, batch, 8, device="cuda")

        def step():
            with torch.autocast("cuda", torch.float16):
                model(x)[0].sum().backward()

        return step

    program = capture_step(make_step, batch_size=3, name="x").programs[0]
    for name in ("aten::_cudnn_rnn", "aten::_cudnn_rnn_backward"):
        (op,) = (op for op in program.ops if op.name == name)
        # but for the reserve, which is bytes: four gates and a state of 16 units in 5 time steps of 3 samples
        assert {tensor.spec.dtype for tensor in op.inputs if tensor.spec.numel} - {"uint8"} == {"float16"}
        reserves = [one.spec for one in (*op.inputs, *op.outputs) if one.spec.dtype == "uint8" and one.spec.numel]
        assert [spec.nbytes for spec in reserves] == [5 * 16 * 5 * 3 * 2]


@pytest.mark.parametrize("padded", [True, False])
def test_connectionist_losses_keep_a_table_of_their_longest_target(padded):
    def make_step(batch):
        scores = torch.randn(20, batch, 7, device="cuda", requires_grad=True)
        targets = torch.ones((batch, 5) if padded else (5 * batch,), dtype=torch.int64, device="cuda")
        lengths = [torch.full((batch,), length, dtype=torch.int64, device="cuda") for length in (20, 5)]
        return lambda: nn.functional.ctc_loss(scores.log_softmax(-1), targets, *lengths).backward()

    ops = {op.name: op for op in capture_step(make_step, batch_size=3, name="x", rebatch=False).programs[0].ops}
    assert [t.spec.shape for t in ops["aten::_ctc_loss"].outputs] == [(3,), (3, 20, 11)]
    assert ops["aten::_ctc_loss_backward"].outputs[0].spec.shape == (20, 3, 7)
