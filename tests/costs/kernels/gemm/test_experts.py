"""Layers of experts in one call."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from traincast_evaluation.kernels.gemm.other_sources import ExpertLayer, evaluate_experts

from traincast.costs.kernels.families import shipped_model
from traincast.hardware import load_device


def layers(tokens, **changed):
    """Mixtral-like layers for these numbers of tokens."""
    tokens = np.asarray(tokens, dtype=float)
    one = np.ones(len(tokens))
    sizes = {"hidden": 4096, "inter": 14336, "topk": 2, "experts": 8, "tp": 1, "ep": 1, "gated": 1} | changed
    return ExpertLayer(tokens=tokens, **{name: value * one for name, value in sizes.items()})


def seconds(layer, key="h100"):
    return layer.seconds(shipped_model("gemm"), load_device(key), "bf16")


def test_more_tokens_take_longer_and_long_layers_near_the_peak():
    times = seconds(layers([64, 512, 4096, 32768, 262144]))
    assert (np.diff(times) > 0).all()
    flop = 2 * 262144 * 2 * 3 * 4096 * 14336
    assert 0.4 < flop / times[-1] / 989.4e12 < 0.85


def test_one_token_reads_the_weights_of_its_experts_only():
    one, all_of_them = seconds(layers([1, 64]))
    weights = 3 * 2 * 4096 * 14336 / load_device("h100").dram_bandwidth
    assert 2 * weights * 0.8 < one < 8 * weights
    assert all_of_them > 2 * one


def test_ranks_share_experts_or_their_width():
    whole = seconds(layers([65536]))[0]
    by_expert, by_width = seconds(layers([65536], ep=8))[0], seconds(layers([65536], tp=8))[0]
    assert whole / 9 < by_expert < whole / 5
    assert by_width > by_expert  # the rows of tokens stay whole
    gated = layers([4096])
    assert seconds(replace(gated, gated=np.zeros(1)))[0] < seconds(gated)[0]


def test_shapes_never_seen(shared_data):
    rows = {row.group: row for row in evaluate_experts(shared_data)}
    for key in ("h100", "h200", "b200", "gb200"):
        assert rows[f"{key}, shapes never seen"].gmae <= 15
        assert rows[f"{key}, shapes never seen"].n == pytest.approx(0.25 * rows[f"{key}, shapes seen"].n, rel=0.3)
