"""Softmax, layer norm, batch norm."""

from __future__ import annotations

import numpy as np
import pytest

from tests.costs.kernels.model_checks import check_contract
from traincast.costs.kernels.contract import Calls
from traincast.costs.kernels.families import load_shipped_model
from traincast.costs.kernels.rowwise import NORM, SOFTMAX
from traincast.hardware import list_device_keys, load_device


def calls_of(family, kind, rows, cols, compute="fp32") -> Calls:
    values = np.stack(np.broadcast_arrays(np.asarray(rows, float), np.asarray(cols, float)), axis=-1).reshape(-1, 2)
    return Calls.from_columns(family, [kind] * len(values), [compute] * len(values), values)


def seconds(family, kind, rows, cols, device, compute="fp32") -> np.ndarray:
    return load_shipped_model(family.name).predict(calls_of(family, kind, rows, cols, compute), device).seconds


def everything(family) -> Calls:
    rows, cols = np.meshgrid([1, 7, 128, 4096, 100_000], [1, 33, 768, 1024, 1025, 4096, 30_000])
    parts = [calls_of(family, kind, rows.ravel(), cols.ravel()) for kind in family.kinds]
    return Calls(
        family,
        np.concatenate([p.kind for p in parts]),
        np.concatenate([p.compute for p in parts]),
        np.concatenate([p.values for p in parts]),
    )


@pytest.mark.parametrize("key", list_device_keys())
@pytest.mark.parametrize("family", [SOFTMAX, NORM], ids=["softmax", "norm"])
def test_contract_on_every_device(family, key):
    check_contract(load_shipped_model(family.name), everything(family), load_device(key))


@pytest.mark.parametrize("key", ["v100", "a100-40gb", "t4", "mi210", "h100"])
@pytest.mark.parametrize(("family", "kind"), [(SOFTMAX, "forward"), (SOFTMAX, "backward"), (NORM, "layer_forward")])
def test_eight_times_the_rows_take_longer(family, kind, key):
    rows = 8.0 ** np.arange(1, 8)
    for cols in (512, 1024, 3000, 8192):
        assert (np.diff(seconds(family, kind, rows, cols, load_device(key))) > 0).all()


@pytest.mark.parametrize("key", list_device_keys())
@pytest.mark.parametrize(("family", "kind", "passes"), [(SOFTMAX, "forward", 4), (NORM, "layer_forward", 3)])
def test_rows_far_wider_than_measured_move_each_value_at_most_once_a_pass(family, kind, passes, key):
    device = load_device(key)
    least = 65536 * 200_000 * 4 / device.dram_bandwidth
    took = seconds(family, kind, 65536, 200_000, device)[0]
    assert 1.9 * least < took < 1.9 * passes * least


def test_softmax_s_backward_moves_half_as_much_again_and_half_precision_half_as_much():
    device = load_device("v100")
    forward = seconds(SOFTMAX, "forward", 65536, 512, device)[0]
    assert seconds(SOFTMAX, "backward", 65536, 512, device)[0] == pytest.approx(1.5 * forward, rel=0.01)
    assert seconds(SOFTMAX, "forward", 65536, 512, device, "fp16")[0] < 0.75 * forward


@pytest.mark.parametrize(
    ("channels", "positions", "forward_us", "backward_us"),
    [(64, 32 * 112 * 112, 450, 920), (256, 32 * 56 * 56, 403, 672), (512, 32 * 28 * 28, 209, 346),
     (1024, 32 * 14 * 14, 87, 189)],
)  # fmt: skip
def test_batch_norm_agrees_with_a_v100_trace_that_is_in_no_fit(channels, positions, forward_us, backward_us):
    device = load_device("v100-dgxs")
    assert 1e6 * seconds(NORM, "batch_forward", channels, positions, device)[0] == pytest.approx(forward_us, rel=0.25)
    assert 1e6 * seconds(NORM, "batch_backward", channels, positions, device)[0] == pytest.approx(backward_us, rel=0.25)


def test_a_block_for_every_channel_leaves_most_of_a_large_chip_idle():
    device = load_device("mi300x")
    few, many = (seconds(NORM, "batch_statistics", channels, 2**22 // channels, device)[0] for channels in (64, 512))
    assert few > 3 * many
    assert seconds(NORM, "batch_backward_own", 64, 2**16, device)[0] == pytest.approx(
        2 * seconds(NORM, "batch_statistics", 64, 2**16, device)[0], rel=0.1
    )


def test_only_measured_kernels_are_in_domain():
    model = load_shipped_model("norm")
    known = model.predict(everything(NORM), load_device("v100"))
    forward = everything(NORM).is_kind("layer_forward")
    assert known.in_domain[forward].any()
    assert not known.in_domain[~forward].any()
    assert not model.predict(everything(NORM), load_device("h100")).in_domain.any()


def test_batch_norm_in_bfloat16_takes_the_same_on_two_cards_with_one_chip():
    cards = [load_device(key) for key in ("a100-40gb", "a100-80gb")]
    for channels, positions in ((64, 2**18), (64, 2**16), (2048, 2**13)):
        small, large = (seconds(NORM, "batch_statistics", channels, positions, card, "bf16")[0] for card in cards)
        assert 0.7 < large / small <= 1.0


def test_all_sms_share_a_few_channels_where_they_are_last():
    device = load_device("rtx-3090")
    first, last = (seconds(NORM, f"batch_forward{end}", 16, 2**22, device, "fp16")[0] for end in ("", "_last"))
    assert first > 3 * last
    assert last > 3 * 2 * 16 * 2**22 / device.dram_bandwidth


def test_few_columns_leave_most_sms_idle_in_old_releases():
    device = load_device("rtx-3090")
    old, new = (seconds(NORM, f"layer_backward_{end}", 100_000, 192, device)[0] for end in ("columns", "weights"))
    assert old > 5 * new
