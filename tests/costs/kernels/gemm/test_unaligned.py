"""Half-precision GEMMs of rows that no vector load fits."""

from __future__ import annotations

import pytest

from traincast.costs.kernels.contract import Calls
from traincast.costs.kernels.cost import price_calls
from traincast.costs.kernels.gemm import GEMM
from traincast.hardware.platform import load_device


def seconds(n, compute="bf16", device="h100", k=64, *, kind="bmm", batch=16, m=5185):
    call = GEMM.call(kind, compute, batch=batch, m=m, n=n, k=k, trans_a=0, trans_b=1, bias=0)
    estimate, _ = price_calls(Calls.of(GEMM, [call]), load_device(device))
    return float(estimate.seconds[0])


def test_odd_rows_are_loaded_element_by_element_since_ampere():
    odd, aligned = seconds(5185), seconds(5184)
    assert odd > 2 * aligned
    assert odd == pytest.approx(1083e-6, rel=0.3)  # as an H100 took, cutlass_75 ... align1


def test_wider_loads_take_less():
    assert seconds(5185) > 1.3 * seconds(5186)
    assert seconds(5186) == pytest.approx(seconds(5188), rel=0.05)  # the units are fed as slowly, whatever is moved


def test_rows_of_whole_pairs_take_twice_as_long_as_aligned_ones():
    pairs, aligned = (seconds(n, k=512, kind="linear", batch=1, m=141) for n in (30_522, 30_528))
    assert pairs > 1.7 * aligned
    assert pairs == pytest.approx(41.3e-6, rel=0.15)  # as an H100 took for BERT's words, cutlass_80 ... align2


def test_other_types_and_older_devices_keep_their_own_rules():
    assert seconds(5185, compute="fp32") < 1.2 * seconds(5184, compute="fp32")
    assert seconds(5185, device="t4") < 2.5 * seconds(5184, device="t4")
