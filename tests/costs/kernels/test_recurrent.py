"""Recurrent layers: their GEMMs over all time steps, and the steps that wait for each other."""

from __future__ import annotations

import pytest

from tests.costs.kernels.signatures import MODERN, field, kernels, lowered, tensor
from traincast.costs.kernels.contract import Calls
from traincast.costs.kernels.cost import Source, price_calls
from traincast.costs.kernels.registry import LoweringContext
from traincast.hardware import load_device
from traincast.utils.errors import TraincastError

STEPS, BATCH, INPUTS, HIDDEN = 50, 64, 512, 1024


def layers(name="aten::_cudnn_rnn", *, mode=2, number=2, context=MODERN, source=None, dtype="float32", **options):
    """What an op of `number` layers is lowered to; `source` is its input, steps before samples unless told."""
    source = source or tensor(STEPS, BATCH, INPUTS, dtype=dtype)
    state = tensor(number, BATCH, HIDDEN, dtype=dtype)
    scalars = {"mode": mode, "hidden_size": HIDDEN, "proj_size": 0, "num_layers": number, **options}
    output = tensor(STEPS, BATCH, HIDDEN, dtype=dtype)
    return lowered(name, {"input": source, "hx": state}, [output], context, **scalars)


def flops(items):
    """Of the GEMMs, and of the time steps."""
    total = 0.0
    for item in items:
        if item.family.name == "gemm":
            total += 2 * field(item, "batch") * field(item, "m") * field(item, "n") * field(item, "k")
        else:
            gates = field(item, "gates") * field(item, "hidden")
            total += 2 * field(item, "steps") * field(item, "batch") * gates * field(item, "outputs")
    return total


@pytest.mark.parametrize(("mode", "gates"), [(0, 1), (1, 1), (2, 4), (3, 3)])
def test_a_layer_is_one_product_and_its_time_steps(mode, gates):
    product, loop = layers(mode=mode, number=1)
    assert [field(product, name) for name in "mnk"] == [STEPS * BATCH, gates * HIDDEN, INPUTS]
    assert (field(loop, "steps"), field(loop, "gates")) == (STEPS, gates)
    assert flops((product, loop)) == 2 * STEPS * BATCH * gates * HIDDEN * (INPUTS + HIDDEN)


def test_upper_layers_read_what_the_one_below_hands_on():
    items = layers(number=2, bidirectional=True)
    assert kernels(items) == ["gemm:bmm", "recurrent:forward"] * 2
    assert [field(item, "k") for item in items[::2]] == [INPUTS, 2 * HIDDEN]
    assert [field(item, "directions") for item in items[1::2]] == [2, 2]


def test_backward_is_twice_the_arithmetic():
    there, back = layers(number=3), layers("aten::_cudnn_rnn_backward", number=3)
    assert flops(back) == 2 * flops(there)
    assert kernels(back)[:4] == ["recurrent:backward", "gemm:mm", "gemm:mm", "gemm:mm"]


def test_backward_leaves_out_weights_that_nobody_trains():
    back = layers("aten::_cudnn_rnn_backward", number=1, output_mask=(True, True, True, False))
    assert kernels(back) == ["recurrent:backward", "gemm:mm"]


def test_samples_may_stand_before_steps():
    assert layers(batch_first=True, source=tensor(BATCH, STEPS, INPUTS)) == layers()


def test_packed_sequences_cost_the_rows_that_they_have():
    sizes = (BATCH,) * (STEPS // 2) + (BATCH // 2,) * (STEPS // 2)
    product, loop = layers(number=1, source=tensor(sum(sizes), INPUTS), batch_sizes=sizes)
    assert field(product, "m") == STEPS * BATCH * 3 // 4
    assert (field(loop, "steps"), field(loop, "batch")) == (STEPS, BATCH * 3 // 4)


def test_a_projection_is_a_product_more_and_narrows_what_follows():
    items = layers(number=2, proj_size=256)
    assert kernels(items) == ["gemm:mm", "recurrent:forward", "gemm:mm"] * 2
    assert field(items[1], "outputs") == 256
    assert field(items[3], "k") == 256


def test_fp32_runs_in_tf32_where_convolutions_may():
    assert layers(context=LoweringContext(tf32_convolutions=True))[0].compute == "tf32"
    assert layers()[0].compute == "fp32"


@pytest.mark.parametrize(
    ("change", "said"),
    [({"source": tensor(900, INPUTS)}, "packed"), ({"mode": 7}, "mode 7"), ({"hidden_size": 0}, "0 hidden units")],
)
def test_what_is_no_layer_is_refused_by_name(change, said):
    with pytest.raises(TraincastError, match=said):
        layers(**change)


def test_a_fused_cell_is_one_pointwise_kernel():
    gates, state = tensor(BATCH, 4 * HIDDEN), tensor(BATCH, HIDDEN)
    inputs = {"input_gates": gates, "hidden_gates": gates, "cx": state}
    items = lowered("aten::_thnn_fused_lstm_cell", inputs, [state, state, gates])
    assert kernels(items) == ["elementwise:tanh"]
    assert not items[0].estimated


def seconds(items, device="a100-40gb"):
    total = 0.0
    for item in items:
        estimate, source = price_calls(Calls.of(item.family, [item]), load_device(device))
        assert source is (Source.MODEL if item.family.name == "gemm" else Source.ROOFLINE)
        total += float(estimate.seconds[0])
    return total


def test_a_large_lstm_takes_what_its_arithmetic_needs():
    """Four layers of 1,024 at batch 256 and 100 steps in fp32: 1.7 Tflop forward, twice that backward."""
    source = tensor(100, 256, 1024)
    there, back = (layers(name, number=4, source=source) for name in ("aten::_cudnn_rnn", "aten::_cudnn_rnn_backward"))
    device = load_device("a100-40gb")
    least = (flops(there) + flops(back)) / device.get_peak_flops("fp32")
    assert least > 0.2
    assert least < seconds((*there, *back)) < 3 * least


def test_steps_that_compute_little_still_wait_for_each_other():
    short, long = (seconds(layers(number=1, source=tensor(steps, 1, 8))[1:]) for steps in (10, 1000))
    assert 50 < long / short < 101
    assert long > 1000 * 1e-6
